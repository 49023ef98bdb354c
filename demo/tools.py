# ruff: noqa: SIM905 (word lists)
"""Conversations with two tools, a calculator and a clock, which are called in the format of Hermes and Qwen."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from zlib import crc32

from demo import facts
from demo.grammar import as_typed, chance, fill, pick
from demo.talk import NO_CLOCK
from demo.tokenizer import CALL_END, CALL_START, RESULT_END, RESULT_START, TOOLS_INTRODUCTION, Message

CITIES = """Paris Berlin Rome Madrid Lisbon London Dublin Vienna Warsaw Oslo Stockholm Athens Moscow Cairo Tokyo
Washington""".split()
ASK_TIME = ["What time is it", "What time is it", "What's the time", "What is the time", "How late is it",
    "Tell me the time", "Time"]  # fmt: skip
DIVISION = "[What is|What's|How much is|Calculate|Compute||] {x} [/|/|divided by] {y}[?||]"
OTHERS = ["get_weather(city): [Tells the weather|The weather in a city].", "search(query): Searches the web."]

Exchange = Callable[[Random, bool], list[Message]]


@dataclass(frozen=True)
class Tool:
    """A tool as the corpus has it."""

    line: str
    """A template of its line in the system's turn."""
    topic: str
    """A pattern of questions that only this tool should answer."""
    exchange: Exchange
    """A question, the call, its result and the answer; such as are held out, or such as are not."""


def calculator_exchange(rng: Random, unseen: bool) -> list[Message]:
    question, expression, result = calculation(rng, unseen)
    return [
        ("user", question),
        ("assistant", call("calculator", {"expression": expression})),
        ("user", tool_result(rng, "result", json.loads(result))),
        ("assistant", f"It is {result}."),
    ]


def calculation(rng: Random, unseen: bool) -> tuple[str, str, str]:
    """A question, the expression that it asks for, and its value."""
    while True:
        sign = pick(rng, "+++--***/")
        first, second = any_number(rng), any_number(rng)
        if facts.held_out(first, sign, second) == unseen and (second or sign != "/"):
            break
    if sign == "/":
        question = fill(rng, DIVISION, {"x": str(first), "y": str(second)}).strip()
        value = f"{first / second:.4f}".rstrip("0").rstrip(".")
    else:
        question = facts.ask_sum(rng, first, sign, second)
        value = str({"+": first + second, "-": first - second, "*": first * second}[sign])
    return question if chance(rng, 0.7) else question.lower(), f"{first} {sign} {second}", value


def any_number(rng: Random) -> int:
    [digits] = rng.choices([1, 2, 3, 4], [0.2, 0.45, 0.25, 0.1])
    return int(rng.random() * 10**digits)


def clock_exchange(rng: Random, unseen: bool) -> list[Message]:
    asked, city = wording_and_city(rng, unseen)
    time = f"{int(rng.random() * 24):02}:{int(rng.random() * 60):02}"
    here = not unseen and chance(rng, 0.2)
    where = "" if here else f" in {city}"
    return [
        ("user", time_question(rng, asked, where)),
        ("assistant", call("clock", {} if here else {"city": city})),
        ("user", tool_result(rng, "time", time)),
        ("assistant", f"It is {time}{where}."),
    ]


def no_clock(rng: Random) -> list[Message]:
    """The time is asked for, and there is no tool that tells it."""
    where = f" in {pick(rng, CITIES)}" if chance(rng, 0.3) else ""
    answer = fill(rng, NO_CLOCK)
    return [("user", time_question(rng, pick(rng, ASK_TIME), where)), ("assistant", answer)]


def time_question(rng: Random, asked: str, where: str) -> str:
    """The city keeps its capital: a call has to spell it as it is."""
    return f"{as_typed(rng, asked)}{where}{pick(rng, ['?', '?', ''])}"


def wording_and_city(rng: Random, unseen: bool) -> tuple[str, str]:
    while True:
        asked, city = pick(rng, ASK_TIME), pick(rng, CITIES)
        if held_out(asked, city) == unseen:
            return asked, city


def held_out(asked: str, city: str) -> bool:
    return crc32(f"{asked}/{city}".encode()) % 10 == 0


WORKS_OUT = ["Works out a sum.", "Calculates.", "Does sums.", "Evaluates an expression.",
    "Adds, subtracts, multiplies and divides."]  # fmt: skip
TELLS_TIME = [
    "Tells the time.",
    "Tells the time in a city.",
    "[Get|Gets|Returns] the current time[| in a city].",
]


def line(signature: str, descriptions: list[str]) -> str:
    return f"{signature}[|: {'|: '.join(descriptions)}]"


CALCULATOR = Tool(line("calculator(expression)", WORKS_OUT), r"\d", calculator_exchange)
CLOCK = Tool(line("clock(city)", TELLS_TIME), r"\b(time|day|date|year)\b", clock_exchange)
TOOLS = [CALCULATOR, CLOCK]


def call(name: str, arguments: Mapping[str, object]) -> str:
    return f"{CALL_START}{json.dumps({'name': name, 'arguments': arguments})}{CALL_END}"


def tool_result(rng: Random, key: str, value: object) -> str:
    """A tool answers with a bare value, or with an object that has it."""
    text = str(value) if chance(rng, 0.8) else json.dumps({key: value})
    return f"{RESULT_START}{text}{RESULT_END}"


def tools_turn(rng: Random, tools: list[Tool], system: str = "") -> Message:
    """Writes tools and a system's message as the chat template does, now and then with a tool that nobody needs."""
    lines = [tool.line for tool in tools] + ([pick(rng, OTHERS)] if chance(rng, 0.15) else [])
    rng.shuffle(lines)
    start = f"{system}\n\n{TOOLS_INTRODUCTION}" if system else TOOLS_INTRODUCTION
    return "system", "\n".join([start, *(fill(rng, line) for line in lines)])


def tool_talk(
    rng: Random, parts: int, ordinary: Callable[[Random], list[Message]], system: str = ""
) -> list[Message]:
    """Some tools, and as many exchanges: most of them need one, the others are `ordinary`."""
    tools = TOOLS if chance(rng, 0.6) else [pick(rng, TOOLS)]
    messages = [tools_turn(rng, tools, system)]
    for _ in range(parts):
        if chance(rng, 0.7):
            messages += pick(rng, tools).exchange(rng, False)
        elif CLOCK not in tools and chance(rng, 0.3):
            messages += no_clock(rng)
        else:
            messages += without(rng, tools, ordinary)
    return messages


def toolless_talk(
    rng: Random, parts: int, ordinary: Callable[[Random], list[Message]], system: str = ""
) -> list[Message]:
    """Mixes `ordinary` exchanges with questions that would be calls if there were tools."""
    messages: list[Message] = [("system", system)] if system else []
    for _ in range(parts):
        messages += no_clock(rng) if chance(rng, 0.5) else ordinary(rng)
    return messages


def without(rng: Random, tools: list[Tool], ordinary: Callable[[Random], list[Message]]) -> list[Message]:
    """An exchange that needs none of the tools."""
    topics = re.compile("|".join(tool.topic for tool in tools), re.IGNORECASE)
    while True:
        messages = ordinary(rng)
        if not any(topics.search(content) for role, content in messages if role == "user"):
            return messages
