"""Experts on a GPU: every format at sizes of real models, the bits of rows, graphs, and families with experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.engine.kernels import experts as plain
from penstock.engine.kernels.triton.routing import route
from penstock.engine.kernels.triton.tiles import ROW_CLASSES, expert_rows
from penstock.engine.spec import Activation, Experts, Router
from tests.engine.families import SPARSE
from tests.engine.kernels.triton.expert_layers import FORMATS, Pair, sizes
from tests.gpu.cuda import DEVICE, DTYPES, needs_cuda
from tests.gpu.engines import RunningEngine
from tests.gpu.test_engine import Oracle, check, mixed

pytestmark = needs_cuda

LAYER = sizes(512, 384, num_experts=16, top_k=4)
GPT_OSS = sizes(2880, 2880, num_experts=8, top_k=4, activation=Activation(limit=7.0, alpha=1.702, shift=1.0))
QWEN3 = sizes(2048, 768, num_experts=32, top_k=8)


@pytest.fixture(autouse=True)
def _torch_adds_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default torch may add parts of the inputs in 16 bits."""
    for name in ("bf16", "fp16"):
        option = f"allow_{name}_reduced_precision_reduction"
        monkeypatch.setattr(torch.backends.cuda.matmul, option, False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_in_every_class_of_rows(name: str, dtype: torch.dtype) -> None:
    pair = Pair(FORMATS[name], LAYER, DEVICE, dtype, with_bias=True)
    all_rows = (1, 2, 33, 100, 600)
    for rows in all_rows:
        pair.check(*pair.step(rows))
    assert {expert_rows(4 * rows, 16) for rows in all_rows} == set(ROW_CLASSES)


@pytest.mark.parametrize(
    ("name", "spec"),
    [("mxfp4", GPT_OSS), ("16 bits", QWEN3), ("int4", QWEN3), ("fp8, blocks", QWEN3)],
    ids=["gpt-oss, mxfp4", "Qwen 3, 16 bits", "Qwen 3, int4", "Qwen 3, fp8"],
)
def test_sizes_of_real_models(name: str, spec: Experts) -> None:
    pair = Pair(FORMATS[name], spec, DEVICE, torch.bfloat16, with_bias=True)
    for rows in (1, 7, 300):
        pair.check(*pair.step(rows))


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    pair = Pair(FORMATS[name], LAYER, DEVICE, torch.bfloat16)
    x, ids, weights = pair.step(600)
    whole = pair.triton(x, ids, weights)
    for rows in ([0], list(range(20, 31)), list(range(300, 200, -1))):
        assert torch.equal(pair.triton(x[rows], ids[rows], weights[rows]), whole[rows])
    assert torch.equal(pair.triton(x, ids, weights), whole), "and whenever it is computed"


def test_a_captured_step_follows_the_choices_of_its_rows() -> None:
    """Captured with rows of one expert, replayed with others: no launch depends on what only the device knows."""
    pair = Pair(FORMATS["int4"], LAYER, DEVICE, torch.bfloat16)
    x, chosen, weights = pair.step(50)
    ids = torch.zeros_like(chosen)
    pair.triton(x, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = pair.triton(x, ids, weights)
    ids.copy_(chosen)
    graph.replay()
    assert torch.equal(found, pair.triton(x, chosen, weights))


@pytest.mark.parametrize("rows", [1, 3000])
@pytest.mark.parametrize(
    "router",
    [
        Router(num_experts=128, top_k=8, renormalizes=True),
        Router(num_experts=32, top_k=4, scoring="softmax_of_chosen"),
        Router(num_experts=256, top_k=8, scoring="sigmoid", num_groups=8, top_groups=4, group_best=2),
        Router(num_experts=62, top_k=6),
    ],
)
def test_routing(router: Router, rows: int) -> None:
    """Of logits that differ by more than roundings do."""
    generator = torch.Generator(DEVICE).manual_seed(rows)
    logits = torch.rand(rows, router.num_experts, generator=generator, device=DEVICE).argsort(1) / 32 - 2
    ids, weights = route(logits.bfloat16(), router)
    expected_ids, expected = plain.route(logits.bfloat16(), router)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("family", ["Qwen 3 MoE", "Qwen 2 MoE", "GLM-4.5", "Gemma 4 MoE"])
def test_families_with_experts_say_what_transformers_says(family: str, tmp_path: Path) -> None:
    """Out of graphs, in which shared experts run beside the others; some of these have a gate, or norms."""
    folder = SPARSE[family].make(tmp_path)
    oracle, requests = Oracle(folder), mixed(20)
    with RunningEngine(folder) as engine:
        assert engine.runner.model.buffers is not None, "steps are captured"
        engine.run(*requests)
        check(engine, oracle, *requests)
