# ruff: noqa: SIM905 (word lists)
"""Answers as JSON, laid out as `json.dumps` has it: people, facts and lists of a few words that it learns to spell."""

import json
from collections.abc import Callable, Mapping
from random import Random
from zlib import crc32

from app.demo.facts import CAPITALS, COLOURS, GROUPS, LEGS, SMALL
from app.demo.grammar import a, as_typed, chance, fill, pick, sentence_list
from app.demo.tokenizer import Message
from app.demo.tools import CITIES
from app.demo.words import HE_NAMES, SHE_NAMES

Members = Mapping[str, object]
Asked = tuple[str, Members]
"""What somebody says or asks, and the members that an answer may have, in their usual order."""

NAMES = SHE_NAMES[:8] + HE_NAMES[:8]
ANIMALS = "fox dog cat owl bear mouse rabbit horse lion tiger frog duck whale wolf hen goat".split()
PLACES = "forest castle village city garden desert cave valley farm library kingdom harbour".split()
COUNTRIES = [country for country, city in CAPITALS.items() if city in CITIES]
LISTED = ["fruits", "animals", "colours", "planets"]


def new_person(rng: Random, unseen: bool = False) -> dict[str, object]:
    while True:
        name, animal = pick(rng, NAMES), pick(rng, ANIMALS)
        if held_out(name, animal) == unseen:
            return {
                "name": name,
                "animal": animal,
                "age": 2 + int(rng.random() * 98),
                "place": pick(rng, PLACES),
            }


def held_out(name: str, animal: str) -> bool:
    return crc32(f"{name} the {animal}".encode()) % 10 == 0


def told_person(rng: Random, unseen: bool = False) -> Asked:
    one = new_person(rng, unseen)
    told = f"{one['name']} is {a(str(one['animal']))} who is {one['age']} years old and lives in the {one['place']}."
    return told, one


def invented_person(rng: Random) -> Asked:
    members = new_person(rng)
    who = a(str(members["animal"])) if chance(rng, 0.5) else "[a hero|a character|an animal]"
    return fill(rng, f"[Invent|Make up|Describe|Give me] {who}."), members


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


KINDS: list[Callable[[Random], Asked]] = [
    told_person, told_person, told_person, invented_person, invented_person, capital, colour, legs, listing,
]  # fmt: skip


def json_exchange(rng: Random) -> list[Message]:
    kind = pick(rng, KINDS)
    question, members = kind(rng)
    if kind is not told_person and chance(rng, 0.3):  # names are spelt as they were told
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
