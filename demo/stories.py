"""Stories: a spec (what was asked for), a tale (what was decided), its text and its shorter forms."""

from dataclasses import dataclass, replace
from random import Random
from zlib import crc32

from demo.grammar import a, chance, fill, pick, upper_first
from demo.moods import CARRIED, EPILOGUES, EPISODES, MOODS, NO_MORE, OPENINGS
from demo.plots import PLOTS, Plot
from demo.words import (
    FRIENDS,
    HE_FRIENDS,
    HE_HEROES,
    HE_NAMES,
    HEROES,
    OBJECTS,
    ODD_HEROES,
    PLACE_STEMS,
    PLACES,
    PLAIN_TRAITS,
    SHE_FRIENDS,
    SHE_HEROES,
    SHE_NAMES,
    TRAITS,
    invented_stem,
)

PRONOUNS = {"she": ("she", "her", "her", "herself"), "he": ("he", "him", "his", "himself")}
LENGTHS = ("short", "normal", "long")


@dataclass(frozen=True)
class Place:
    preposition: str
    first: str  # at the first mention: "a castle"
    later: str  # afterwards: "the castle"
    sights: str


@dataclass(frozen=True)
class Spec:
    """A user's wish; None leaves a part of it to the teller."""

    hero: str | None = None
    trait: str | None = None
    name: str | None = None
    place: Place | None = None
    thing: str | None = None
    mood: str | None = None
    topic: str | None = None
    friend: str | None = None
    length: str = "normal"


@dataclass(frozen=True)
class Tale:
    hero: str
    trait: str
    name: str
    sex: str
    place: Place
    thing: str
    mood: str
    friend: str
    friend_name: str
    friend_sex: str
    plot: Plot
    length: str
    shows_thing: bool


class Slots(dict[str, str]):
    """The slots of a tale. People are named, or now and then called what they are."""

    def __init__(self, rng: Random, tale: Tale, plain: bool = False) -> None:
        super().__init__()
        self.rng, self.plain = rng, plain
        hero = f"{tale.trait} {tale.hero}".strip()
        self.called = {
            "name": [tale.name, f"the {tale.hero}"],
            "fname": [tale.friend_name, f"the {tale.friend}"],
        }
        place = tale.place
        self.update(
            hero=tale.hero, a_hero=a(hero), friend=tale.friend, a_friend=a(tale.friend),
            object=tale.thing, a_object=a(tale.thing), sights=place.sights,
            in_place=f"{place.preposition} {place.first}", the_place=place.later,
            in_the_place=f"{place.preposition} {place.later}", to_the_place=f"to {place.later}",
            the_table="the table", nm=tale.name, fn=tale.friend_name,
        )  # fmt: skip
        self.update(zip(("he", "him", "his", "himself"), PRONOUNS[tale.sex], strict=True))
        self.update(zip(("fhe", "fhim", "fhis"), PRONOUNS[tale.friend_sex][:3], strict=True))

    def __missing__(self, key: str) -> str:
        lower = key[0].lower() + key[1:]
        if lower in self.called:
            name, description = self.called[lower]
            value = description if not self.plain and chance(self.rng, 0.25) else name
        else:
            value = self[lower] if lower != key else ""
        if not value:
            raise KeyError(key)
        return upper_first(value) if key[0].isupper() else value


def sex_of(rng: Random, noun: str, she: list[str] | set[str], he: list[str] | set[str]) -> str:
    if noun in she:
        return "she"
    return "he" if noun in he or chance(rng, 0.5) else "she"


def new_tale(rng: Random, spec: Spec) -> Tale:
    hero = spec.hero or pick(rng, HEROES)
    sex = sex_of(rng, hero, SHE_HEROES, HE_HEROES)
    if spec.name in SHE_NAMES or spec.name in HE_NAMES:
        sex = "she" if spec.name in SHE_NAMES else "he"
    plot = pick(rng, [plot for plot in PLOTS if suits(plot, spec)])
    friend = spec.friend or pick(rng, [friend for friend in FRIENDS if not friend.endswith(hero)])
    friend_sex = sex_of(rng, friend, SHE_FRIENDS | set(SHE_HEROES), HE_FRIENDS | set(HE_HEROES))
    name = spec.name or pick(rng, SHE_NAMES if sex == "she" else HE_NAMES)
    friend_names = [n for n in (SHE_NAMES if friend_sex == "she" else HE_NAMES) if n != name]
    trait = spec.trait if spec.trait is not None else pick(rng, [*TRAITS, *PLAIN_TRAITS, "", "", ""])
    return Tale(
        hero, trait, name, sex,
        spec.place or pick(rng, ALL_PLACES), spec.thing or pick(rng, OBJECTS),
        spec.mood or pick(rng, list(MOODS)), friend, pick(rng, friend_names), friend_sex,
        plot, spec.length, shows_thing=bool(spec.thing) and not plot.uses_object,
    )  # fmt: skip


def suits(plot: Plot, spec: Spec) -> bool:
    if spec.topic:
        return spec.topic in plot.topics
    return plot.uses_object or not spec.thing


def story(rng: Random, tale: Tale) -> str:
    """The text: paragraphs with an empty line between them; the short form is a single paragraph."""
    if tale.length == "short":
        return short_story(rng, tale)
    slots, plot = Slots(rng, tale), tale.plot
    _, airs, endings = MOODS[tale.mood]
    beginning = [fill(rng, pick(rng, OPENINGS), Slots(rng, tale, plain=True))]
    if tale.trait in TRAITS:
        beginning.append(fill(rng, TRAITS[tale.trait], slots))
    if tale.shows_thing:
        beginning.append(fill(rng, pick(rng, CARRIED), slots))
    beginning.append(fill(rng, pick(rng, airs), slots))
    middle = [*told(rng, plot.trouble, slots), *told(rng, plot.search, slots)]
    paragraphs = [beginning, middle]
    if tale.length == "long":
        paragraphs += [[fill(rng, episode, slots)] for episode in rng.sample(EPISODES, 2)]
    paragraphs += [
        told(rng, plot.help, slots),
        told(rng, plot.outcome, slots),
        [fill(rng, pick(rng, endings), slots)],
    ]
    if tale.mood not in ("scary", "sad") and chance(rng, 0.3):
        paragraphs[-1].append(fill(rng, plot.lesson, slots))
    return "\n\n".join(" ".join(upper_first(sentence) for sentence in some) for some in paragraphs)


def told(rng: Random, beats: tuple[str, ...], slots: Slots) -> list[str]:
    chosen = [beat.lstrip("?") for beat in beats if not beat.startswith("?") or chance(rng, 0.5)]
    return [fill(rng, beat, slots) for beat in chosen]


def short_story(rng: Random, tale: Tale) -> str:
    slots = Slots(rng, tale, plain=True)
    sentences = [
        fill(rng, pick(rng, OPENINGS), slots),
        *(fill(rng, part, slots) for part in tale.plot.summary),
    ]
    if chance(rng, 0.4):
        sentences.append(fill(rng, tale.plot.lesson, slots))
    return " ".join(upper_first(sentence) for sentence in sentences)


def one_sentence(rng: Random, tale: Tale) -> str:
    opening = "{Nm} the {hero} lived {in_place}, and [this is what {he} learnt|the story shows it]: "
    lesson = fill(rng, tale.plot.lesson)
    return fill(rng, opening, Slots(rng, tale, plain=True)) + lesson[0].lower() + lesson[1:]


def epilogue(rng: Random, tale: Tale, number: int) -> str:
    return upper_first(fill(rng, pick(rng, EPILOGUES if number < 2 else NO_MORE), Slots(rng, tale)))


def title(tale: Tale, rng: Random) -> str:
    return fill(rng, tale.plot.title, {"object": " ".join(word.capitalize() for word in tale.thing.split())})


def new_spec(rng: Random) -> Spec:
    """A wish with some of its parts given: mostly a hero, often a trait or a place, sometimes more."""
    spec = Spec()
    if chance(rng, 0.78):
        trait = ""
        if chance(rng, 0.5):
            trait = pick(rng, [*TRAITS, *PLAIN_TRAITS])
        spec = replace(spec, hero=any_hero(rng), trait=trait)
    if chance(rng, 0.12):
        spec = replace(spec, name=any_name(rng))
    if chance(rng, 0.33):
        spec = replace(spec, place=any_place(rng))
    if chance(rng, 0.14):
        spec = replace(spec, thing=pick(rng, OBJECTS))
    elif chance(rng, 0.14):
        spec = replace(spec, topic=pick(rng, [topic for plot in PLOTS for topic in plot.topics]))
    if spec.hero and not spec.topic and chance(rng, 0.12):
        spec = replace(spec, friend=pick(rng, [hero for hero in HEROES if hero != spec.hero]))
    if chance(rng, 0.25):
        spec = replace(spec, mood=pick(rng, list(MOODS)))
    if spec.hero and spec.place and held_out(spec.hero, spec.place):
        return new_spec(rng)
    length = "short" if chance(rng, 0.12) else "long" if chance(rng, 0.1) else "normal"
    return replace(spec, length=length)


def held_out(hero: str, place: Place) -> bool:
    """One pair of hero and place in thirty is never asked for in training; the score asks for these."""
    return crc32(f"{hero}/{place.first}".encode()) % 30 == 0


def any_hero(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.72:
        return pick(rng, HEROES)
    return pick(rng, ODD_HEROES) if draw < 0.92 else invented_stem(int(rng.random() * 1e6))


def any_name(rng: Random) -> str:
    if chance(rng, 0.7):
        return pick(rng, SHE_NAMES + HE_NAMES)
    return upper_first(invented_stem(int(rng.random() * 1e6)))


def any_place(rng: Random) -> Place:
    if chance(rng, 0.88):
        return pick(rng, ALL_PLACES)
    name = upper_first(invented_stem(int(rng.random() * 1e6)))
    if chance(rng, 0.5):
        return Place("in", name, name, pick(rng, ALL_PLACES).sights)
    stem = pick(rng, PLACE_STEMS)
    return Place("in", f"the {stem} of {name}", f"the {stem} of {name}", pick(rng, ALL_PLACES).sights)


ALL_PLACES = [Place(*place) for place in PLACES]
