"""Which linear maps a quantization_config means: lists of names, of parts of names and of regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import lru_cache

from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.quant.storage import PLAIN, Storage, Storages

EMBEDDING, LM_HEAD, LAYERS = "model.embed_tokens", "lm_head", "model.layers."

IsMeant = Callable[[str], bool]
"""A test for linear maps by their full names."""


def all_but(storage: Storage, is_excluded: IsMeant) -> Storages:
    """The storages of a checkpoint that has one for all linear maps but the excluded ones."""
    return lambda name: PLAIN if is_excluded(name) else storage


def called(matches: IsMeant) -> IsMeant:
    """Returns a test for names that match, alone or as a part of a model with more than text."""

    return lambda name: any(map(matches, full_names(name)))


def full_names(name: str) -> tuple[str, ...]:
    """Returns the names that a linear map may have in a quantization_config."""
    inside = name.removeprefix("model.")
    return name, f"model.language_model.{inside}", f"language_model.{name}", f"backbone.{inside}"


def excluded(fields: Fields, *lists: str) -> IsMeant:
    """The linear maps that the first list that is there excludes; without one, that is the output head.

    An embedding is excluded in any case. The meaning of an entry differs between the programs that write it, and
    it counts as each of them takes it: a regular expression that the name starts with, an end of the name, or some of
    its components. Any of them may have the dots around it.

    Raises:
        CheckpointError: an entry is no regular expression.
    """
    listed = next((name for name in lists if fields.has(name)), None)
    entries = [LM_HEAD] if listed is None else fields.strings(listed)
    starts = [
        regular_expression(rf"(?:{entry})(?:(?<=\.)|\.|$)", f"{fields.source}: {listed}") for entry in entries
    ]

    def is_listed(name: str) -> bool:
        return any(
            start.match(name) or name.endswith(entry) or f".{entry.strip('.')}." in f".{name}."
            for start, entry in zip(starts, entries, strict=True)
        )

    return lambda name: name == EMBEDDING or called(is_listed)(name)


def excluded_by_wildcards(fields: Fields, *lists: str) -> IsMeant:
    """The linear maps that the first list that is there excludes, whose entries may have wildcards.

    Old files have more before a name than the model has.
    """
    listed = next((name for name in lists if fields.has(name)), None)
    entries = [LM_HEAD] if listed is None else fields.strings(listed)

    def is_listed(name: str) -> bool:
        return any(fnmatchcase(name, entry) or entry.endswith(f".{name}") for entry in entries)

    return lambda name: name == EMBEDDING or called(is_listed)(name)


def regular_expression(pattern: str, source: str) -> re.Pattern[str]:
    """The compiled pattern.

    Raises:
        CheckpointError: it is no regular expression.
    """
    try:
        return _compiled(pattern)
    except (re.error, RecursionError, OverflowError):
        raise CheckpointError(f"{source} has a malformed regular expression: {pattern!r:.60}") from None


_compiled = lru_cache(re.compile)
