"""Chooses the storage of each linear map of a checkpoint by `quantization_config` in config.json."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.fields import Fields
from penstock.engine.quant.storage import PLAIN, Storages
from penstock.engine.quant.storages.awq import awq_storages
from penstock.engine.quant.storages.bitsandbytes import bnb_storages
from penstock.engine.quant.storages.compressed import compressed_storages
from penstock.engine.quant.storages.float8 import float8_storages
from penstock.engine.quant.storages.gguf import gguf_storages
from penstock.engine.quant.storages.gptq import gptq_storages
from penstock.engine.quant.storages.modelopt import modelopt_storages
from penstock.engine.quant.storages.mxfp4 import mxfp4_storages
from penstock.engine.quant.storages.torchao import torchao_storages

METHODS: dict[str, Callable[[Fields], Storages]] = {
    "gptq": gptq_storages,
    "awq": awq_storages,
    "compressed-tensors": compressed_storages,
    "fp8": float8_storages,
    "bitsandbytes": bnb_storages,
    "torchao": torchao_storages,
    "mxfp4": mxfp4_storages,
    "modelopt": modelopt_storages,
    "gguf": gguf_storages,
}
"""By `quant_method`: reads the other fields of quantization_config."""


def storages_of(quantization: Fields | None) -> Storages:
    """The storages of a checkpoint's linear maps; without a quantization_config all are plain.

    Raises:
        CheckpointError: naming the field that is missing, malformed or not supported.
    """
    if quantization is None:
        return lambda _: PLAIN
    return METHODS[quantization.text("quant_method")](quantization)
