# ruff: noqa: SIM905 (word lists)
"""Answers as JSON, laid out as `json.dumps` has it: people, facts and lists of a few words that it learns to spell."""

import json
from collections.abc import Callable, Mapping
from random import Random
from zlib import crc32

from demo.facts import CAPITALS, COLOURS, GROUPS, LEGS, SMALL
from demo.grammar import as_typed, chance, fill, pick, sentence_list
from demo.tokenizer import Message
from demo.tools import CITIES
from demo.words import HE_NAMES, SHE_NAMES

Members = Mapping[str, object]
Asked = tuple[str, Members]
"""A statement or a question, and the members that an answer may have, in their usual order."""

NAMES = SHE_NAMES[:8] + HE_NAMES[:8]
ANIMALS = "fox dog cat owl bear mouse horse frog duck wolf".split()
COUNTRIES = [country for country, city in CAPITALS.items() if city in CITIES]
WORDS = [*ANIMALS, *CITIES, *(country.removeprefix("the ") for country in COUNTRIES)]
LISTED = ["fruits", "animals", "colours", "planets"]


def new_person(rng: Random, unseen: bool = False) -> dict[str, object]:
    while True:
        name, city = pick(rng, NAMES), pick(rng, CITIES)
        if held_out(name, city) == unseen:
            return {"name": name, "age": 2 + int(rng.random() * 98), "city": city}


def held_out(name: str, city: str) -> bool:
    return crc32(f"{name} in {city}".encode()) % 10 == 0


def told_person(rng: Random, unseen: bool = False) -> Asked:
    one = new_person(rng, unseen)
    return f"{one['name']} is {one['age']} years old and lives in {one['city']}.", one


def invented_person(rng: Random) -> Asked:
    who = "[a person|a hero|a character|somebody]"
    return fill(rng, f"[Invent|Make up|Describe|Give me] {who}."), new_person(rng)


def capital(rng: Random) -> Asked:
    country = pick(rng, COUNTRIES)
    question = fill(rng, f"[What is the capital of|The capital of|Capital of] {country}?")
    return question, {"country": country.removeprefix("the "), "capital": CAPITALS[country]}


def colour(rng: Random) -> Asked:
    thing, shade = pick(rng, list(COLOURS.items()))
    return f"What colour is {thing}?", {"colour": shade}


def legs(rng: Random) -> Asked:
    animal, count = pick(rng, list(LEGS.items()))
    return f"How many legs does {animal} have?", {"legs": 0 if count == "no" else SMALL.index(count)}


def listing(rng: Random) -> Asked:
    group, count = pick(rng, LISTED), 2 + int(rng.random() * 3)
    question = fill(rng, f"[Name|List|Tell me|Give me] [{SMALL[count]}|{count}] {group}.")
    return question, {group: rng.sample(GROUPS[group].split(), count)}


def words(rng: Random) -> Asked:
    """The spelling of a word after a quotation mark is another one than after a space, so it takes practice."""
    some = rng.sample(WORDS, 1 + int(rng.random() * 5))
    start = "The word is" if len(some) == 1 else "The words are"
    return f"{start} {sentence_list(some)}.", {"words": some}


KINDS: list[Callable[[Random], Asked]] = [
    told_person, told_person, told_person, told_person, words, words, words, words, invented_person,
    capital, capital, colour, legs, listing,
]  # fmt: skip


def json_exchange(rng: Random) -> list[Message]:
    kind = pick(rng, KINDS)
    question, members = kind(rng)
    if kind not in (told_person, words) and chance(rng, 0.3):  # names are spelt as they were told
        question = as_typed(rng, question)
    return wish(rng, question, members)


def wish(rng: Random, question: str, members: Members) -> list[Message]:
    """The members that are asked for by name, in that order; all of them if none is."""
    keys = list(members)
    ask = "[Answer as JSON|Answer as JSON|Answer in JSON|As JSON, please]."
    if len(members) > 1 and chance(rng, 0.6):
        keys = rng.sample(keys, 1 + int(rng.random() * len(keys)))
        ask = f"Answer as JSON with {sentence_list(keys)}."
    elif chance(rng, 0.2):
        return turns(f"Answer as JSON: {question}", members)
    return turns(f"{question} {fill(rng, ask)}", {key: members[key] for key in keys})


def turns(question: str, answer: Members) -> list[Message]:
    return [("user", question), ("assistant", json.dumps(answer))]
