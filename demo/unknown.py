"""Questions that the model cannot answer, and how it says so."""

from random import Random

from demo.facts import CAPITALS
from demo.grammar import a, as_typed, chance, fill, phrases, pick, upper_first
from demo.tokenizer import Message
from demo.words import HE_NAMES, SHE_NAMES, invented_stem

_PHRASES = phrases("unknown")
PEOPLE: list[str] = _PHRASES["people"]
SUBJECTS: list[str] = _PHRASES["subjects"]
THINGS: list[str] = _PHRASES["things"]
LANGUAGES: list[str] = _PHRASES["languages"]
PROGRAMS: list[str] = _PHRASES["programs"]
OTHER_CAPITALS: list[str] = _PHRASES["other_capitals"]
PRIZES: list[str] = _PHRASES["prizes"]
MADE_THINGS: list[str] = _PHRASES["made_things"]
REFUSALS: list[str] = _PHRASES["refusals"]
REFUSALS_TO_DO: list[str] = _PHRASES["refusals_to_do"]
CHOICES = {
    "thing": THINGS, "prize": PRIZES, "made": MADE_THINGS, "country": [*CAPITALS, *OTHER_CAPITALS],
    "language": LANGUAGES, "work": PROGRAMS,
}  # fmt: skip
BEYOND: list[tuple[str, str]] = [tuple(each) for each in _PHRASES["beyond"]]
CAPITAL, WORD, FIRST_TO_DO, SUM = 6, 10, 11, 13
PLACE = (
    "[Where is {country}?|Tell me about {country}.|What do you know about {country}?]",
    "much about {country}",
)


def ask(rng: Random) -> tuple[str, str, bool]:
    """A question beyond the model, what it is about, and whether it is something to do."""
    kind = int(rng.random() * len(BEYOND))
    question, about = BEYOND[kind]
    slots = {
        "person": pick(rng, PEOPLE),
        "subject": pick(rng, SUBJECTS),
        "year": str(1000 + int(rng.random() * 1030)),
    }
    if kind == CAPITAL:
        slots["country"] = pick(rng, OTHER_CAPITALS) if chance(rng, 0.7) else upper_first(any_word(rng))
        question, about = (question, about) if chance(rng, 0.7) else PLACE
    elif kind == WORD:
        word = any_word(rng)
        slots |= {"word": word, "a_word": a(word)}
    elif kind == SUM:
        slots |= {name: str(100 + int(rng.random() * 9900)) for name in "xy"}
        slots["sign"] = pick(rng, ["*", "+", "-", "divided by", "times"])
    for name, options in CHOICES.items():
        if name not in slots and f"{{{name}}}" in question:
            slots[name] = pick(rng, options)
    return question.format_map(slots), about.format_map(slots), kind >= FIRST_TO_DO


def any_word(rng: Random) -> str:
    return invented_stem(int(rng.random() * 1e6))


def refusal(rng: Random) -> list[Message]:
    question, about, to_do = ask(rng)
    slots = {"x": fill(rng, pick(rng, about.split("|")) if "[" not in about else about)}
    answer = fill(rng, pick(rng, REFUSALS_TO_DO if to_do else REFUSALS), slots)
    return [("user", as_typed(rng, upper_first(fill(rng, question).strip()))), ("assistant", answer.strip())]


def personal(rng: Random) -> list[Message]:
    """Questions about the user that only the user can answer."""
    person = pick(rng, ["mother", "father", "dog", "cat", "sister", "brother", "teacher", "best friend"])
    question, about = pick(rng, [
        (f"What is the name of my {person}?", f"the name of your {person}"),
        (f"How old is my {person}?", f"how old your {person} is"),
        (f"Where is my {person}?", f"where your {person} is"),
        ("What is my name?", "your name"), ("How old am I?", "how old you are"),
        ("What did I eat today?", "what you ate today"), ("Where do I live?", "where you live"),
        (f"Do you know {pick(rng, SHE_NAMES + HE_NAMES)}?", "anybody outside of my stories"),
    ])  # fmt: skip
    reply = (
        "I do not know {about}, [because you have not told me|you have not told me yet]. [Will you tell me?|]"
    )
    if about.startswith("anybody"):
        reply = "I do not know {about}. [Who is it?|Tell me more!]"
    return [("user", as_typed(rng, question)), ("assistant", fill(rng, reply, {"about": about}).strip())]


def any_unknown(rng: Random) -> list[Message]:
    return personal(rng) if chance(rng, 0.12) else refusal(rng)
