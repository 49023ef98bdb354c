"""Errors that are shown to the operator as one line, without a trace."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from penstock.engine.errors import CheckpointError, InstructionSetError, MemoryHeld, NotEnoughMemory


class OperatorError(Exception):
    """An error that the operator has to fix: a setting, a path, a port. Its message is one line that names it."""


class TransientError(OperatorError):
    """A failure that another start may not meet: the hub is out of reach, a port or a GPU's memory is still held."""


def load_error(error: BaseException, folder: Path) -> OperatorError:
    """The error that ends the process when the model could not be loaded."""
    # What the driver refuses may be because of another process, such as a predecessor that is still ending.
    from_driver = isinstance(error, RuntimeError) and "CUDA" in str(error)
    kind = TransientError if from_driver or isinstance(error, MemoryHeld) else OperatorError
    return kind(describe_failure(error, folder))


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
