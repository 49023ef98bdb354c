"""Checkpoints of bitsandbytes: NF4, FP4 and INT8.

(Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023, for NF4 and double quantization; LLM.int8():
8-bit Matrix Multiplication for Transformers at Scale, 2022.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.quant.codebook import NF4, UNIT, Codebook
from penstock.engine.quant.formats import DENSE, Dense, NamedTensors
from penstock.engine.quant.storage import BadTensor, Storage, Storages, StoredTensor
from penstock.engine.quant.storages.names import all_but, excluded
from penstock.engine.quant.storages.packing import Codes, StoredIntegers, finite, unpack_nibbles

_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_FP4 = tuple(sign * twelfths / 12 for sign in (1, -1) for twelfths in _FP4_TWELFTHS)
"""The floats of 4 bits of bitsandbytes, which are not E2M1: the largest is 1."""

TABLES = {"nf4": NF4, "fp4": _FP4}

_BLOCK = 64
"""The weights that share a scale, or a multiple of it, as blocks were in all versions; they go across rows."""

_STORAGE = {"uint8": ("U8", 1), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "float32": ("F32", 4)}
"""The types that packed numbers may pretend to be: their names in safetensors, and their bytes."""

_STATE = "weight.quant_state.bitsandbytes__"


@dataclass(frozen=True, slots=True)
class Bnb4:
    """Places in a table of 16 numbers, two in a byte, the higher bits first: the weight is table[place] * absmax.

    weight: [out * in / 2, 1] bytes, or as many bytes in a type that they pretend to be
    weight.absmax: [blocks] float32. With double quantization, bytes: absmax is
        nested_quant_map[byte] * nested_absmax + nested_offset.
    weight.quant_map: [16], the table
    weight.nested_absmax: a float32 for each `nested_blocksize` blocks
    weight.nested_quant_map: [256] float32
    weight.quant_state.bitsandbytes__nf4 (or fp4): JSON in bytes, with shape, blocksize, nested_blocksize, nested_offset
    """

    kind: str
    """nf4 or fp4."""
    is_nested: bool = False
    storage: str = "uint8"

    @property
    def name(self) -> str:
        return f"bitsandbytes, {self.kind.upper()}"

    def format(self, out_features: int, in_features: int) -> Codebook | Dense:  # noqa: ARG002
        codebook = self._codebook(in_features)
        return codebook if codebook.group_size % UNIT == 0 else DENSE

    def _codebook(self, in_features: int) -> Codebook:
        """Blocks may go across rows, but groups do not."""
        return Codebook(self.kind, TABLES[self.kind], math.gcd(_BLOCK, in_features))

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        dtype, width = _STORAGE[self.storage]
        num_bytes = -(-out_features * in_features // 2)
        yield StoredTensor("weight", (-(-num_bytes // width), 1), (dtype,), loose=True)
        yield StoredTensor(_STATE + self.kind, (None,), ("U8",))
        yield StoredTensor("weight.absmax", (None,), ("U8",) if self.is_nested else ("F32",))
        yield StoredTensor("weight.quant_map", (16,), ("F32",))
        if self.is_nested:
            yield StoredTensor("weight.nested_absmax", (None,), ("F32",))
            yield StoredTensor("weight.nested_quant_map", (256,), ("F32",))

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        state = self._state(tensors)
        if not torch.allclose(tensors["weight.quant_map"], torch.tensor(TABLES[self.kind]), atol=1e-4):
            raise BadTensor("weight.quant_map", f"is not the table of {self.kind}")
        out_features, in_features = state.shape
        count, block = out_features * in_features, state.block
        numbers = tensors["weight"].view(torch.uint8).flatten()
        if not 0 <= 2 * len(numbers) - count < 8:
            raise BadTensor(
                "weight", f"has {len(numbers)} bytes, which is not the size of {list(state.shape)}"
            )
        places = torch.unflatten(unpack_nibbles(numbers), 0, (-1, 2)).flip(-1).flatten()[:count]
        absmax = self._absmax(tensors, state)
        if block % _BLOCK or len(absmax) != -(-count // block):
            raise BadTensor(
                "weight.absmax", f"has {len(absmax)} scales for {count} weights in blocks of {block}"
            )
        codebook = self._codebook(in_features)
        group = codebook.group_size
        scale = absmax.repeat_interleave(block // group)[: count // group]
        found = {"weight": places.view(state.shape), "scale": scale.view(out_features, -1)}
        return found if self.format(*state.shape) == codebook else {"weight": codebook.unpack(found)}

    def _state(self, tensors: NamedTensors) -> _State:
        suffix = _STATE + self.kind
        try:
            return _State.read(bytes(tensors[suffix].tolist()))
        except (ValueError, TypeError, RecursionError):
            raise BadTensor(suffix, "is no JSON of a quant_state") from None
        except CheckpointError as error:
            raise BadTensor(suffix, f"is malformed: {error}") from None

    def _absmax(self, tensors: NamedTensors, state: _State) -> Tensor:
        """[blocks] float32"""
        if not self.is_nested:
            return finite(tensors, "weight.absmax")
        places, scale = tensors["weight.absmax"], finite(tensors, "weight.nested_absmax")
        block = state.nested_block
        if len(scale) != -(-len(places) // block):
            raise BadTensor(
                "weight.nested_absmax", f"has {len(scale)} scales for {len(places)} in blocks of {block}"
            )
        numbers = finite(tensors, "weight.nested_quant_map")[places.int()]
        return numbers * scale.repeat_interleave(block)[: len(places)] + state.nested_offset


@dataclass(frozen=True, slots=True)
class _State:
    """The JSON that bitsandbytes stores with a weight."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    nested_offset: float

    @classmethod
    def read(cls, text: bytes) -> _State:
        """Raises: ValueError, TypeError or CheckpointError, if the text is malformed."""
        state = Fields("quant_state", dict(json.loads(text)))
        out_features, in_features = state.integers("shape")
        if min(out_features, in_features) < 1:
            raise ValueError
        return cls(
            (out_features, in_features),
            state.size("blocksize"),
            state.size("nested_blocksize", 256),
            state.number("nested_offset", 0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BnbInt8(StoredIntegers):
    """Integers with a sign: the weight is q * SCB / 127.

    weight: [out, in] int8
    SCB: [out] float32, the largest magnitude of each row
    weight_format: 0, which says that the rows lie one after another
    """

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        yield from StoredIntegers.tensors(self, out_features, in_features)
        yield StoredTensor("weight_format", (1,), ("U8",), optional=True, loose=True)

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        if "weight_format" in tensors and bool(tensors["weight_format"].any()):
            raise BadTensor(
                "weight_format", "says that rows are interleaved, which is not supported; only 0 is"
            )
        return StoredIntegers.repack(self, {**tensors, "SCB": tensors["SCB"].float() / 127})


def bnb_storages(fields: Fields) -> Storages:
    """The storages of `quant_method` bitsandbytes.

    LLM.int8() multiplies outliers of activations in 16 bits and the others in 8; here all have 15 bits.

    Raises:
        CheckpointError: naming the field that is missing, malformed or not supported.
    """
    is_excluded = excluded(fields, "llm_int8_skip_modules")
    return all_but(_storage(fields), is_excluded)


def _storage(fields: Fields) -> Storage:
    if fields.flag("load_in_8bit"):
        return BnbInt8(
            name="bitsandbytes, INT8",
            bits=8,
            group_size=None,
            weight=Codes("weight", 8, "I8"),
            scale="SCB",
            lowest=-128,
        )
    if not fields.flag("load_in_4bit"):
        raise fields.error("neither load_in_8bit nor load_in_4bit is true")
    return Bnb4(
        fields.one_of("bnb_4bit_quant_type", *TABLES, default="fp4"),
        fields.flag("bnb_4bit_use_double_quant"),
        fields.one_of("bnb_4bit_quant_storage", *_STORAGE, default="uint8"),
    )
