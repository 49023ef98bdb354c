"""Experts by Triton against plain torch's, in every format that they are packed in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.kernels import experts as reference
from penstock.engine.kernels.linear import DenseLinear, Linear
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.kernels.packed import Code, PackedWeight
from penstock.engine.kernels.ranks import Ranks
from penstock.engine.kernels.select import trials, triton_kernels
from penstock.engine.kernels.triton import tiles
from penstock.engine.kernels.triton.attention_tiling import Chip
from penstock.engine.kernels.triton.expert_weights import PackedExperts, pack_experts
from penstock.engine.kernels.triton.experts import SortedPairs, most_tiles
from penstock.engine.kernels.triton.tiles import (
    ROW_CLASSES,
    Card,
    expert_key,
    expert_rows,
    expert_rule,
    shared_bytes,
)
from penstock.engine.model.files import open_files
from penstock.engine.model.parse import read_config
from penstock.engine.model.split import split_config
from penstock.engine.model.split_files import SplitFiles
from penstock.engine.model.tensors import make_recipe
from penstock.engine.program.expert_layer import run_experts
from penstock.engine.quant.formats import DENSE, Format, NamedTensors
from penstock.engine.quant.integers import Integers
from penstock.engine.spec import Activation
from tests.engine.families import SPARSE
from tests.engine.integers import any_integers
from tests.engine.kernels.test_ops import CPU
from tests.engine.kernels.test_ops import SPARSE as CONFIG
from tests.engine.kernels.triton.dtypes import DTYPES
from tests.engine.kernels.triton.expert_layers import FORMATS, Made, Pair, random, sizes
from tests.engine.kernels.triton.test_packed_linear import CHIPS
from tests.engine.kernels.triton.test_table import WAITING, Recorder
from tests.engine.model.test_expert_ranks import part, with_shared
from tests.few import examples

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.combinations("combinations of what Triton's kernels take"),
]

LAYER = sizes(192, 64, num_experts=3)
SWIGLU = Activation(limit=0.7, alpha=1.702, shift=1.0)
RELU2 = Activation(kind="relu2", is_gated=False)


@pytest.mark.parametrize("dtype", DTYPES[::-1])
@pytest.mark.parametrize("name", FORMATS)
def test_they_are_the_experts_of_every_format(name: str, dtype: torch.dtype, device: torch.device) -> None:
    pair = Pair(FORMATS[name], LAYER, device, dtype, with_bias=True)
    for rows in (1, 4):
        pair.check(*pair.step(rows))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "activation", [Activation(), Activation(kind="gelu_tanh"), Activation(kind="gelu"), SWIGLU, RELU2]
)
@pytest.mark.parametrize("inner", [20, 40])
def test_every_activation_at_odd_sizes(
    inner: int, activation: Activation, with_bias: bool, device: torch.device
) -> None:
    spec = sizes(72, inner, num_experts=3, activation=activation)
    pair = Pair(DENSE, spec, device, with_bias=with_bias)
    pair.check(*pair.step(5))


@pytest.mark.parametrize("name", ["16 bits", "int4, zeros", "mxfp4"])
def test_a_row_has_the_same_bits_in_any_company(name: str, device: torch.device) -> None:
    """Alone, among few of its expert, among many, of every class, and in any order."""
    pair = Pair(FORMATS[name], LAYER, device, torch.float16)
    x, ids, weights = pair.step(100)
    whole = pair.triton(x, ids, weights)
    pair.assert_near(whole, pair.expected(x, ids, weights))
    for rows in ([0], list(range(20, 29)), list(range(60, 18, -1))):
        assert torch.equal(pair.triton(x[rows], ids[rows], weights[rows]), whole[rows])
    classes = {expert_rows(ids[:rows].numel(), LAYER.router.num_experts) for rows in (1, 9, 42, 100)}
    assert classes == set(ROW_CLASSES)


def test_one_expert_may_have_all_rows(device: torch.device) -> None:
    pair = Pair(DENSE, LAYER, device)
    x, ids, weights = pair.step(20)
    pair.check(x, torch.full_like(ids[:, :1], 2), weights[:, :1])


def test_weights_may_multiply_what_experts_read(device: torch.device) -> None:
    pair = Pair(DENSE, LAYER, device)
    for rows in (1, 5):
        pair.check(*pair.step(rows), weighs_inputs=True)


def test_what_is_no_expert_here_adds_nothing(device: torch.device) -> None:
    """Also where every choice is none, and where there are no rows."""
    pair = Pair(DENSE, LAYER, device)
    for rows in (1, 9):
        x, ids, weights = pair.step(rows)
        assert not pair.triton(x, torch.full_like(ids, -1), weights).any()
        ids[:, 1], ids[-1, 0] = -1, 40
        pair.check(x, ids, weights)
    assert pair.triton(x[:0], ids[:0], weights[:0]).shape == (0, LAYER.hidden_size)


@pytest.mark.parametrize("expert_parallel", ["on", "off"])
def test_ranks_have_some_of_the_experts_or_of_their_rows(
    expert_parallel: str, tmp_path: Path, device: torch.device
) -> None:
    """What two ranks make of a layer with shared experts adds up to what one process makes of it."""
    config = with_shared(tmp_path)
    x = random(3, config.hidden_size).to(device)
    parts = []
    for rank in range(2):
        ranks = cast("Ranks", SimpleNamespace(rank=rank, size=2, sum=lambda made: made))
        own = split_config(config, 2, rank, expert_parallel)
        files = SplitFiles(open_files(tmp_path), config, own, ranks)
        kernels = replace(triton_kernels(own, device, torch.float32, LoadOptions()), ranks=ranks)
        parts.append(run_experts(part(own, files, kernels), x, kernels, config.spec.norm_eps))
    plain = reference_kernels(CPU, torch.float32)
    whole = run_experts(part(config, open_files(tmp_path), plain), x.cpu(), plain, config.spec.norm_eps)
    torch.testing.assert_close((parts[0] + parts[1]).cpu(), whole, rtol=1e-4, atol=1e-5)
    assert all(each.abs().max() > 0.1 for each in parts)


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
def test_experts_are_quantized_at_load(
    quantize: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last layer, for the first one keeps 8 bits. The interpreter would take long to try it with many rows."""
    monkeypatch.setattr(tiles, "ROW_CLASSES", tiles.ROW_CLASSES[:1])
    entries: dict[str, Any] = {"moe_intermediate_size": 64, "mlp_only_layers": [], "num_hidden_layers": 2}
    config = read_config(SPARSE["Qwen 3 MoE"].make(tmp_path, **entries))
    recipe = make_recipe(config, LoadOptions(quantize=quantize))
    kernels = triton_kernels(config, device, torch.float32, LoadOptions())
    own = part(config, open_files(tmp_path), kernels, recipe, layer=-1)
    assert isinstance(own.gate_up, PackedExperts)
    assert own.gate_up.code is {"int4": Code.UINT4, "fp8": Code.FLOAT8}[quantize]
    plain = replace(reference_kernels(CPU, torch.float32), linear=unpacked)
    x = random(3, config.hidden_size)
    of_plain, eps = part(config, open_files(tmp_path), plain, recipe, layer=-1), config.spec.norm_eps
    made = run_experts(own, x.to(device), kernels, eps).cpu()
    torch.testing.assert_close(made, run_experts(of_plain, x, plain, eps), rtol=1e-4, atol=1e-5)


def unpacked(tensors: NamedTensors, format: Format, bias: Tensor | None, *, gated: bool = False) -> Linear:  # noqa: ARG001
    """The linear map of weights as floats, in whatever format they are."""
    return DenseLinear(format.unpack(tensors).float(), bias)


@given(data=st.data())
@settings(deadline=None, max_examples=examples(15))
def test_pairs_are_sorted_into_tiles(data: st.DataObject, device: torch.device) -> None:
    num_experts, block_m = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 16]))
    rows = data.draw(
        st.lists(st.lists(st.integers(-1, num_experts), min_size=2, max_size=2), min_size=2, max_size=50)
    )
    ids = torch.tensor(rows, dtype=torch.int32, device=device)
    pairs = SortedPairs.of(ids, num_experts, block_m)
    assert pairs.num_tiles == most_tiles(ids.numel(), num_experts, block_m)
    assert pairs.order is not None
    assert pairs.tile_experts is not None
    order, flat, found = pairs.order.tolist(), ids.flatten().tolist(), []
    used = [tile for tile in pairs.tile_experts.T.tolist() if tile[0] >= 0]
    assert used == pairs.tile_experts.T.tolist()[: len(used)], "tiles that nobody has are the last ones"
    for expert, first, end in used:
        assert 0 < end - first <= block_m
        assert {flat[pair] for pair in order[first:end]} == {expert}
        found += order[first:end]
    assert found == [pair for own in range(num_experts) for pair, expert in enumerate(flat) if expert == own]


def test_nothing_waits_for_the_device(device: torch.device) -> None:
    pair = Pair(DENSE, LAYER, device)
    for rows in (1, 9):
        inputs = pair.step(rows)
        with Recorder() as recorder:
            pair.triton(*inputs)
        assert not set(recorder.names) & WAITING


def test_the_trials_of_a_table_run(device: torch.device) -> None:
    options = LoadOptions(max_num_seqs=1)
    kernels = triton_kernels(CONFIG, device, torch.float32, options)
    assert kernels.is_static
    tried = trials(kernels, CONFIG, options)
    for name in ("route", "run_experts"):
        tried[name]()


@pytest.mark.parametrize("name", FORMATS)
def test_plain_torch_runs_what_is_packed(name: str, device: torch.device) -> None:
    """For experts that Triton does not run, packed or unpacked; what is unpacked, it runs."""
    pair = Pair(FORMATS[name], LAYER, device, with_bias=True)
    x, ids, weights = pair.step(4)
    expected = pair.expected(x, ids, weights)
    gate_up, down = (each.unpacked(torch.float32) for each in pair.packed)
    unpacked = gate_up, down
    for packed in (pair.packed, unpacked):
        found = reference.run_experts(x, ids, weights, *packed, pair.spec.activation)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(each.code is None for each in unpacked)
    if name == "int4, offsets, permuted":
        pair.packed = unpacked
        pair.check(x, ids, weights)


def weight_of(experts: PackedExperts) -> PackedWeight:
    assert isinstance(experts.weight, PackedWeight)
    return experts.weight


def test_factors_are_those_that_all_experts_can_have(device: torch.device) -> None:
    """One expert has offsets that are no whole steps, and one has scales beyond float16."""
    format = Integers(4, 32, has_offset=True)
    own: list[Any] = [any_integers(format, 16, 64, torch.Generator().manual_seed(seed)) for seed in range(3)]
    for tensors in own:
        tensors["scale"] = tensors["scale"].half().float()
    for tensors in own[1:]:
        tensors["offset"] = -torch.full_like(tensors["scale"], 8) * tensors["scale"]
    own[2] = own[2] | {"scale": own[2]["scale"] * 2.0**30, "offset": own[2]["offset"] * 2.0**30}

    def packed(some: list[Any]) -> PackedExperts:
        each: Iterator[Made] = ((tensors, None) for tensors in some)
        return pack_experts(each, format, len(some), 16, device, torch.float32, gated=True)

    assert weight_of(packed(own[1:])).zero is not None
    assert weight_of(packed(own[:2])).zero is None
    assert weight_of(packed(own[:2])).scale.dtype == torch.float16
    mixed = packed(own)
    assert weight_of(mixed).zero is None
    assert weight_of(mixed).scale.dtype == torch.float32, "no type of 16 bits holds them all"
    x, ids = random(3, 64).to(device), torch.tensor([[0], [1], [2]], device=device)
    expected = torch.stack([format.unpack(each).to(device) @ row for each, row in zip(own, x, strict=True)])
    torch.testing.assert_close(mixed(x, ids)[:, 0], expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("code", [None, *Code])
def test_tiles_of_experts_fit_every_card(name: str, dtype: torch.dtype, code: Code | None) -> None:
    """Steps are as long in every class, so that a row's sums are added in one order."""
    chip = CHIPS[name]
    tilings = [expert_rule(code, dtype, most, chip) for most in ROW_CLASSES]
    assert len({tiling.block_k for tiling in tilings}) == 1
    for tiling in tilings:
        assert tiling.num_stages >= 2
        assert shared_bytes(tiling, code, dtype, chip.tensor_cores) <= chip.shared_bytes


def test_the_class_is_that_of_the_rows_of_an_expert() -> None:
    assert [expert_rows(pairs, 128) for pairs in (8, 1024, 1025, 4096, 4097, 65_536)] == [
        16,
        16,
        64,
        64,
        255,
        255,
    ]
    assert expert_key(None, torch.bfloat16) == "experts, bfloat16"
    assert expert_key(Code.INT4, torch.bfloat16) == "experts, int4 x bfloat16"
    card = Card(Chip(132))
    assert card.expert_tiling(None, torch.float32, 16) == expert_rule(None, torch.float32, 16, card.chip)
