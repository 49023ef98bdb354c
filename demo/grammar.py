"""The little language the corpus is written in: `[one|other]` is a choice, `{name}` a slot; both nest."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
INNERMOST_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def pick(rng: Random, options: Sequence[T]) -> T:
    return options[int(rng.random() * len(options))]


def chance(rng: Random, probability: float) -> bool:
    return rng.random() < probability


def choose(rng: Random, template: str) -> str:
    """Settles every `[one|other]`, the inner ones first."""
    while "[" in template:
        template = INNERMOST_CHOICE.sub(lambda match: pick(rng, match[1].split("|")), template)
    return template


def fill(rng: Random, template: str, slots: Mapping[str, str] | None = None) -> str:
    text = choose(rng, template)
    return text.format_map(slots) if slots else text


def a(noun: str) -> str:
    """The noun with its article: an owl, a unicorn, an hour."""
    vowel = noun[:1].lower() in "aeiou" and not noun.lower().startswith(("uni", "one", "eu", "use"))
    return f"{'an' if vowel or noun.lower().startswith(('hour', 'honest')) else 'a'} {noun}"


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def sentence_list(items: Sequence[str]) -> str:
    """one, two and three"""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def as_typed(rng: Random, text: str) -> str:
    """Writes a request as people really type it: lower case, no full stop, now and then a slip."""
    if chance(rng, 0.35):
        text = text.lower()
    if chance(rng, 0.4):
        text = text.rstrip(".!?")
    if chance(rng, 0.04) and len(text) > 12:
        at = 1 + int(rng.random() * (len(text) - 3))
        if text[at].isalpha() and text[at + 1].isalpha():
            text = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text


def phrases(name: str) -> Any:
    """The templates and word lists of a file in phrases/."""
    path = Path(__file__).with_name("phrases") / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))
