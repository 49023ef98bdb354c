"""Finds the requested model: a directory, a GGUF file, the hub, or the included demo model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from http import HTTPStatus
from pathlib import Path

from penstock.app.errors import OperatorError, TransientError
from penstock.engine.errors import CheckpointError
from penstock.engine.model.consolidated import PARAMS, WEIGHTS, is_consolidated
from penstock.engine.model.gguf.container import SUFFIX, is_gguf, read_header
from penstock.engine.model.parse import check_family
from penstock.engine.text.tekken import FILE as TEKKEN

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
DEMO_DRAFT = Path(__file__).parent / "demo" / "draft"
DEMO_NAME = "penstock-demo"
_DEMO_NAMES = (DEMO_NAME, "demo")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NEEDED = ("config.json", "tokenizer.json", "*.safetensors")
_NEEDED_TO_DRAFT = ("config.json", "*.safetensors")  # a head has its target's tokens
# Not every safetensors file: some repositories have the weights a second time, in another layout.
_FETCHED = ("*.json", "model*.safetensors", "*.jinja")
_SAMPLED_BYTES, _PIECE = 1 << 25, 1 << 13
"""The most bytes of weights that a fingerprint looks at, and those at each place."""


def asked_for(model: str) -> str | None:
    """The model that an operator names: None, as if he had named none, if he calls the demo model by its name.

    A checkpoint's folder of that name goes before it; the checkout's own demo/ is none.
    """
    return None if model in _DEMO_NAMES and not (Path(model) / "config.json").exists() else model


def model_name(model: str | None, served_model_name: str | None) -> str:
    """The name that clients ask for."""
    if served_model_name:
        return served_model_name
    if model is None:
        return DEMO_NAME
    if is_hub_id(model):
        return model
    path = Path(model).resolve()
    return path.stem if is_gguf(path) else path.name


def is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None and not Path(model).exists() and not is_gguf(Path(model))


def find_checkpoint(
    model: str | None,
    revision: str | None = None,
    *,
    argument: str = "--model",
    needed: tuple[str, ...] = _NEEDED,
) -> Path:
    """The checkpoint's directory, fetched from the hub if it has to be, or its GGUF file.

    Args:
        revision: a commit, a tag or a branch on the hub; None is the newest.
        argument: what names the model on the command line.
        needed: patterns of the files that a directory must have.

    Raises:
        OperatorError: there is none, or it lacks a file, or it has no revisions.
    """
    if model is not None and is_hub_id(model):
        return check_files(_fetch(model, revision, argument), f"{argument} {model}", needed)
    check_no_revision(model, revision, argument)
    if model is None:
        return check_files(DEMO_MODEL, "the demo model")
    path = Path(model).expanduser()
    if not is_gguf(path) or path.is_dir():
        return check_files(path, f"{argument} {model}", needed)
    if not path.is_file():
        raise OperatorError(f"{argument} {model}: there is no file {path}")
    return path


def check_no_revision(model: str | None, revision: str | None, argument: str = "--model") -> None:
    """Only the hub has revisions.

    Raises:
        OperatorError: one was asked for.
    """
    if revision is not None:
        option = {"--draft": "--draft-revision"}.get(argument, "--revision")
        named = "the demo model" if model is None else model
        raise OperatorError(f"{option} {revision}: {named} is not on the hub, and has no revisions")


def find_draft(draft: str | None, revision: str | None, model: str | None) -> Path | None:
    """The checkpoint of the draft model, found as the model itself is; None if there is to be none.

    Raises:
        OperatorError: there is none, or it lacks a file.
    """
    if draft is not None and draft != "none":
        return find_checkpoint(draft, revision, argument="--draft", needed=_NEEDED_TO_DRAFT)
    check_no_revision("the draft", revision, "--draft")
    if draft == "none":
        return None
    if model is not None:
        return None
    return check_files(DEMO_DRAFT, "the draft of the demo model", _NEEDED_TO_DRAFT)


def check_files(folder: Path, name: str, needed: tuple[str, ...] = _NEEDED) -> Path:
    if folder.is_file():
        raise OperatorError(f"{name}: a model is a directory, or a file that ends in {SUFFIX}")
    if not folder.is_dir():
        raise OperatorError(f"{name}: there is no directory {folder}")
    for pattern in needed:
        if pattern == "config.json" and is_consolidated(folder):
            continue
        if pattern == "tokenizer.json" and (folder / TEKKEN).is_file():
            continue
        if next(folder.glob(pattern), None) is None:
            if pattern == "tokenizer.json":
                _check_family(folder)  # whoever adds a tokenizer should not be told only then
            other = next(folder.glob(f"*{SUFFIX}"), None)
            hint = f"; --model {other} serves the file" if other else ""
            raise OperatorError(f"{name}: {folder} is no checkpoint, it has no {pattern}{hint}")
    return folder


def _check_family(folder: Path) -> None:
    try:
        check_family(folder)
    except CheckpointError as error:
        raise OperatorError(str(error)) from None


def fingerprint(checkpoint: Path) -> str:
    """Eight digits that change when the model or its tokenizer does.

    Of weights above 32 MiB it reads pieces at even distances: to read them all would take as long as to load them.
    """
    digest = blake2b(digest_size=4)
    files = list(_identity(checkpoint))
    stride = _PIECE * -(-sum(path.stat().st_size for path, _ in files) // _SAMPLED_BYTES)
    for path, num_bytes in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as opened:
            digest.update(opened.read(num_bytes))
            for start in range(num_bytes, size, stride):
                digest.update(os.pread(opened.fileno(), _PIECE, start))
    return digest.hexdigest()


def created(checkpoint: Path) -> int:
    """Returns the time at which the checkpoint was written, in seconds since 1970."""
    named = PARAMS if is_consolidated(checkpoint) else "config.json"
    path = checkpoint if is_gguf(checkpoint) else checkpoint / named
    return int(path.stat().st_mtime)


def num_bytes(checkpoint: Path) -> int:
    """Returns the bytes of the weights on disk."""
    files = [checkpoint] if is_gguf(checkpoint) else checkpoint.glob("*.safetensors")
    return sum(path.stat().st_size for path in files)


def _identity(checkpoint: Path) -> Iterator[tuple[Path, int]]:
    """The files of a checkpoint, and how many bytes at the start of each are no weights."""
    if is_gguf(checkpoint):
        header = read_header(checkpoint)
        yield checkpoint, header.num_bytes
        yield from (
            (path, 0) for path in sorted({tensor.file for tensor in header.tensors.values()} - {checkpoint})
        )
        return
    for pattern in (*_NEEDED, PARAMS, TEKKEN):
        for path in sorted(checkpoint.glob(pattern)):
            yield path, path.stat().st_size if path.suffix == ".json" else 0


def _fetch(hub_id: str, revision: str | None, argument: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    fetch = partial(snapshot_download, hub_id, revision=revision)
    try:
        folder = Path(fetch(allow_patterns=list(_FETCHED)))
        return Path(fetch(allow_patterns=[*_FETCHED, WEIGHTS])) if is_consolidated(folder) else folder
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        # Except for a refusal, which names a wrong id, revision or token, the next attempt may succeed.
        is_refused = status is not None and status < 500 and status != HTTPStatus.TOO_MANY_REQUESTS
        kind = OperatorError if is_refused else TransientError
        raise kind(f"{argument} {hub_id}: no such directory, and the hub says: {error}") from None
