"""GPTQ checkpoints of AutoGPTQ, GPTQModel and others.

(Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, 2023.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.fields import Fields
from engine.quant.formats import NamedTensors
from engine.quant.integers import Integers
from engine.quant.storage import PLAIN, Storage, Storages, StoredTensor
from engine.quant.storages.names import EMBEDDING, LAYERS, LM_HEAD, regular_expression
from engine.quant.storages.packing import (
    check_order,
    check_words,
    check_zeros,
    finite_as_stored,
    group_size,
    integer_among,
    integers_format,
    permuted,
    text_among,
    to_integers,
    unpack_words,
)


@dataclass(frozen=True, slots=True)
class Gptq:
    """Integers in 32-bit words, lowest bits first: the weight is (q - zero) * scale.

    qweight: [in * bits / 32, out], a word holds inputs side by side
    qzeros: [groups, out * bits / 32], a word holds outputs side by side; version 1 stores zero - 1
    scales: [groups, out]
    g_idx: [in], the group of each input. Without act-order, inputs of a group are side by side.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True
    act_order: bool = False
    version: int = 1

    @property
    def name(self) -> str:
        return f"GPTQ, {self.bits} bits"

    def format(self, out_features: int, in_features: int) -> Integers:
        check_words(self.bits, in_features, "inputs")
        check_words(self.bits, out_features, "outputs")
        return integers_format(
            self.bits,
            self.group_size,
            in_features,
            has_zeros=not self.symmetric,
            is_permuted=self.act_order,
        )

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        num_groups = in_features // self.format(out_features, in_features).group_size
        yield StoredTensor("qweight", (in_features * self.bits // 32, out_features), ("I32",))
        yield StoredTensor("qzeros", (num_groups, out_features * self.bits // 32), ("I32",))
        yield StoredTensor("scales", (num_groups, out_features))
        yield StoredTensor("g_idx", (in_features,), ("I32",), optional=not self.act_order)

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        codes = unpack_words(tensors["qweight"].T, self.bits)
        scale = finite_as_stored(tensors, "scales").T
        zeros = unpack_words(tensors["qzeros"], self.bits).T.int() + (1 if self.version == 1 else 0)
        format = self.format(*codes.shape)
        if self.symmetric:
            check_zeros(zeros, 1 << (self.bits - 1), "qzeros")
        integers = to_integers(format, codes, scale, None if self.symmetric else zeros)
        if format.is_permuted:
            return permuted(integers, format, tensors["g_idx"], "g_idx")
        if "g_idx" in tensors:
            check_order(tensors["g_idx"], format.group_size, "g_idx")
        return integers


def gptq_storages(fields: Fields) -> Storages:
    """The storages of `quant_method` gptq: all linear maps of layers but those that the config leaves out.

    Raises:
        CheckpointError: naming the field that is missing, malformed or not supported.
    """
    version = text_among(
        fields,
        "checkpoint_format" if fields.has("checkpoint_format") else "format",
        "gptq",
        "gptq_v2",
        default="gptq",
    )
    bits = integer_among(fields, "bits", 4, 8)
    usual = _overridden(Gptq(bits, 128, version=2 if version == "gptq_v2" else 1), fields)
    has_head = fields.flag("lm_head")
    quantized = fields.string_lists("modules_in_block_to_quantize")
    rules = list(_rules(fields, usual))

    def storage(name: str) -> Storage:
        rule = next((storage for pattern, storage in rules if pattern.match(name)), usual)
        if name in (EMBEDDING, LM_HEAD):
            return rule if name == LM_HEAD and has_head else PLAIN
        in_block = name.removeprefix(LAYERS).partition(".")[2]
        return PLAIN if quantized and in_block not in quantized else rule

    return storage


def _rules(fields: Fields, usual: Gptq) -> Iterator[tuple[re.Pattern[str], Storage]]:
    """The entries of GPTQModel's `dynamic`: patterns of names, and what differs for these; "-:" leaves them out."""
    dynamic = fields.nested("dynamic")
    for entry in dynamic.names():
        pattern = regular_expression(entry.removeprefix("-:").removeprefix("+:"), dynamic.source)
        yield pattern, PLAIN if entry.startswith("-:") else _overridden(usual, dynamic.nested(entry))


def _overridden(usual: Gptq, fields: Fields) -> Gptq:
    """The usual storage with the fields that are there."""
    return replace(
        usual,
        bits=integer_among(fields, "bits", 4, 8, default=usual.bits),
        group_size=group_size(fields, usual.group_size or -1),
        symmetric=fields.flag("sym", usual.symmetric),
        act_order=fields.flag("desc_act", usual.act_order),
    )
