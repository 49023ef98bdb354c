"""Levels that add in the same order give the same bits: all with fused multiply-adds, where no tiles or pairs do it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.kernels.cpu.levels import AMX, AVX512BF16
from penstock.engine.kernels.cpu.native import NativeLinear, Team
from penstock.engine.kernels.kv_cache import KVFormat
from penstock.engine.quant.codebook import Codebook
from penstock.engine.quant.float8 import Float8
from penstock.engine.quant.integers import Integers
from tests.engine.families import STATES
from tests.engine.kernels.levels import DOTPROD, LEVELS, TILES, build_levels, library_of
from tests.engine.kernels.random_model import DTYPES, Checkpoint, Prompts, Types, config
from tests.engine.kernels.test_native_experts import FORMATS, NAMES, SWIGLU, Kept, Pair, packed, random_step
from tests.engine.kernels.test_native_states import ALL, FEW, run
from tests.engine.model.test_states import TOKEN_IDS

pytestmark = pytest.mark.long("other instruction sets")

FUSED = tuple(level for level in LEVELS if level != "portable")
FUSED_BESIDE = tuple(level for level in FUSED if level != DOTPROD)
"""Those with code of their own beside the products of integers."""
FUSED_FLOATS = tuple(level for level in FUSED_BESIDE if level not in (AVX512BF16, AMX, TILES))
"""Those that multiply bfloat16, and what is decoded, in float32."""
SAME_CHAINS = tuple(level for level in FUSED_FLOATS if level != "avx512")
"""Those that add over a state's keys in as many chains."""


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build_levels(FUSED)


def levels_for(kept: Kept) -> tuple[str, ...]:
    if isinstance(kept, Integers):
        return FUSED
    return FUSED_FLOATS if kept is torch.bfloat16 or isinstance(kept, Float8 | Codebook) else FUSED_BESIDE


def check(levels: tuple[str, ...], compute: Callable[[Team], Tensor]) -> None:
    """Computes at all levels, with as many threads as not to divide the work evenly."""
    found = {}
    for level in levels:
        team = library_of(level).start_team(3)
        found[level] = compute(team)
        team.close()
    first, *others = found
    for other in others:
        assert torch.equal(found[other], found[first]), (first, other)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("kept", FORMATS, ids=NAMES)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 48), (100, 528), (257, 1104)])
@pytest.mark.parametrize("gated", [False, True])
def test_products(kept: Kept, n: int, k: int, gated: bool) -> None:
    n *= 1 + gated
    x, bias = random(70, k), random(n)

    def compute(team: Team) -> Tensor:
        linear = packed(team, kept, random(n, k), bias, gated=gated)
        return torch.cat([linear(x[:rows]) for rows in (1, 2, 3, 5, 6, 7, 70)])

    check(levels_for(kept), compute)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 7, 8, 13, 529])
def test_products_of_any_depth(dtype: torch.dtype, k: int) -> None:
    x = random(13, k)
    check(levels_for(dtype), lambda team: NativeLinear(team, random(37, k), None, dtype)(x))


@pytest.mark.parametrize("kept", FORMATS, ids=NAMES)
def test_experts(kept: Kept) -> None:
    check(levels_for(kept), lambda team: Pair(team, kept, SWIGLU).native(*random_step(40)))


@pytest.mark.parametrize("kv", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize("linear", [torch.float32, torch.float16])
def test_models(linear: torch.dtype, kv: torch.dtype) -> None:
    """Embedding, norms, rotations, windows, gates, attention, head: a prompt in two chunks, and a token."""
    head_dim = 32 if KVFormat.of(kv).is_packed else 16
    sizes = config(qk_norm=True, sliding_windows=(0, 20, 50), hidden_size=56, head_dim=head_dim)
    model = Checkpoint(sizes, linear)
    prompts = Prompts(model.config.vocab_size, [90, 1])

    def compute(team: Team) -> Tensor:
        native = model.native(team, Types(linear=linear, embedding=torch.bfloat16, kv=kv))
        steps = ({0: (0, 61)}, {1: (0, 1), 0: (61, 89)}, {0: (89, 90)})
        return torch.cat([native(prompts.batch(step)) for step in steps])

    check(FUSED_BESIDE if kv in (torch.float32, torch.float16, torch.uint8) else FUSED_FLOATS, compute)


@pytest.mark.parametrize("family", FEW)
def test_layers_with_a_state(family: str, tmp_path: Path) -> None:
    path = STATES[family].make(tmp_path)
    check(SAME_CHAINS, lambda team: run(path, team).logits([(TOKEN_IDS, 0)], ALL))
