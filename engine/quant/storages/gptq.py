"""GPTQ checkpoints of AutoGPTQ, GPTQModel and others.

(Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, 2023.)
"""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.quant.storage import PLAIN, Storage, Storages
from penstock.engine.quant.storages.names import EMBEDDING, LAYERS, LM_HEAD, regular_expression
from penstock.engine.quant.storages.packing import Codes, StoredIntegers, group_size


def gptq_storages(fields: Fields) -> Storages:
    """Returns the storages of `quant_method` gptq: all linear maps of layers that the config does not leave out.

    GPTQModel's `dynamic` has patterns of names and the entries that differ for these; "-:" leaves them out.

    Raises:
        CheckpointError: names the field that is missing, malformed or not supported.
    """
    usual, dynamic = _storage(fields), fields.nested("dynamic")
    rules: list[tuple[str, Storage]] = [
        (entry, PLAIN if entry.startswith("-:") else _storage(dynamic.nested(entry).with_defaults(fields)))
        for entry in dynamic.names()
    ]
    patterns = [
        (regular_expression(entry.removeprefix("-:").removeprefix("+:"), dynamic.source), storage)
        for entry, storage in rules
    ]
    has_head = fields.flag("lm_head")
    quantized = fields.string_lists("modules_in_block_to_quantize")

    def storage(name: str) -> Storage:
        rule = next((storage for pattern, storage in patterns if pattern.match(name)), usual)
        if name in (EMBEDDING, LM_HEAD):
            return rule if name == LM_HEAD and has_head else PLAIN
        in_block = name.removeprefix(LAYERS).partition(".")[2]
        return PLAIN if quantized and in_block not in quantized else rule

    return storage


def _storage(fields: Fields) -> StoredIntegers:
    """The storage that the entries of a config say.

    qweight: [in * bits / 32, out], a word holds inputs side by side
    qzeros: [groups, out * bits / 32], a word holds outputs side by side; version 1 stores zero - 1
    scales: [groups, out]
    g_idx: [in], the group of each input. Without act-order, inputs of a group are side by side.
    """
    form = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    version = fields.one_of(form, "gptq", "gptq_v2", default="gptq")
    bits = fields.one_of("bits", 4, 8)
    return StoredIntegers(
        name=f"GPTQ, {bits} bits",
        bits=bits,
        group_size=group_size(fields, 128),
        weight=Codes("qweight", bits),
        zeros=Codes("qzeros", bits, bias=-1 if version == "gptq" else 0, down=True),
        scale="scales",
        symmetric=fields.flag("sym", True),
        groups="g_idx",
        act_order=fields.flag("desc_act"),
        is_transposed=True,
    )
