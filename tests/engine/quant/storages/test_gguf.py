"""ggml's blocks against the `gguf` library, the oracle: the same weights to the bit, whatever the bytes are."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.model.gguf import container
from penstock.engine.quant import formats
from penstock.engine.quant.integers import Factors, Integers, common_format, widen
from penstock.engine.quant.storage import PLAIN, BadTensor
from penstock.engine.quant.storages.gguf import TYPES, gguf_storages
from tests.engine.ggml_blocks import HALVES, random_rows
from tests.few import examples


@settings(max_examples=examples(15))
@given(num_rows=st.integers(1, 5), num_blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("name", TYPES)
def test_repacked_blocks_stand_for_the_same_weights_to_the_bit(
    name: str, num_rows: int, num_blocks: int, seed: int
) -> None:
    rows, blocks = random_rows(name, num_rows, num_blocks, seed), TYPES[name]
    expected = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name]))
    packed = blocks.repack({"weight": rows})
    format = blocks.format(num_rows, num_blocks * blocks.block)
    assert {key: tensor.shape for key, tensor in packed.items()} == dict(format.shapes(*expected.shape))
    assert packed["weight"].dtype == torch.int8
    assert format.lowest <= int(packed["weight"].min())
    assert int(packed["weight"].max()) < format.lowest + 2**format.bits
    assert torch.equal(format.unpack(packed), expected)
    most = 1.2 if name == "Q2_K" else 1.06
    assert format.num_bytes(256, 2 * blocks.block) <= most * 512 * blocks.num_bytes


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_repacked_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rows = random_rows(name, 7, 2, 0)
    whole = TYPES[name].repack({"weight": rows})
    monkeypatch.setattr(formats, "ELEMENTS_AT_A_TIME", 3 * 2 * TYPES[name].block)
    for key, tensor in TYPES[name].repack({"weight": rows}).items():
        assert torch.equal(tensor, whole[key])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_named(name: str, value: float) -> None:
    for start in HALVES.get(name, (0,)):
        rows = random_rows(name, 3, 2, 1)
        size = TYPES[name].num_bytes
        rows[1, size : 2 * size] = 1  # of the two-level types, no scale of 0 hides it
        rows[1, size + start : size + start + 2] = torch.from_numpy(
            np.array([value], np.float16).view(np.uint8)
        )
        with pytest.raises(BadTensor, match="not finite") as caught:
            TYPES[name].repack({"weight": rows})
        assert caught.value.suffix == "weight"


def test_an_exponent_that_is_no_number_is_named() -> None:
    rows = random_rows("MXFP4", 3, 2, 1)
    rows[2, 17] = 255
    with pytest.raises(BadTensor, match="scales that are not finite"):
        TYPES["MXFP4"].repack({"weight": rows})


@pytest.mark.parametrize("first", TYPES)
@pytest.mark.parametrize("second", TYPES)
def test_any_two_types_have_a_format_in_common(first: str, second: str) -> None:
    formats = [TYPES[name].groups for name in (first, second)]
    common = common_format(formats)
    for name, format in zip((first, second), formats, strict=True):
        packed = TYPES[name].repack({"weight": random_rows(name, 2, 256 // TYPES[name].block, 2)})
        widened = widen(packed, format, common)
        assert torch.allclose(common.unpack(widened), format.unpack(packed), rtol=1e-6)
        assert common.table == (format.table if len({one.table for one in formats}) == 1 else ())
        assert {key: tensor.shape for key, tensor in widened.items()} == dict(common.shapes(2, 256))


def test_sizes_are_those_of_the_library_and_of_the_container() -> None:
    in_files = {type.name: type for type in container.TYPES.values()}
    for name, blocks in TYPES.items():
        assert (blocks.block, blocks.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert (blocks.block, blocks.num_bytes) == (in_files[name].block, in_files[name].num_bytes)
    assert {*container.SUPPORTED} == {*TYPES, "F32", "F16", "BF16"}
    for number, type in container.TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == type.name


def test_storages_are_by_name() -> None:
    storages = gguf_storages(Fields("x.gguf", {"types": {"lm_head": "Q6_K"}}))
    assert storages("lm_head").format(2, 256) == Integers(6, 16, factors=Factors.COUNTS)
    assert storages("model.embed_tokens") is PLAIN
    with pytest.raises(CheckpointError, match=r"^x\.gguf: weights of type IQ2_S are not supported"):
        gguf_storages(Fields("x.gguf", {"types": {"lm_head": "IQ2_S"}}))
