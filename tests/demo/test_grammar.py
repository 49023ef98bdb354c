"""The corpus's little language and its sums, for everything that can be said in them rather than for examples."""

from __future__ import annotations

import re
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo import facts, stories
from demo.batches import Source
from demo.corpus import conversation, practice, sample
from demo.grammar import a, as_typed, choose, fill, sentence_list, upper_first
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


@given(templates)
def test_every_meaning_of_a_choice_is_said_by_some_seed(template: Meaning) -> None:
    text, possible = template
    if len(possible) <= 3:
        assert {choose(Random(seed), text) for seed in range(400)} == possible


@given(templates, seeds)
def test_the_same_seed_chooses_the_same(template: Meaning, seed: int) -> None:
    assert choose(Random(seed), template[0]) == choose(Random(seed), template[0])


@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.text(max_size=9), min_size=1), seeds)
def test_every_slot_is_filled_with_its_text_as_it_is(slots: dict[str, str], seed: int) -> None:
    """Also where the text has brackets or braces of its own: what a slot holds is never read as a template."""
    template = "|".join(f"{{{name}}}" for name in slots)
    assert fill(Random(seed), template, slots) == "|".join(slots.values())


@given(seeds)
def test_slots_stand_inside_choices(seed: int) -> None:
    slots = {"x": "one", "y": "[two|three]"}
    said = fill(Random(seed), "[{x}|<[{y}|{x}]>]", slots)
    assert said in ("one", "<one>", "<[two|three]>")


@given(st.text("abcdefghijklmnopqrstuvwxyz", min_size=1))
def test_an_article_is_put_before_the_noun(noun: str) -> None:
    article, rest = a(noun).split(" ", 1)
    assert rest == noun
    assert article in ("a", "an")


def test_heroes_and_things_have_the_article_that_english_gives_them() -> None:
    """By hand, all of the words whose article does not follow from their first letter."""
    unlike_their_letter = {"unicorn": "a"}
    for noun in HEROES + OBJECTS:
        wanted = unlike_their_letter.get(noun, "an" if noun[0] in "aeiou" else "a")
        assert a(noun) == f"{wanted} {noun}"


@given(st.lists(st.text("bcdefg", min_size=1, max_size=6), min_size=1, max_size=6))
def test_a_list_in_words_can_be_read_back(items: list[str]) -> None:
    assert re.split(r", | and ", sentence_list(items)) == items


@given(st.text(min_size=1, max_size=12))
def test_a_capital_changes_the_first_letter_only(text: str) -> None:
    assert upper_first(text).endswith(text[1:])
    assert upper_first(upper_first(text)) == upper_first(text)


@given(st.from_regex(r"[A-Z][a-z ]{0,30}[.!?]?", fullmatch=True), seeds)
def test_a_slip_swaps_two_letters_and_loses_none(text: str, seed: int) -> None:
    typed = as_typed(Random(seed), text)
    letters = sorted(text.lower().rstrip(".!?"))
    assert sorted(typed.lower().rstrip(".!?")) == letters
    differing = [
        i for i, (one, other) in enumerate(zip(typed.lower(), text.lower(), strict=False)) if one != other
    ]
    assert len(differing) in (0, 2)


ASKED = [
    *((first, "+", total - first) for total in range(101) for first in range(total + 1)),
    *((total, "-", part) for total in range(101) for part in range(total + 1)),
    *((first, "*", second) for first in range(13) for second in range(13)),
]
"""Every sum that a conversation can ask for."""


def result(first: int, sign: str, second: int) -> int:
    return {"+": first + second, "-": first - second, "*": first * second}[sign]


def test_no_other_sums_are_asked() -> None:
    rng = Random(1)
    drawn = {(sign, facts.numbers(rng, sign)) for sign in "+-*" for _ in range(3000)}
    assert {(first, sign, second) for sign, (first, second) in drawn} <= set(ASKED)


def test_every_answer_of_a_sum_is_right_and_so_is_every_step_on_the_way() -> None:
    for first, sign, second in ASKED:
        text = facts.working(first, sign, second)
        assert re.findall(r"(\d+)\.$", text) == [str(result(first, sign, second))], text
        steps = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", text)
        assert all(result(int(x), op, int(y)) == int(stated) for x, op, y, stated in steps), text
        assert steps or sign == "*"


def test_steps_follow_from_one_another() -> None:
    """No number appears in a step that was not asked, is not a part of one that was, or did not come out before."""
    for first, sign, second in ASKED:
        known = {first, second, *(n // 10 * 10 for n in (first, second)), *(n % 10 for n in (first, second))}
        for x, _, y, stated in re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", facts.working(first, sign, second)):
            assert {int(x), int(y)} <= known
            known.add(int(stated))


def test_a_thirtieth_of_all_sums_is_held_out_of_each_kind() -> None:
    for sign in "+-*":
        sums = [asked for asked in ASKED if asked[1] == sign]
        held = sum(facts.held_out(*asked) for asked in sums)
        assert 0.01 < held / len(sums) < 0.06


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


WISH = re.compile(r"\babout an? ([a-z -]+?) (?:who lives |set |)(?:in|on|by|at|under) ([a-z ]+?)[.!?]?$")
PLACES = {place.first: place for place in stories.ALL_PLACES}


def test_held_out_pairs_of_hero_and_place_are_in_no_request_of_the_training() -> None:
    """Read back from the requests themselves, of which many name nothing but a hero and a place."""
    asked = 0
    for seed in range(1000):
        wishes = (
            WISH.search(content)
            for role, content in conversation(Random(f"seed {seed}"), 500)
            if role == "user"
        )
        for described, place in (wish.groups() for wish in wishes if wish and " and " not in wish[1]):
            heroes = [hero for hero in HEROES if f" {described}".endswith(f" {hero}") and hero != "old man"]
            if heroes and place in PLACES:
                asked += 1
                assert not stories.held_out(max(heroes, key=len), PLACES[place]), (described, place)
    assert asked > 20
