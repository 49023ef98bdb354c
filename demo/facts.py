# ruff: noqa: E501, SIM905 (word lists and templates: a line per thought)
"""Simple facts and small sums."""

from collections.abc import Callable
from random import Random
from zlib import crc32

from demo.grammar import a, as_typed, chance, fill, phrases, pick, sentence_list, upper_first
from demo.tokenizer import Message
from demo.words import OBJECTS, invented_stem

_PHRASES = phrases("facts")
CAPITALS: dict[str, str] = _PHRASES["capitals"]
COLOURS: dict[str, str] = _PHRASES["colours"]
SOUNDS: dict[str, str] = _PHRASES["sounds"]
LEGS: dict[str, str] = _PHRASES["legs"]
BABIES: dict[str, str] = _PHRASES["babies"]
HOMES: dict[str, str] = _PHRASES["homes"]
OPPOSITES: dict[str, str] = _PHRASES["opposites"]
DEFINITIONS: dict[str, str] = _PHRASES["definitions"]
GROUPS: dict[str, str] = _PHRASES["groups"]
ODDS: list[tuple[str, str]] = [tuple(each) for each in _PHRASES["odds"]]
SMALL = "zero one two three four five six seven eight nine ten eleven twelve".split()
ORDERED = ["days of the week", "months", "planets"]

Fact = Callable[[Random], tuple[str, str]]


def lookup(table: dict[str, str], question: str, answer: str) -> Fact:
    def fact(rng: Random) -> tuple[str, str]:
        key, value = pick(rng, list(table.items()))
        slots = {
            "key": key,
            "Key": upper_first(key),
            "value": value,
            "Value": upper_first(value),
            "a_value": a(value),
        }
        return fill(rng, question, slots), fill(rng, answer, slots)

    return fact


def opposite(rng: Random) -> tuple[str, str]:
    first, second = pick(rng, list(OPPOSITES.items()))
    if chance(rng, 0.4) and list(OPPOSITES.values()).count(second) == 1 and second not in OPPOSITES:
        first, second = second, first
    ask = f"[What is the opposite of|The opposite of|Opposite of|Tell me the opposite of] {first}?"
    return fill(rng, ask), f"The opposite of {first} is {second}."


def listing(rng: Random) -> tuple[str, str]:
    group, names = pick(rng, list(GROUPS.items()))
    members = names.split()
    count = min(len(members), 2 + int(rng.random() * 5))
    word = SMALL[count] if chance(rng, 0.6) else str(count)
    if group in ORDERED and chance(rng, 0.6):
        ask = f"[What are the {group}?|Name all the {group}.|List the {group}.|Name the {group}.]"
        return fill(rng, ask), f"The {group} are {sentence_list(members)}."
    chosen = rng.sample(members, count)
    ask = f"[Name|List|Tell me|Give me|Can you name|Name me] {word} {group}."
    if chance(rng, 0.3):
        return fill(rng, ask), "\n".join(f"{n}. {upper_first(member)}" for n, member in enumerate(chosen, 1))
    return fill(rng, ask), upper_first(sentence_list(chosen)) + "."


def neighbour(rng: Random) -> tuple[str, str]:
    members = GROUPS[pick(rng, ["days of the week", "months"])].split()
    at = int(rng.random() * len(members))
    if chance(rng, 0.5):
        ask = f"[What comes after|Which comes after|What is after] {members[at]}?"
        return fill(rng, ask), f"After {members[at]} comes {members[(at + 1) % len(members)]}."
    return f"What comes before {members[at]}?", f"Before {members[at]} comes {members[at - 1]}."


def counting(rng: Random) -> tuple[str, str]:
    first = 1 if chance(rng, 0.6) else int(rng.random() * 60)
    last = first + 2 + int(rng.random() * 12)
    ask = f"[Count from {first} to {last}.|Can you count from {first} to {last}?|Count {first} to {last}.]"
    if first == 1:
        ask = f"[{ask}|Count to {last}.|Can you count to {last}?]"
    return fill(rng, ask), ", ".join(map(str, range(first, last + 1))) + "."


def spelling(rng: Random) -> tuple[str, str]:
    word = pick(
        rng, [*GROUPS["animals"].split(), *GROUPS["fruits"].split(), *pick(rng, OBJECTS).split(), *SMALL]
    )
    if chance(rng, 0.3):
        word = invented_stem(int(rng.random() * 1e6))
    ask = f"[How do you spell {word}?|Spell {word}.|Spell the word {word}.|How is {word} spelt?]"
    return fill(rng, ask), "-".join(word)


def first_letter(rng: Random) -> tuple[str, str]:
    word = pick(rng, GROUPS[pick(rng, list(GROUPS))].split())
    ask = f"[What is the first letter of {word}?|What letter does {word} start with?]"
    return fill(rng, ask), f"The first letter of {word} is {word[0].upper()}."


def larger(rng: Random) -> tuple[str, str]:
    first, second = int(rng.random() * 100), int(rng.random() * 100)
    if first == second:
        second += 1
    word = pick(rng, ["larger", "bigger", "smaller"])
    answer = min(first, second) if word == "smaller" else max(first, second)
    return f"Which is {word}, {first} or {second}?", f"{answer} is {word} than {first + second - answer}."


def held_out(first: int, sign: str, second: int) -> bool:
    """One sum in thirty is never shown in training; the score asks for these."""
    return crc32(f"{first}{sign}{second}".encode()) % 30 == 0


def numbers(rng: Random, sign: str) -> tuple[int, int]:
    if sign == "*":
        return int(rng.random() * 13), int(rng.random() * 13)
    total = int(rng.random() * 101)
    if chance(rng, 0.3):
        total = int(rng.random() * 20)
    part = int(rng.random() * (total + 1))
    return (part, total - part) if sign == "+" else (total, part)


def working(first: int, sign: str, second: int) -> str:
    """The answer, with the steps in between where it takes more than one."""
    if sign == "*":
        return f"{first} times {second} is {first * second}."
    if sign == "+" and first > 9 and second > 9:
        tens, ones = first // 10 * 10 + second // 10 * 10, first % 10 + second % 10
        steps = f"{first // 10 * 10} + {second // 10 * 10} = {tens}, {first % 10} + {second % 10} = {ones}"
        return f"{steps}, and {tens} + {ones} = {tens + ones}. So {first} + {second} = {first + second}."
    if sign == "-" and second > 9 and second % 10:
        left = first - second // 10 * 10
        steps = f"{first} - {second // 10 * 10} = {left}, and {left} - {second % 10} = {first - second}"
        return f"{steps}. So {first} - {second} = {first - second}."
    return f"{first} {sign} {second} = {first + second if sign == '+' else first - second}."


SUM_ASKS = {
    "+": "[What is|What's|How much is|Calculate|Compute|||Please add:|Can you tell me what is] {x} [+|+|plus|and] {y}[?||]",
    "-": "[What is|What's|How much is|Calculate|Compute|||Can you tell me what is] {x} [-|-|minus] {y}[?||]",
    "*": "[What is|What's|How much is|Calculate|Compute||] {x} [*|x|times|times|multiplied by] {y}[?||]",
}


def one_sum(rng: Random) -> tuple[str, str]:
    while True:
        sign = pick(rng, "++--*")
        first, second = numbers(rng, sign)
        if not held_out(first, sign, second):
            return ask_sum(rng, first, sign, second), working(first, sign, second)


def ask_sum(rng: Random, first: int, sign: str, second: int) -> str:
    ask = fill(rng, SUM_ASKS[sign], {"x": str(first), "y": str(second)}).strip()
    return ask.replace(" + ", "+").replace(" - ", "-") if chance(rng, 0.15) else ask


def word_problem(rng: Random) -> tuple[str, str]:
    things = pick(rng, ["apples", "coins", "marbles", "books", "eggs", "pears", "shells", "stones"])
    who = pick(rng, ["I have", "You have", "Tom has", "Anna has", "Ben has", "Lily has"])
    total = 2 + int(rng.random() * 18)
    part = 1 + int(rng.random() * (total - 1))
    if chance(rng, 0.5):
        text = f"{who} {total} {things} and [eats|loses|gives away|sells] {part}. How many are left?"
        if who[0] in "IY":
            text = text.replace("[eats|loses|gives away|sells]", "[lose|give away|sell]")
        return fill(rng, text), f"{total} - {part} = {total - part}, so {total - part} {things} are left."
    more = "[find|get|buy]" if who[0] in "IY" else "[finds|gets|buys]"
    text = f"{who} {total - part} {things} and {more} {part} more. How many {things} are there[ now|]?"
    return fill(rng, text), f"{total - part} + {part} = {total}, so there are {total} {things}."


def odd(rng: Random) -> tuple[str, str]:
    question, answer = pick(rng, ODDS)
    return fill(rng, question), fill(rng, answer)


FACTS: list[Fact] = [
    lookup(CAPITALS, "[What is the capital of {key}?|What is the capital of {key}?|The capital of {key}?|Capital of {key}?|Which city is the capital of {key}?|Do you know the capital of {key}?]",
           "The capital of {key} is {value}."),
    lookup(CAPITALS, "[Which country has the capital {value}?|{Value} is the capital of which country?|In which country is {value}?|Where is {value}?]", "{Value} is the capital of {key}."),
    lookup(COLOURS, "[What colour is {key}?|Which colour does {key} have?|What is the colour of {key}?|What color is {key}?]", "{Key} is {value}."),
    lookup(SOUNDS, "[What sound does {key} make?|What does {key} say?|What noise does {key} make?]", "{Key} {value}."),
    lookup(LEGS, "[How many legs does {key} have?|How many legs has {key}?]", "{Key} has {value} legs."),
    lookup(BABIES, "[What is the baby of {key} called?|What do you call the young of {key}?]", "The young of {key} is called {a_value}."),
    lookup(HOMES, "[Where does {key} live?|What is the home of {key}?]", "{Key} lives in {a_value}."),
    lookup(DEFINITIONS, "[What is {key}?|What is {key}?|What's {key}?|Define {key}.|Explain what {key} is.|What does {key} mean?]", "{Key} is {value}."),
    opposite, listing, neighbour, counting, spelling, first_letter, larger, odd, odd, listing, opposite,
]  # fmt: skip


def any_fact(rng: Random) -> list[Message]:
    fact = pick(rng, FACTS[:1] * 2 + FACTS[7:8] + FACTS)  # capitals and definitions are many
    question, answer = fact(rng)
    return [("user", as_typed(rng, question)), ("assistant", answer)]


def any_sum(rng: Random) -> list[Message]:
    question, answer = one_sum(rng) if chance(rng, 0.85) else word_problem(rng)
    return [("user", question if chance(rng, 0.6) else question.lower()), ("assistant", answer)]
