"""AWQ checkpoints of AutoAWQ in the order that its `gemm` kernels read.

(Lin et al., AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration, 2024.)
"""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.quant.storage import Storages
from penstock.engine.quant.storages.names import LM_HEAD, all_but, excluded
from penstock.engine.quant.storages.packing import Codes, StoredIntegers, group_size

_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each of eight outputs side by side, the lowest bits being nibble 0."""


def awq_storages(fields: Fields) -> Storages:
    """Returns the storages of `quant_method` awq: all linear maps of layers except `modules_to_not_convert`.

    Words hold outputs side by side: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out].

    Raises:
        CheckpointError: names the field that is malformed or not supported.
    """
    bits = fields.one_of("bits", 4, default=4)
    fields.one_of("version" if fields.has("version") else "format", "gemm", default="gemm")
    storage = StoredIntegers(
        name="AWQ, 4 bits",
        bits=bits,
        group_size=group_size(fields, 128),
        weight=Codes("qweight", bits, down=True, order=_NIBBLES),
        zeros=Codes("qzeros", bits, down=True, order=_NIBBLES),
        scale="scales",
        symmetric=False,
        is_transposed=True,
    )
    is_excluded = excluded(fields, "modules_to_not_convert")
    return all_but(storage, lambda name: name == LM_HEAD or is_excluded(name))
