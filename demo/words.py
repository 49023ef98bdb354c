# ruff: noqa: E501, SIM905 (word lists and templates: a line per thought)
"""The heroes, places and things of the stories."""

from demo.grammar import phrases

_PHRASES = phrases("words")
ANY_HEROES: list[str] = _PHRASES["any_heroes"]
TWO_WORD_HEROES: list[str] = _PHRASES["two_word_heroes"]
SHE_HEROES: list[str] = _PHRASES["she_heroes"]
HE_HEROES: list[str] = _PHRASES["he_heroes"]
SHE_NAMES: list[str] = _PHRASES["she_names"]
HE_NAMES: list[str] = _PHRASES["he_names"]
TRAITS: dict[str, str] = _PHRASES["traits"]
"""The trait of a hero, and the sentence that shows it."""
PLAIN_TRAITS: list[str] = _PHRASES["plain_traits"]
PLACES: list[tuple[str, str, str, str]] = [tuple(each) for each in _PHRASES["places"]]
"""Preposition, first mention, later mentions; then what can be seen there."""
OBJECTS: list[str] = _PHRASES["objects"]
FRIENDS: list[str] = _PHRASES["friends"]
ODD_HEROES: list[str] = _PHRASES["odd_heroes"]
"""Plenty of other things that may be asked for, so that any noun can become a hero."""
HEROES = [*ANY_HEROES, *TWO_WORD_HEROES, *SHE_HEROES, *HE_HEROES]

PLACE_STEMS = "land valley town village kingdom island forest city hills".split()

SHE_FRIENDS = {"little girl", "old woman", "white goose"}
HE_FRIENDS = {"small boy", "quiet fisherman", "travelling tinker", "night watchman"}

SYLLABLES = "ba bel bri cor da dor el fen gal gri ha il jo ka lim lor ma mor na nim ol pel qui ra ro sel ta thi ul va wen xi yo zan zor".split()


def invented_stem(number: int) -> str:
    """A made-up word for the number: the same number, the same word."""
    first, rest = number % len(SYLLABLES), number // len(SYLLABLES)
    second, third = rest % len(SYLLABLES), rest // len(SYLLABLES) % (2 * len(SYLLABLES))
    return SYLLABLES[first] + SYLLABLES[second] + (SYLLABLES[third] if third < len(SYLLABLES) else "")
