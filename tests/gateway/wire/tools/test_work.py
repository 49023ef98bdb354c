"""A parser's work is linear in its text, whatever the text says and however it comes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import SupportsIndex

import pytest

from penstock.gateway.wire.parsing import ReplyParser
from penstock.gateway.wire.reading import NONE, Formats, Reading
from penstock.gateway.wire.reasoning import REASONING_FORMATS, Thoughts
from penstock.gateway.wire.tools import scanning
from penstock.gateway.wire.tools.formats import TOOL_FORMATS
from tests.gateway.harness import make_tokenizer
from tests.gateway.wire.tools.test_formats import SCHEMAS
from tests.gateway.wire.tools.test_grammars import WRITTEN

LENGTH = 200
TOKENIZER = make_tokenizer()
MOST_GROWTH = 2.2
"""Twice the text may take about twice the work."""

HEADS = [
    '{"arguments":[',
    '[{"arguments":[',
    '[{"arguments":"',
    '{"name":"',
    '{"name": "clock", "arguments": {"zone": "',
    '{"name": "clock", "arguments": {}, "x": ',
    "clock",
    "clock(zone='",
    "[clock(zone='",
    '[clock(zone="a", ',
    "[clock(zone=[",
    "[clock(), ",
    'clock[ARGS]{"a":',
    "clock\n",
    "call:clock{zone:",
    'call:clock{zone:<|"|>',
    "<function=clock><parameter=",
    "<function=clock><parameter=zone>",
    '<function="clock">',
    '<invoke name="clock"><parameter name="zone">',
    '<param name="zone"><![CDATA[',
    "clock<arg_key>",
    "clock<arg_key>zone</arg_key><arg_value>",
    "<tool_call>clock\n```json\n{",
    "to=functions.clock<|message|>",
]
RUNS = [" ", "a", "7", "[", "{", "<", '"', "'", "\\", "' ", "', ", "'), a", "\n"]


class Watched(str):
    """A text that counts the characters that are looked at, in it and in its parts."""

    __slots__ = ()
    looked_at = 0

    def __add__(self, other: str) -> Watched:
        Watched.looked_at += len(other)  # the left side grows in its place
        return Watched(str.__add__(self, other))

    def __radd__(self, other: str) -> Watched:
        Watched.looked_at += len(self)
        return Watched(other + str(self))

    def __getitem__(self, place: SupportsIndex | slice) -> Watched:
        part = Watched(str.__getitem__(self, place))
        Watched.looked_at += len(part)
        return part

    def __contains__(self, part: str) -> bool:  # type: ignore[override]
        Watched.looked_at += len(self)
        return str.__contains__(self, part)

    def find(self, part: str, start: int = 0, *end: int) -> int:  # type: ignore[override]
        place = str.find(self, part, start, *end)
        Watched.looked_at += max(0, (len(self) if place < 0 else place) - start) + len(part)
        return place

    def startswith(self, part: str, *place: int) -> bool:  # type: ignore[override]
        Watched.looked_at += len(part)
        return str.startswith(self, part, *place)

    def rstrip(self) -> Watched:  # type: ignore[override]
        Watched.looked_at += len(self)
        return Watched(str.rstrip(self))

    def lstrip(self) -> Watched:  # type: ignore[override]
        Watched.looked_at += len(self)
        return Watched(str.lstrip(self))

    def partition(self, part: str) -> tuple[str, str, str]:
        Watched.looked_at += 2 * len(self)
        before, found, after = str.partition(self, part)
        return Watched(before), found, Watched(after)


def end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    end = start if match is None else match.end()
    Watched.looked_at += end - start + 1
    return end


def search(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
    match = pattern.search(text, start)
    Watched.looked_at += (len(text) if match is None else match.end()) - start
    return match


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "end_of", end_of)
    monkeypatch.setattr(scanning, "search", search)


def work(reading: Reading, text: str, step: int) -> int:
    """Returns how many characters are looked at in a text that comes in pieces of this length."""
    parser, Watched.looked_at = reading.parser("a"), 0
    for start in range(0, len(text), step):
        parser.feed(Watched(text[start : start + step]))
    parser.finish()
    return Watched.looked_at


def hostile(markers: tuple[str, ...], opening: str, call: str) -> Iterator[tuple[str, str]]:
    """Yields beginnings of texts, and what they repeat."""
    for head in HEADS:
        yield "", opening + head
    for run in RUNS:
        for head in ("", HEADS[2], HEADS[4], HEADS[8], HEADS[10], call[len(opening) : len(call) // 2]):
            yield opening + head, run
    for marker in markers:
        yield "", marker
        yield opening, marker + " "
        yield opening + HEADS[2], marker
        yield call, marker[: len(marker) // 2] + " "
        yield call, marker[:-1] + "a"
    for part in (call, call[:-1], call + "\n", call[: len(call) // 2]):
        yield "", part


def growth(reading: Reading, beginning: str, part: str) -> float:
    """Returns how many times the work twice the repetitions take, whole or a character at a time."""
    number = max(5, LENGTH // len(part))
    short, long = beginning + part * number, beginning + part * (2 * number)
    return max(work(reading, long, step) / work(reading, short, step) for step in (len(long), 1))


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_twice_the_text_is_twice_the_work(format: str) -> None:
    reading = Reading(tools=format, schemas=SCHEMAS)
    given = TOOL_FORMATS[format]
    for beginning, part in hostile(given.markers, given.opening or given.tag, WRITTEN[format]):
        assert growth(reading, beginning, part) <= MOST_GROWTH, (beginning, part)


@pytest.mark.parametrize("format", REASONING_FORMATS)
def test_twice_the_reasoning_is_twice_the_work(format: str) -> None:
    opening, closing = REASONING_FORMATS[format]
    call = WRITTEN["hermes"]
    for is_open in (True, False):
        reading = Reading(tools="hermes", schemas=SCHEMAS, reasoning=format, is_open=is_open)
        for beginning in ("", opening, f"{opening}a{closing}"):
            for part in (
                opening,
                closing,
                f"{closing[:-1]}a",
                f"{closing[:3]} ",
                " ",
                "a",
                call[:11],
                call[-12:],
                call,
            ):
                assert growth(reading, beginning, part) <= MOST_GROWTH, (is_open, beginning, part)


def num_calls(parser: ReplyParser, thoughts: Thoughts | None) -> int:
    """Returns how many functions are called for one more token, which is counted and read."""
    events: list[str] = []
    token_ids = [TOKENIZER.encode("t")[0]]
    sys.setprofile(lambda _frame, event, _arg: events.append(event))
    if thoughts is not None:
        thoughts.count(0, token_ids)
    parser.feed(" token")
    sys.setprofile(None)
    return events.count("call")


@pytest.mark.parametrize(
    ("tools", "reasoning", "before", "most"),
    [
        ("hermes", None, "So", 2),
        ("hermes", "think", "<think>Hm</think>So", 4),
        ("hermes", "think", "<think>Hm", 3),
        ("hermes", None, '<tool_call>{"name": "clock", "arguments": {"zone": "a', 3),
        ("qwen3_coder", None, "<tool_call><function=clock><parameter=zone>a", 4),
        ("gemma4", None, '<|tool_call>call:clock{zone:<|"|>a', 4),
    ],
)
def test_a_token_costs_a_few_calls_wherever_it_stands(
    tools: str, reasoning: str | None, before: str, most: int
) -> None:
    reading = Reading(tools=tools, reasoning=reasoning, schemas=SCHEMAS)
    parser, thoughts = reading.parser("a"), Formats(TOKENIZER, tools, reasoning or NONE).thoughts(reading)
    parser.feed(before)
    if thoughts is not None:
        thoughts.count(0, TOKENIZER.encode(before))
    assert [num_calls(parser, thoughts) for _ in range(3)][-1] <= most
