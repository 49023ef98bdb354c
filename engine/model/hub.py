"""From what the operator wrote to a directory: a path stays off the network, anything else is a Hugging Face id."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from engine.errors import CheckpointError

FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


def find_checkpoint(name: str) -> Path:
    """The directory that `name` is, or a download of the Hugging Face repository of that name.

    Raises:
        CheckpointError: there is no such directory or repository, or it cannot be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{name} is a file; a checkpoint is a directory")
    if _looks_like_path(name):
        raise CheckpointError(f"{name} is not a directory")
    return _download(name)


def _looks_like_path(name: str) -> bool:
    """True for everything that cannot be `name` or `owner/name`, and for what lies in a directory that is here."""
    parts = Path(name).parts
    return name.startswith((".", "/", "~")) or len(parts) > 2 or (len(parts) == 2 and Path(parts[0]).is_dir())


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except GatedRepoError:
        raise CheckpointError(
            f"{name} on Hugging Face is gated: accept its licence and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{name} is neither a directory here nor a repository on Hugging Face"
        ) from None
    except HFValidationError:
        raise CheckpointError(f"{name} is neither a directory nor a Hugging Face id") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise CheckpointError(
            f"{name} is not a directory here, and Hugging Face cannot be reached to look for it there"
        ) from None
    except HfHubHTTPError as error:
        raise CheckpointError(f"{name} cannot be downloaded: {str(error).splitlines()[0]}") from None
