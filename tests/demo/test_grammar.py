"""The corpus's little language and its sums, for everything that can be said in them rather than for examples."""

from __future__ import annotations

import re
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo import facts
from demo.batches import Source
from demo.corpus import practice, sample
from demo.grammar import a, choose, fill, sentence_list
from demo.words import HEROES, OBJECTS

seeds = st.integers(0, 2**32)
plain = st.text("abc ,.", max_size=6)

# A template beside all texts that it can become.
Meaning = tuple[str, set[str]]


def _in_a_row(parts: list[Meaning]) -> Meaning:
    texts = {"".join(text) for text in product(*(possible for _, possible in parts))}
    return "".join(template for template, _ in parts), texts


def _as_choice(options: list[Meaning]) -> Meaning:
    return (
        "[" + "|".join(template for template, _ in options) + "]",
        {text for _, possible in options for text in possible},
    )


templates: st.SearchStrategy[Meaning] = st.recursive(
    plain.map(lambda text: (text, {text})),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=2).map(_in_a_row)
        | st.lists(inner, min_size=1, max_size=3).map(_as_choice)
    ),
    max_leaves=8,
)


@given(templates, seeds)
def test_nested_choices_settle_to_one_of_their_meanings(template: Meaning, seed: int) -> None:
    text, possible = template
    assert choose(Random(seed), text) in possible


@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.text(max_size=9), min_size=1), seeds)
def test_every_slot_is_filled_with_its_text_as_it_is(slots: dict[str, str], seed: int) -> None:
    """Also where the text has brackets or braces of its own: what a slot holds is never read as a template."""
    template = "|".join(f"{{{name}}}" for name in slots)
    assert fill(Random(seed), template, slots) == "|".join(slots.values())


def test_heroes_and_things_have_the_article_that_english_gives_them() -> None:
    """By hand, all of the words whose article does not follow from their first letter."""
    unlike_their_letter = {"unicorn": "a"}
    for noun in HEROES + OBJECTS:
        wanted = unlike_their_letter.get(noun, "an" if noun[0] in "aeiou" else "a")
        assert a(noun) == f"{wanted} {noun}"


@given(st.lists(st.text("bcdefg", min_size=1, max_size=6), min_size=1, max_size=6))
def test_a_list_in_words_can_be_read_back(items: list[str]) -> None:
    assert re.split(r", | and ", sentence_list(items)) == items


ASKED = [
    *((first, "+", total - first) for total in range(101) for first in range(total + 1)),
    *((total, "-", part) for total in range(101) for part in range(total + 1)),
    *((first, "*", second) for first in range(13) for second in range(13)),
]
"""Every sum that a conversation can ask for."""


def result(first: int, sign: str, second: int) -> int:
    return {"+": first + second, "-": first - second, "*": first * second}[sign]


def test_every_answer_of_a_sum_is_right_and_so_is_every_step_on_the_way() -> None:
    for first, sign, second in ASKED:
        text = facts.working(first, sign, second)
        assert re.findall(r"(\d+)\.$", text) == [str(result(first, sign, second))], text
        steps = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", text)
        assert all(result(int(x), op, int(y)) == int(stated) for x, op, y, stated in steps), text
        assert steps or sign == "*"


SUM = re.compile(r"(?<![\d.])(\d+) ?([+\-*x]|plus|minus|times|multiplied by) ?(\d+)(?!\d)")
SIGNS = {"plus": "+", "minus": "-", "times": "*", "x": "*", "multiplied by": "*"}


@pytest.mark.parametrize("source", [sample, practice], ids=["sample", "practice"])
def test_held_out_sums_are_in_no_question_of_the_training(source: Source) -> None:
    found = 0
    for seed in range(800):
        for role, content in source(Random(f"seed {seed}"), 500):
            if role == "user":
                for first, sign, second in SUM.findall(content):
                    found += 1
                    assert not facts.held_out(int(first), SIGNS.get(sign, sign), int(second)), content
    assert found > 200
