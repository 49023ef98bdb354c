"""Which storage each linear map of a checkpoint has: what `quantization_config` in config.json says."""

from __future__ import annotations

from collections.abc import Callable

from engine.fields import Fields
from engine.quant.gguf import gguf_storages
from engine.quant.storage import PLAIN, Storages

METHODS: dict[str, Callable[[Fields], Storages]] = {"gguf": gguf_storages}
"""By `quant_method`: reads the other fields of quantization_config."""


def storages_of(quantization: Fields | None) -> Storages:
    """The storages of a checkpoint's linear maps; without a quantization_config all are plain.

    Raises:
        CheckpointError: naming the field that is missing, malformed or not supported.
    """
    if quantization is None:
        return lambda _: PLAIN
    return METHODS[quantization.text("quant_method")](quantization)
