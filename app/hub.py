"""Looks at a model whose weights stay on the hub: its config, and the headers of its safetensors files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.app.errors import OperatorError

if TYPE_CHECKING:
    from penstock.engine.model.safetensors import TensorFiles


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A checkpoint of which only what is small was fetched."""

    folder: Path
    """Where config.json lies."""
    files: TensorFiles
    """Their tensors cannot be read."""
    num_bytes: int
    """The bytes of the files of weights."""


def look_at(hub_id: str, revision: str | None) -> RemoteCheckpoint:
    """Fetches config.json and the headers of the weights.

    Raises:
        OperatorError: the hub cannot be asked, has no such model, or has it without safetensors files.
    """
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    from penstock.engine.model.safetensors import TensorEntry, TensorFiles

    with _one_line(hub_id):
        metadata = get_safetensors_metadata(hub_id, revision=revision)
        config = hf_hub_download(hub_id, "config.json", revision=revision)
    folder = Path(config).parent
    entries = {
        name: TensorEntry(
            Path(file),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.data_offsets[0],
            tensor.data_offsets[1] - tensor.data_offsets[0],
        )
        for file, header in metadata.files_metadata.items()
        for name, tensor in header.tensors.items()
    }
    num_bytes = sum(entry.num_bytes for entry in entries.values())
    return RemoteCheckpoint(folder, TensorFiles(Path(hub_id), entries), num_bytes)


def fetched_before(hub_id: str, revision: str | None) -> Path | None:
    """The folder of a model that an earlier start has fetched, if there is one; it may lack files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


@contextmanager
def _one_line(hub_id: str) -> Iterator[None]:
    """Turns whatever the hub's library says into one line, and keeps its log and its progress bars off the screen."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    shows_bars, library = not are_progress_bars_disabled(), logging.getLogger("huggingface_hub")
    level = library.level
    disable_progress_bars()
    library.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # the errors of its HTTP library are another library's from version to version
        said = " ".join(str(error).split()) or type(error).__name__
        raise OperatorError(f"{hub_id}: no such file or directory, and the hub says: {said}") from None
    finally:
        library.setLevel(level)
        if shows_bars:
            enable_progress_bars()
