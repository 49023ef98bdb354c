"""Errors that the operator is told in one line, without a trace."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from penstock.engine.errors import CheckpointError, InstructionSetError, NotEnoughMemory


class OperatorError(Exception):
    """Something the operator has to set right: a setting, a path, a port. Its message is one line that says which."""


def describe_failure(error: BaseException, folder: Path) -> str:
    """Why the model could not be loaded, in one line."""
    if isinstance(error, CheckpointError | InstructionSetError | NotEnoughMemory):
        return str(error)
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return f"{folder}: not enough memory for it and its KV cache; try --kv-memory or a smaller model"
    return f"{folder} cannot be loaded: {type(error).__name__}: {text}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message that there is no such name: the known one that it may be a slip of, if any."""
    near = get_close_matches(name, known)
    return f"; did you mean {near[0]}?" if near else ""
