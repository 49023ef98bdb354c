"""Types of command-line arguments, which say what they take when they are given something else."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from math import inf, isfinite
from typing import TypeVar

T = TypeVar("T")
Number = TypeVar("Number", int, float)


def listed(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Values of a type with commas between them, each of them once."""
    return lambda text: list(dict.fromkeys(read(part) for part in text.split(",")))


def one_of(known: Collection[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
        return text

    return read


def quantity(
    kind: type[Number], *, least: float = -inf, above: float = -inf, most: float = inf
) -> Callable[[str], Number]:
    """A finite number that is at least `least`, greater than `above` and at most `most`."""

    def read(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not (kind is int or isfinite(value)):
            raise ArgumentTypeError(f"{text!r} is not a {'whole ' if kind is int else ''}number")
        if value < least:
            raise ArgumentTypeError(f"must be at least {least:,}, not {text}")
        if value <= above:
            raise ArgumentTypeError(f"must be greater than {above:,}, not {text}")
        if value > most:
            raise ArgumentTypeError(f"must be at most {most:,}, not {text}")
        return value

    return read


positive = quantity(float, above=0)
not_negative = quantity(float, least=0)
whole = quantity(int)
count = quantity(int, least=1)
