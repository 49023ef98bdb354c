"""What the same weights say in float32, by transformers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.app.log import log
from penstock.engine.free_memory import available_bytes
from penstock.engine.model.gguf.container import is_gguf
from penstock.engine.sizes import size_text

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.engine.config import ModelConfig

_GGUF_TIMES = 3
"""transformers takes up to so many times the weights while it reads a GGUF file."""
_BYTES_OF_LOGIT = 8
_LONGEST = 256
"""More tokens than any of the texts has."""
_LONGEST_REASON = 300


class LeftOut(Exception):
    """Nothing can be compared; the message says why."""


def check_room(folder: Path, config: ModelConfig) -> None:
    """
    Raises:
        LeftOut: there is less memory than the model takes in float32.
    """
    from penstock.engine.model.tensors import expected_shapes

    weights = 4 * sum(map(prod, expected_shapes(config).values()))
    times = _GGUF_TIMES if is_gguf(folder) else 1
    needed, free = times * weights + _LONGEST * config.vocab_size * _BYTES_OF_LOGIT, available_bytes()
    if needed > free:
        said = f"{size_text(needed)} in float32, and {size_text(free)} are free"
        raise LeftOut(f"transformers would take {said}")


def load(folder: Path) -> Any:
    """The model in transformers.

    Raises:
        LeftOut: transformers is not installed, or cannot load it.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of its GGUF reader know no other switch
    try:
        import torch
        import transformers
    except ImportError as error:
        raise LeftOut(f"pip install 'penstock[compare]' brings transformers ({error})") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    place, file = (folder.parent, {"gguf_file": folder.name}) if is_gguf(folder) else (folder, {})
    log.info("loading the weights in float32 with transformers%s", ", which may take minutes" if file else "")
    try:
        with warnings.catch_warnings(action="ignore"):
            network, info = transformers.AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.float32, output_loading_info=True, local_files_only=True, **file
            )
    except Exception as error:  # of whatever kind: the reasons of a library that does not know this model
        raise LeftOut(f"transformers cannot load it: {_reason(error)}") from None
    # What it does not find it makes up, which says nothing about ours.
    if lacking := sorted({*info["missing_keys"], *map(str, info["mismatched_keys"])}):
        raise LeftOut(f"transformers finds no {lacking[0]} in it")
    return network.eval()


def log_probabilities(network: Any, token_ids: Sequence[int]) -> Tensor:
    """[N, vocabulary] float32, after each of N tokens.

    Raises:
        LeftOut: transformers fails.
    """
    import torch

    try:
        with torch.inference_mode(), warnings.catch_warnings(action="ignore"):
            logits: Tensor = network(torch.tensor([token_ids])).logits[0]
            return torch.log_softmax(logits.float(), -1)
    except Exception as error:
        raise LeftOut(f"transformers cannot compute it: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
