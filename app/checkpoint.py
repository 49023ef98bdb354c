"""Where the model that is asked for lies: a directory, the hub, or the demo model that comes along."""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path

from app.errors import OperatorError

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
DEMO_NAME = "penstock-demo"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NEEDED = ("config.json", "tokenizer.json", "*.safetensors")
# Not every safetensors file: some repositories have the weights a second time, in another layout.
_FETCHED = ("*.json", "model*.safetensors", "*.jinja")


def model_name(model: str | None, served_model_name: str | None) -> str:
    """The name that clients ask for."""
    if served_model_name:
        return served_model_name
    if model is None:
        return DEMO_NAME
    return model if is_hub_id(model) else Path(model).resolve().name


def is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None and not Path(model).exists()


def find_checkpoint(model: str | None, argument: str = "--model") -> Path:
    """The checkpoint's directory, fetched from the hub if it has to be.

    Args:
        argument: what names the model on the command line.

    Raises:
        OperatorError: there is none, or it lacks a file.
    """
    if model is None:
        return check_files(DEMO_MODEL, "the demo model")
    if is_hub_id(model):
        return check_files(_fetch(model, argument), f"{argument} {model}")
    return check_files(Path(model).expanduser(), f"{argument} {model}")


def check_files(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise OperatorError(f"{name}: there is no directory {folder}")
    for pattern in _NEEDED:
        if next(folder.glob(pattern), None) is None:
            raise OperatorError(f"{name}: {folder} is no checkpoint, it has no {pattern}")
    return folder


def fingerprint(folder: Path) -> str:
    """Eight digits that change when the model or its tokenizer does; the weights count by their sizes."""
    digest = blake2b(digest_size=4)
    for pattern in _NEEDED:
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            if path.suffix == ".json":
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _fetch(hub_id: str, argument: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_FETCHED)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise OperatorError(f"{argument} {hub_id}: no such directory, and the hub says: {error}") from None
