"""A checkpoint's way of making embeddings, from its sentence-transformers files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.planning.params import Pooling

_MODES = {
    "lasttoken": Pooling.LAST,
    "cls": Pooling.FIRST,
    "cls_token": Pooling.FIRST,
    "mean": Pooling.MEAN,
    "mean_tokens": Pooling.MEAN,
}
"""The values of `pooling_mode`, and the suffixes of "pooling_mode_" fields."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """How the hidden states of a prompt become an embedding."""

    size: int | None = None
    """Its numbers; None if nobody said."""
    pooling: Pooling = Pooling.LAST
    is_normalised: bool = True
    """Its length is 1."""


def read_embedding(path: Path, size: int) -> Embedding:
    """The embedding of a checkpoint whose hidden states have so many numbers.

    One without modules.json is a plain decoder, whose last token is taken.

    Raises:
        CheckpointError: the files are broken, or what they ask for is not supported.
    """
    listed = path / "modules.json"
    if not listed.is_file():
        return Embedding(size)
    modules = _read_modules(listed)
    unknown = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise CheckpointError(f"{listed}: modules of type {', '.join(sorted(unknown))} are not supported")
    folder = path / modules.get("Pooling", "1_Pooling")
    return Embedding(size, _read_pooling(folder / "config.json"), "Normalize" in modules)


def _read_modules(path: Path) -> dict[str, str]:
    """The folder of each module, by the last part of its type's name."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise CheckpointError(f"{path} holds no list of modules")
    modules = [Fields(str(path), value) for value in values]
    return {module.text("type").rpartition(".")[2]: module.text("path", "") for module in modules}


def _read_pooling(path: Path) -> Pooling:
    fields = Fields.read(path)
    if fields.has("pooling_mode"):
        asked = [fields.text("pooling_mode")]
    else:
        names = [name for name in fields.names() if name.startswith("pooling_mode_")]
        asked = [name.removeprefix("pooling_mode_") for name in names if fields.flag(name)]
    if len(asked) != 1 or asked[0] not in _MODES:
        raise CheckpointError(f"{path}: pooling by {' and '.join(asked) or 'nothing'} is not supported")
    return _MODES[asked[0]]
