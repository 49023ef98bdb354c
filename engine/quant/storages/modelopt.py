"""Checkpoints of NVIDIA's Model Optimizer: floats of 8 bits, and of 4 bits in groups.

Scales of activations and of the KV cache are not read.
"""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.quant.float8 import Scaling
from penstock.engine.quant.storage import PLAIN, Storage, Storages
from penstock.engine.quant.storages.compressed import GroupedFloats
from penstock.engine.quant.storages.float8 import StoredFloat8
from penstock.engine.quant.storages.names import all_but, excluded_by_wildcards, full_names

_NVFP4 = GroupedFloats("NVFP4", "weight", "weight_scale_2", divides=False)
_STORAGES: dict[str, Storage] = {
    "fp8": StoredFloat8(Scaling.TENSOR),
    "nvfp4": _NVFP4,
    "w4a16_nvfp4": _NVFP4,
}
_MIXED = "mixed_precision"


def modelopt_storages(fields: Fields) -> Storages:
    """The storages of `quant_method` modelopt: one for all linear maps, or one for each map that it lists.

    Raises:
        CheckpointError: names the field that is missing, malformed or not supported.
    """
    is_excluded = excluded_by_wildcards(fields, "exclude_modules", "ignore")
    if fields.one_of("quant_algo", *_STORAGES, _MIXED) != _MIXED:
        return all_but(_storage(fields), is_excluded)
    layers = fields.nested("quantized_layers")
    storages = {name: _storage(layers.nested(name)) for name in layers.names()}

    def storage(name: str) -> Storage:
        if is_excluded(name):
            return PLAIN
        parts = (part for full in full_names(name) for part in _around(full))
        return next((storages[part] for part in parts if part in storages), PLAIN)

    return storage


def _storage(fields: Fields) -> Storage:
    fields.one_of("group_size", 16, default=16)
    return _STORAGES[fields.one_of("quant_algo", *_STORAGES)]


def _around(name: str) -> list[str]:
    """Returns a name, and those of the modules around it, the nearest first: all experts may be listed as one."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
