"""Keeps the weights that `--quantize` made of a checkpoint, so that the next start need not make them again.

The cache folder has one safetensors file for a checkpoint, with the linear maps alone. Laid over the checkpoint, it
makes one whose linear maps are stored quantized, which is checked and loaded like any other.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.engine.ahead import in_order
from penstock.engine.config import ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.kernels.cpu.build import cache_directory
from penstock.engine.model import safetensors, tensor_writer
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.tensor_writer import TensorWriter, bytes_of
from penstock.engine.model.tensors import Recipe, check_tensors, head_spec, linear_specs, rounded
from penstock.engine.model.weights import Progress
from penstock.engine.quant import codebook, float8, integers, kept, rotation, rounding
from penstock.engine.quant.formats import NamedTensors, Rounding
from penstock.engine.quant.kept import KeptTensors
from penstock.engine.quant.rounding import RoundGroups
from penstock.engine.quant.storages import packing
from penstock.engine.quant.storages.names import LM_HEAD

SMALLEST = 64 << 20
"""Checkpoints with fewer bytes of linear maps are quantized in about a second, and not kept."""

MOST_BYTES = 32 << 30
"""The bytes of all files that are kept: the ones that were not used for longest make room for others."""

SPARE_BYTES = 1 << 30
"""The room that is left to others on the disk."""

_SAMPLE = 2048
"""The elements at the start of a tensor that stand for it where checkpoints are compared."""
_ABANDONED_S = 24 * 3600
"""A partial file of this age belongs to a process that was killed."""
_CHECKSUM = "checksum"
_SUFFIX, _PARTIAL = ".safetensors", ".partial"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The config, files and recipe that weights are loaded from."""

    config: ModelConfig
    files: TensorFiles
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear map in floating point that is quantized."""

    name: str
    """In the cache."""
    source: str
    """The tensor of the checkpoint."""
    rows: int
    in_features: int
    format: Rounding
    """The format that it is quantized to."""


class _Overlaid(TensorFiles):
    """The tensors of a checkpoint and of one more file, which comes first where both have a tensor of one name."""

    def __init__(self, below: TensorFiles, file: Path) -> None:
        """
        Raises:
            CheckpointError: the file is truncated or malformed.
        """
        entries = {**below.entries, **safetensors.read_header(file)}
        super().__init__(below.path, entries, below.own_name, below.config)
        self._below, self._file = below, file

    def read(self, name: str) -> Tensor:
        return super().read(name) if self.entries[name].file == self._file else self._below.read(name)


class _Unusable(Exception):
    """Nothing can be kept; the message is why."""


def quantized(
    checkpoint: Checkpoint,
    say: Callable[[str], None],
    progress: Progress,
    round_groups: RoundGroups = rounding.round_groups,
) -> Checkpoint:
    """The same checkpoint with its linear maps quantized as its recipe wants it.

    They are read from the cache, and made and put there first if they are not in it. No more linear maps are in
    memory at a time than there are threads, and one.

    Args:
        say: is called with lines for the operator: the weights being made, and why a file cannot be used.
        progress: is called with the bytes quantized and the bytes in all, if any have to be.
        round_groups: has the results of `rounding.round_groups`.

    Returns:
        `checkpoint` itself if nothing is to be quantized, if it is small, or if nothing can be kept.
    """
    quantization = checkpoint.recipe.quantization
    if quantization is None:
        return checkpoint
    linears = list(_linears(checkpoint))
    entries = checkpoint.files.entries
    total = sum(entries[linear.source].num_bytes for linear in linears)
    if total < SMALLEST:
        return checkpoint
    try:
        path = _path(checkpoint.files, quantization.name, linears)
        found = _find(checkpoint, linears, path, say)
        if found is not None:
            say(f"weights were quantized to {quantization.name} by an earlier start: {path}")
            return found
        size = sum(one.format.num_bytes(one.rows, one.in_features, torch.float32) for one in linears)
        _make_room(path, size)
        say(f"quantizing to {quantization.name}; the result is kept for the next start")
        start = time.monotonic()
        _make(checkpoint.files, linears, path, lambda done: progress(done, total), round_groups)
        say(
            f"quantized in {time.monotonic() - start:.1f} s, kept in {path} ({path.stat().st_size >> 20} MiB)"
        )
        return _laid_over(checkpoint, linears, path)
    except (_Unusable, CheckpointError, OSError) as error:
        say(f"the quantized weights are not kept for the next start: {error}")
        return checkpoint


def _linears(checkpoint: Checkpoint) -> Iterator[_Linear]:
    config, recipe = checkpoint.config, checkpoint.recipe
    layers = [linear_specs(config, layer, recipe).values() for layer in range(config.num_layers)]
    head = head_spec(config, recipe)
    for spec in [*chain.from_iterable(layers), head]:
        if spec.quantized is not None:
            for part in {part.name: part for part in spec.parts}.values():  # keys may be values, too
                name = LM_HEAD if spec is head else part.name
                yield _Linear(name, f"{part.name}.weight", part.rows, spec.in_features, spec.quantized)


def _path(files: TensorFiles, quantization: str, linears: list[_Linear]) -> Path:
    """Where the result is kept.

    Raises:
        _Unusable: there is no cache folder.
    """
    try:
        folder = cache_directory() / "quantized"
    except RuntimeError as error:  # this user has no home
        raise _Unusable(str(error)) from None
    readable = re.sub(r"[^\w.-]+", "-", files.path.resolve().name)[:60]
    return folder / f"{readable}-{quantization}-{_key(files, linears)}{_SUFFIX}"


def _key(files: TensorFiles, linears: list[_Linear]) -> str:
    """Returns a digest of all that the result depends on.

    These are the code that makes it, the formats, and the tensors, each with its place, its size and a sample of its
    bytes: dates alone would not distinguish one image's model from the next's where all files have one date.
    """
    digest = blake2b(digest_size=8)
    for module in (codebook, float8, integers, kept, packing, rotation, rounding, tensor_writer):
        digest.update(Path(str(module.__file__)).read_bytes())
    digest.update(Path(__file__).read_bytes())
    for file in sorted({files.entries[linear.source].file for linear in linears}):
        stat = file.stat()
        _tell(digest, file.name, stat.st_size, stat.st_mtime_ns)
    for linear in linears:
        entry = files.entries[linear.source]
        _tell(digest, linear, entry.file.name, entry.dtype, entry.shape, entry.start)
        digest.update(bytes_of(_sample(files.read(linear.source))))
    return digest.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    """The first elements of a matrix as they lie in its file, of which no more is read."""
    lines = tensor if tensor.stride(-1) == 1 else tensor.mT
    return lines[: -(-_SAMPLE // lines.shape[-1])].flatten()[:_SAMPLE]


def _tell(digest: blake2b, *facts: object) -> None:
    """Adds facts that are written alike in every process."""
    digest.update("\0".join(map(str, facts)).encode() + b"\n")


def _find(
    checkpoint: Checkpoint, linears: list[_Linear], path: Path, say: Callable[[str], None]
) -> Checkpoint | None:
    """Returns the checkpoint with the cached linear maps, if they are there and whole."""
    if not path.exists():
        return None
    try:
        found = _laid_over(checkpoint, linears, path)
        _check(path, found.files)
    except (CheckpointError, OSError, ValueError) as error:  # offsets that cannot be are a ValueError
        say(f"{path} is ignored and made anew: {error}")
        return None
    with suppress(OSError):  # a folder that cannot be written can be read
        os.utime(path)  # see _make_room
    return found


def _laid_over(checkpoint: Checkpoint, linears: list[_Linear], path: Path) -> Checkpoint:
    """The checkpoint with the linear maps of a file in the place of its own.

    The output head is one of them, so that it is no longer tied to the embedding.

    Raises:
        CheckpointError: the file was not made from this checkpoint.
    """
    storages = {linear.name: KeptTensors(linear.format) for linear in linears}
    own = checkpoint.recipe.storages
    found = Checkpoint(
        replace(checkpoint.config, spec=replace(checkpoint.config.spec, ties_embeddings=False)),
        _Overlaid(checkpoint.files, path),
        Recipe(lambda name: storages.get(name) or own(name)),
    )
    check_tensors(found.config, found.files, found.recipe)
    return found


def _check(path: Path, files: TensorFiles) -> None:
    """
    Raises:
        CheckpointError: the bytes of a file are not the bytes that were written.
    """
    entry = files.entries.get(_CHECKSUM)
    if entry is None or entry.file != path or entry.shape != (1,) or entry.dtype != "I64":
        raise CheckpointError("it has no checksum")
    first = min(other.start for other in files.entries.values() if other.file == path)
    if _checksum(path, first, entry.start) != int(files.read(_CHECKSUM)):
        raise CheckpointError("it is damaged: its checksum is wrong")


def _checksum(path: Path, start: int, end: int) -> int:
    """The sum of the bytes of a file from `start` to `end`, taken as integers of 64 bits, as one with a sign."""
    data = np.memmap(path, np.uint8, mode="r", offset=start, shape=(end - start,))
    whole = data[: len(data) // 8 * 8].view("<u8")
    total = int(whole.sum(dtype=np.uint64)) + int(data[whole.nbytes :].sum(dtype=np.uint64))
    return total % (1 << 64) - (1 << 63)


def _make_room(path: Path, num_bytes: int) -> None:
    """Removes the least recently used files, and the files that killed processes left, so that a new file has room.

    Raises:
        _Unusable: there is no room for it.
        OSError: the folder cannot be written.
    """
    folder = path.parent
    if num_bytes > MOST_BYTES:
        raise _Unusable(
            f"they are {num_bytes >> 20} MiB, and all that is kept is at most {MOST_BYTES >> 20} MiB"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(f"*{_PARTIAL}"):
        if time.time() - unfinished.stat().st_mtime > _ABANDONED_S:
            unfinished.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    others = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda other: other.stat().st_mtime)
    excess = num_bytes + sum(other.stat().st_size for other in others) - MOST_BYTES
    for other in others:
        if excess <= 0:
            break
        excess -= other.stat().st_size
        other.unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    if free < num_bytes + SPARE_BYTES:
        raise _Unusable(f"{folder} has {free >> 20} MiB free, and they are {num_bytes >> 20} MiB")


def _make(
    files: TensorFiles,
    linears: list[_Linear],
    path: Path,
    quantized: Callable[[int], None],
    round_groups: RoundGroups,
) -> None:
    """Quantizes linear maps, and writes one after the other. A file that is not whole is never seen under its name.

    Args:
        quantized: is called with the bytes of the checkpoint that are done.

    Raises:
        OSError: the file cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=_PARTIAL, delete=False) as file:
        unfinished = Path(file.name)
    try:
        tensors, done = _announced(linears), 0
        with TensorWriter(unfinished, tensors) as writer:
            made = in_order(partial(_quantized, files, linear, round_groups) for linear in linears)
            for linear, kept in zip(linears, made, strict=True):
                for suffix, tensor in kept.items():
                    writer.write(f"{linear.name}.{suffix}", tensor)
                done += files.entries[linear.source].num_bytes
                quantized(done)
            writer.flush()
            first, end = writer.start(next(iter(tensors))), writer.start(_CHECKSUM)
            writer.write(_CHECKSUM, torch.tensor([_checksum(unfinished, first, end)]))
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _quantized(files: TensorFiles, linear: _Linear, round_groups: RoundGroups) -> NamedTensors:
    return KeptTensors(linear.format).store(rounded(linear.format, files.read(linear.source), round_groups))


def _announced(linears: list[_Linear]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The tensors of a file by name: their shapes and types. The last one is the checksum of the others."""
    tensors = {
        f"{linear.name}.{tensor.suffix}": (tensor.known_shape, safetensors.DTYPES[tensor.dtypes[0]])
        for linear in linears
        for tensor in KeptTensors(linear.format).tensors(linear.rows, linear.in_features)
    }
    return {**tensors, _CHECKSUM: ((1,), torch.int64)}
