"""Typed access to JSON objects that other programs wrote."""

from __future__ import annotations

import json
from collections.abc import ItemsView, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from penstock.engine.errors import CheckpointError

T = TypeVar("T")
Choice = TypeVar("Choice", str, int)
_LARGEST = 1e300
_INFINITY = {"__float__": "Infinity"}
_LARGEST_SIZE = (1 << 31) - 1  # kernels keep sizes in 32 bits, with a sign


class Fields:
    """The entries of a JSON object, each read as the type that the caller asks for.

    An entry that is null counts as missing. A missing entry has the default of the call; without a default, and
    for a value of another type, the call raises a CheckpointError that names the entry and its file.
    """

    def __init__(self, source: str, values: dict[str, object]) -> None:
        self.source = source
        self._values = values

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Reads a file.

        Raises:
            CheckpointError: there is no such file, or it holds no JSON object.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        except RecursionError:
            raise CheckpointError(f"{path} cannot be read: it is nested too deep") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds no JSON object")
        return cls(str(path), cast("dict[str, object]", values))

    def with_defaults(self, defaults: Mapping[str, object] | Fields) -> Fields:
        """The entries with others where they are missing."""
        others = defaults._values if isinstance(defaults, Fields) else defaults
        return Fields(self.source, {**self._values, **{k: v for k, v in others.items() if not self.has(k)}})

    def flattened(self, name: str) -> Fields:
        """Returns the entries, overridden by the entries of the object under `name`."""
        inner = self._typed(name, dict, "an object", {})
        return Fields(self.source, {**self._values, **inner})

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        """The names of all entries."""
        return list(self._values)

    def items(self) -> ItemsView[str, object]:
        """All entries as the file has them."""
        return self._values.items()

    def has(self, name: str) -> bool:
        """Returns whether the entry is there and not null."""
        return self._values.get(name) is not None

    def first(self, *names: str) -> str:
        """The first of the names that has an entry; without one, all of them, which is what an error calls it."""
        return next(filter(self.has, names), " or ".join(names))

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name, default)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return self._typed(name, int, "a whole number", default)

    def size(self, name: str, default: int | None = None, *, most: int = _LARGEST_SIZE) -> int:
        """The entry as a whole number from 1 to `most`."""
        value = self.integer(name, default)
        if not 1 <= value <= most:
            raise self._fault(name, f"between 1 and {most}")
        return value

    def layer_sizes(
        self, name: str, num_layers: int, default: int | None = None, *, least: int = 1
    ) -> list[int]:
        """A size of each layer, at least `least`, which the file has for all of them together, or one by one."""
        is_list = isinstance(self._values.get(name), list)
        found = self.integers(name) if is_list else (self.integer(name, default),)
        if len(found) not in (1, num_layers):
            raise self.error(f"{name} has {len(found)} entries for {num_layers} layers")
        for size in found:
            if not least <= size <= _LARGEST_SIZE:
                raise self.error(f"{name} must be between {least} and {_LARGEST_SIZE}, not {size}")
        return [*found] * (num_layers // len(found))

    def within(self, name: str, least: float, most: float) -> float | None:
        """The entry as a number from `least` to `most`, or None if it is missing."""
        if not self.has(name):
            return None
        value = self.number(name)
        if not least <= value <= most:
            raise self._fault(name, f"between {least:g} and {most:g}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self._fault(name, "greater than 0")
        return value

    def optional_size(self, name: str) -> int | None:
        return self.size(name) if self.has(name) else None

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name) if self.has(name) else None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._typed(name, (int, float), "a number", default)
        if not abs(value) <= _LARGEST:
            raise self._fault(name, "a number")
        return float(value)

    def says_nothing(self, name: str, *neutral: object) -> None:
        """Checks an entry that has no meaning here: it is missing, or one of the neutral values.

        Raises:
            CheckpointError: it asks for something.
        """
        if self.has(name) and self._values[name] not in neutral:
            raise self.error(f"{name} {self._values[name]!s:.40} is not supported in this family")

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, bool, "true or false", default)

    def is_text(self, name: str) -> bool:
        """Returns whether the entry is a string."""
        return isinstance(self._values.get(name), str)

    def is_flag(self, name: str) -> bool:
        """Returns whether the entry is true or false."""
        return isinstance(self._values.get(name), bool)

    def text(self, name: str, default: str | None = None) -> str:
        return self._typed(name, str, "a string", default)

    def one_of(self, name: str, *allowed: Choice, default: Choice | None = None) -> Choice:
        """The entry, which must be one of the allowed texts, in whatever case, or of the allowed numbers."""
        value: str | int = (
            self.text(name, default).lower() if isinstance(allowed[0], str) else self.integer(name, default)
        )
        for one in allowed:
            if one == value:
                return one
        raise self._unsupported(name, value, allowed)

    def strings(self, name: str, *allowed: str) -> list[str]:
        """The strings of a list, each of which must be one of the allowed, if any are given."""
        value = self._typed(name, list, "a list of strings", [])
        if not {*map(type, value)} <= {str}:
            raise self._fault(name, "a list of strings")
        for item in value if allowed else ():
            if item not in allowed:
                raise self._unsupported(name, item, allowed)
        return value

    def _unsupported(self, name: str, value: str | int, allowed: Sequence[str | int]) -> CheckpointError:
        *most, last = map(str, allowed)
        only = f"{', '.join(most)} and {last} are" if most else f"{last} is"
        return self.error(f"{name} {value!s:.40} is not supported; only {only}")

    def string_lists(self, name: str) -> list[str]:
        """The strings of an entry that is a list of lists of strings, or of strings, or of both."""
        items = self._typed(name, list, "a list of lists of strings", [])
        strings = [string for item in items for string in (item if isinstance(item, list) else [item])]
        if not all(isinstance(string, str) for string in strings):
            raise self._fault(name, "a list of lists of strings")
        return cast("list[str]", strings)

    def integers(self, name: str) -> tuple[int, ...]:
        """The entry as a tuple; in the file it is a whole number or a list of them."""
        value = self._values.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not {*map(type, items)} <= {int}:
            raise self._fault(name, "a whole number or a list of them")
        return tuple(cast("list[int]", items))

    def numbers(self, name: str) -> list[float]:
        """The entry as a list of finite numbers."""
        value = self._typed(name, list, "a list of numbers", [])
        if not ({*map(type, value)} <= {int, float} and all(abs(item) <= _LARGEST for item in value)):
            raise self._fault(name, "a list of numbers")
        return value

    def bounds(self, name: str) -> tuple[float, float] | None:
        """The entry as a least and a largest number, of which the latter may be infinite; None if it is missing.

        JSON has no such number: transformers writes {"__float__": "Infinity"}.
        """
        if not self.has(name):
            return None
        found = self._values[name]
        items = (
            [float("inf") if item == _INFINITY else item for item in found] if isinstance(found, list) else []
        )
        are_numbers = all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in items)
        if len(items) != 2 or not are_numbers or not 0 <= items[0] <= items[1]:
            raise self._fault(name, "a list of two numbers, at least 0, in their order")
        return float(items[0]), float(items[1])

    def nested(self, name: str) -> Fields:
        """The entry as an object; a missing one is empty."""
        return Fields(f"{self.source}: {name}", self._typed(name, dict, "an object", {}))

    def objects(self, name: str) -> list[Fields]:
        """The entry as a list of objects; a missing one is empty."""
        value = self._typed(name, list, "a list of objects", [])
        if not {*map(type, value)} <= {dict}:
            raise self._fault(name, "a list of objects")
        return [Fields(f"{self.source}: {name}: {number}", item) for number, item in enumerate(value)]

    def last_nested(self, name: str) -> Fields:
        """The entry as an object; of a list of objects, the last."""
        value = self._values.get(name)
        if not isinstance(value, list):
            return self.nested(name)
        if not value or not isinstance(value[-1], dict):
            raise self._fault(name, "an object or a list of them")
        return Fields(f"{self.source}: {name}", cast("dict[str, object]", value[-1]))

    def string_values(self) -> list[str]:
        """The values of all entries, which must be strings."""
        for name in self._values:
            self.text(name)
        return cast("list[str]", list(self._values.values()))

    def _typed(
        self, name: str, kind: type[T] | tuple[type[T], ...], wanted: str, default: T | None = None
    ) -> T:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._fault(name, wanted)
        return value

    def error(self, text: str) -> CheckpointError:
        """Returns an error that says what is wrong with an entry, after the name of the file."""
        return CheckpointError(f"{self.source}: {text}")

    def _fault(self, name: str, wanted: str) -> CheckpointError:
        value = self._values.get(name)
        return self.error(
            f"{name} is missing" if value is None else f"{name} must be {wanted}, not {value!r:.60}"
        )
