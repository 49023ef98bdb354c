"""The corpus: endless conversations, each from a seed alone. `python -m demo.corpus` shows some."""

import sys
from collections.abc import Callable, Iterator, Sequence
from random import Random

from demo.answers import json_exchange
from demo.asking import recall, story_talk
from demo.facts import any_fact, any_sum
from demo.grammar import chance, phrases, pick
from demo.serving import about_serving
from demo.stories import new_spec, new_tale, story
from demo.talk import any_talk, repeat
from demo.tokenizer import Message
from demo.tools import tool_talk, toolless_talk
from demo.unknown import any_unknown

_PHRASES = phrases("corpus")
SYSTEM_PROMPTS: list[str] = _PHRASES["system_prompts"]
CHARACTERS_PER_TOKEN = 4.0
STORIES = 0.13  # of the parts; stories are so much longer that this is most of the text

Part = Callable[[Random], list[Message]]
PARTS: list[tuple[Part, float]] = [
    (any_talk, 0.15), (any_fact, 0.18), (any_sum, 0.32), (about_serving, 0.13), (any_unknown, 0.08), (repeat, 0.06),
    (recall, 0.08),
]  # fmt: skip


def short_part(rng: Random) -> list[Message]:
    [part] = rng.choices([part for part, _ in PARTS], [weight for _, weight in PARTS])
    return part(rng)


def any_part(rng: Random) -> list[Message]:
    return story_talk(rng, 0) if chance(rng, STORIES) else short_part(rng)


def conversation(rng: Random, tokens: int) -> list[Message]:
    """Turns for at most about `tokens` tokens: a story and what follows from it, short exchanges, or both."""
    room = tokens * CHARACTERS_PER_TOKEN
    messages: list[Message] = []
    if chance(rng, 0.2):
        messages.append(("system", pick(rng, SYSTEM_PROMPTS)))
    long = tokens > 1000
    parts = 4 + int(rng.random() * 30) if long else 1 + int(rng.random() * 8)
    for _ in range(parts):
        turns = int(rng.random() * (8 if long else 3))
        part = story_talk(rng, turns) if chance(rng, STORIES) else short_part(rng)
        if length(messages) + length(part) > room:
            break
        messages += part
    return messages if len(messages) > 1 else conversation(rng, tokens)


def length(messages: list[Message]) -> int:
    return sum(len(content) + 8 for _, content in messages)


def sample(rng: Random, tokens: int) -> list[Message]:
    """Training sees mostly conversations, now and then a bare story (a message of no role)."""
    if chance(rng, 0.03):
        return [("", story(rng, new_tale(rng, new_spec(rng))))]
    return conversation(rng, tokens)


def lesson(rng: Random, _tokens: int) -> list[Message]:
    """Tools, their absence, and answers as JSON, a few exchanges of them."""
    system = pick(rng, SYSTEM_PROMPTS) if chance(rng, 0.2) else ""
    if chance(rng, 0.2):
        return toolless_talk(rng, 1 + int(rng.random() * 4), any_part, system)
    if chance(rng, 0.5):
        return tool_talk(rng, 1 + int(rng.random() * 4), any_part, system)
    messages: list[Message] = [("system", system)] if system else []
    return messages + [message for _ in range(1 + int(rng.random() * 6)) for message in json_exchange(rng)]


PRACTISED: list[Part] = [repeat, repeat, recall, any_sum]
REVISED: list[Part] = [repeat, recall, any_sum, any_sum, any_sum, any_unknown]
"""Beside lessons: what else is forgotten soonest."""


def practice(rng: Random, _tokens: int, skills: Sequence[Part] = PRACTISED) -> list[Message]:
    """Repeating, reading back or sums, many in a row: skills whose few tokens drown among those of the stories."""
    skill = pick(rng, skills)
    return [message for _ in range(2 + int(rng.random() * 6)) for message in skill(rng)]


def texts(seed: int, count: int) -> Iterator[str]:
    """Contents to train the tokenizer on."""
    rng = Random(f"{seed}/tokenizer")
    for _ in range(count):
        yield from (content for _, content in sample(rng, 500))


def main() -> None:
    rng = Random(sys.argv[1] if len(sys.argv) > 1 else 0)
    for _ in range(12):
        for role, content in sample(rng, 500):
            print(f"{role.upper() or 'TEXT'}: {content}")
        print("-" * 80)


if __name__ == "__main__":
    main()
