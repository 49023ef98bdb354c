"""The share of a GPU's memory that becomes KV cache is arithmetic on what a card reports; no card is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import MemoryHeld, NotEnoughMemory
from penstock.engine.execution import loader, memory
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.measuring import largest_batches, measure_steps
from penstock.engine.execution.memory import (
    Budget,
    GpuMemory,
    Measured,
    MemoryPlan,
    card_budget,
    plan_memory,
    weight_bytes,
)
from penstock.engine.fields import Fields
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVCache, KVLayout, KVShape
from penstock.engine.kernels.ops import Kernels, reference_kernels
from penstock.engine.kernels.select import select
from penstock.engine.model.parse import parse_config, read_config
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.weights import load_weights
from penstock.engine.program.decoders import make_decoder
from penstock.engine.sizes import GIB
from tests.engine.checkpoints import make_checkpoint, make_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LLAMA_8B = parse_config(
    Fields(
        "config.json",
        make_config(
            "llama",
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131_072,
        ),
    )
)
BLOCK = 32 * 2 * 8 * 16 * 128 * 2
KERNELS = reference_kernels(CUDA, torch.bfloat16)
CARD = GpuMemory(total=80 * GIB, free=79 * GIB)
MEASURED = Measured(resident=16 * GIB, workspace=2 * GIB)


def plan(
    card: GpuMemory = CARD,
    measured: Measured | None = MEASURED,
    utilization: float = 0.9,
    config: ModelConfig = LLAMA_8B,
    **options: Any,
) -> MemoryPlan:
    wanted = LoadOptions(**options)
    return plan_memory(config, KERNELS, wanted, card_budget(card, utilization), measured).check()


def test_the_share_of_the_whole_card_less_what_is_in_use_is_available() -> None:
    budget = card_budget(GpuMemory(total=1000, free=700), 0.9)
    assert (budget.available, budget.share, budget.cap) == (
        600,
        1.0,
        None,
    )  # 900 of 1000, of which 300 are taken
    assert card_budget(GpuMemory(total=1000, free=50), 0.9).available == 0


def test_kv_gets_all_that_is_left() -> None:
    made = plan()
    left = 71 * GIB - 16 * GIB - 2 * GIB - made.graphs
    assert made.block == BLOCK
    assert made.kv <= left < made.kv + BLOCK


def test_without_graphs_their_memory_is_kv() -> None:
    with_graphs, without = (plan(cuda_graphs=wanted, max_batch_tokens=8192) for wanted in (True, False))
    assert without.graphs == 0 < with_graphs.graphs < GIB
    assert without.num_blocks - with_graphs.num_blocks == pytest.approx(with_graphs.graphs / BLOCK, abs=1)


def test_what_is_there_beside_the_weights_are_tables() -> None:
    weights = weight_bytes(LLAMA_8B, KERNELS)
    made = plan(measured=Measured(resident=weights + 300, workspace=2 * GIB))
    assert (made.weights, made.tables) == (weights, 300)
    assert plan(measured=Measured(resident=weights - 300, workspace=2 * GIB)).tables == 0


def test_more_sequences_make_more_graphs() -> None:
    assert plan(max_num_seqs=64).graphs < plan(max_num_seqs=256).graphs < plan(max_num_seqs=512).graphs


def test_estimates_serve_until_there_is_something_to_measure() -> None:
    made = plan(measured=None)
    assert made.weights == weight_bytes(LLAMA_8B, KERNELS) == pytest.approx(16.06e9, rel=0.01)
    assert 0 < made.workspace < 2 * GIB


def test_the_operators_number_of_blocks_is_taken_if_it_fits() -> None:
    assert plan(num_blocks=1000).num_blocks == 1000
    assert plan(kv_bytes=10 * BLOCK, max_model_len=100).num_blocks == 10
    with pytest.raises(NotEnoughMemory):
        plan(num_blocks=1 << 20)


@pytest.mark.parametrize(
    ("card", "utilization", "kind"),
    [
        (GpuMemory(16 * GIB, 15 * GIB), 0.9, NotEnoughMemory),
        (GpuMemory(80 * GIB, 10 * GIB), 0.9, MemoryHeld),
        (GpuMemory(80 * GIB, 10 * GIB, allocated=70 * GIB), 0.9, NotEnoughMemory),
        (GpuMemory(80 * GIB, 79 * GIB), 0.1, NotEnoughMemory),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_loaded(
    card: GpuMemory, utilization: float, kind: type[NotEnoughMemory]
) -> None:
    with pytest.raises(NotEnoughMemory, match=r"not enough memory: weights 14\.9\d GiB, ") as caught:
        plan(card, None, utilization)
    text = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in text
    assert f"(of the GPU's {card.total / GIB:.2f} GiB, {card.used / GIB:.2f} GiB in use)" in text


@given(st.integers(1, 1 << 38), st.floats(0, 1), st.floats(0.01, 1), st.integers(1, 1 << 36))
def test_a_plan_never_goes_over_the_share(
    total: int, free_share: float, utilization: float, weights: int
) -> None:
    card = GpuMemory(total=total, free=int(total * free_share))
    try:
        made = plan(card, Measured(resident=weights, workspace=weights // 8), utilization)
    except NotEnoughMemory:
        return
    taken = made.weights + made.workspace + made.tables + made.graphs + made.kv
    assert card.used + taken <= total * utilization


# The largest steps


@given(st.integers(1, 700), st.integers(1, 300), st.integers(1, 900))
def test_the_largest_steps_have_all_tokens_all_rows_and_the_longest_context(
    max_batch_tokens: int, max_num_seqs: int, max_model_len: int
) -> None:
    options = LoadOptions(max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs)
    many, long = largest_batches(options, max_model_len, 1)
    num_sequences = min(max_num_seqs, max_batch_tokens)
    assert many.context_lens.numel() == num_sequences
    assert many.sample_rows.tolist() == [*range(min(options.max_rows, many.token_ids.numel()))]
    assert long.sample_rows.numel() == 1
    assert many.token_ids.numel() == min(max_batch_tokens, num_sequences * max_model_len)
    assert long.context_lens.tolist() == [max_model_len]
    assert long.block_tables.shape == (1, -(-max_model_len // 16))
    for batch in (many, long):
        check(batch)


def check(batch: Batch) -> None:
    assert batch.max_query_len == int(batch.query_starts.diff().max())
    assert all(tensor.dtype == torch.int32 for tensor in batch.tensors().values())
    starts = batch.query_starts.tolist()
    assert starts[-1] == batch.token_ids.numel() == batch.positions.numel()
    for i, context in enumerate(batch.context_lens.tolist()):
        positions = batch.positions[starts[i] : starts[i + 1]].tolist()
        assert positions == list(range(context - len(positions), context))


def test_a_decoder_runs_them_in_the_one_block_that_belongs_to_nobody(tmp_path: Path) -> None:
    config = read_config(make_checkpoint("qwen3", tmp_path))
    kernels = reference_kernels(CPU, torch.float32)
    weights = load_weights(config, TensorFiles(tmp_path), kernels, lambda *_: None)
    shape = KVShape(num_kv_heads=2, head_dim=24, block_size=16)
    decoder = make_decoder(
        config, weights, kernels, KVCache(KVLayout.even(shape, 3), 1, torch.float32, CPU), 100
    )
    options = LoadOptions(max_batch_tokens=50, max_num_seqs=7)
    rows = [decoder(batch).shape[0] for batch in largest_batches(options, 100, 1)]
    assert rows == [50, 1], "of logits, with drafts"


class FakeCuda:
    """Free memory goes down as weights, then steps take it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free = free
        self.weights = 0
        self.others = 3 << 20
        """Allocated before there are weights."""
        self.calls: list[str] = []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.others + self.weights)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.calls.append("empty"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: self.calls.append("wait"))

    def take(self, num_bytes: int) -> None:
        self.calls.append("step")
        self.free -= num_bytes


def test_what_the_card_lost_beside_the_weights_is_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch, 79 * GIB)
    before = memory.read_card(CUDA)
    fake.free, fake.weights = 64 * GIB, 15 * GIB
    measured = measure_steps(CUDA, before, lambda: fake.take(3 * GIB))
    assert measured == Measured(resident=15 * GIB, workspace=3 * GIB)
    assert fake.calls == ["empty", "step", "wait", "empty"], (
        "the step's own memory is given back for the KV cache"
    )


def test_somebody_who_leaves_the_card_meanwhile_takes_nothing_from_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCuda(monkeypatch, 40 * GIB)
    before = memory.read_card(CUDA)
    fake.weights = GIB
    assert measure_steps(CUDA, before, lambda: fake.take(-GIB)).workspace == 0


def test_a_step_that_does_not_fit_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch, GIB)
    before = memory.read_card(CUDA)
    fake.weights = 15 * GIB

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    with pytest.raises(
        NotEnoughMemory, match=r"weights and tables 15\.00 GiB.*lower --max-batch-tokens"
    ) as caught:
        measure_steps(CUDA, before, out_of_memory)
    assert "\n" not in str(caught.value)


def test_loading_measures_on_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the device: the cache is as large as what was measured leaves."""
    card = GpuMemory(total=64 << 20, free=60 << 20)
    measured: list[GpuMemory] = []

    def measure(device: torch.device, before: GpuMemory, steps: Any) -> Measured:  # noqa: ARG001
        steps()
        measured.append(before)
        return Measured(resident=5 << 20, workspace=8 << 20)

    order: list[str] = []

    def kernels(*args: Any) -> Kernels:
        order.append("kernels")
        return select(*args)

    def budget(*_: object) -> Budget:
        order.append("card")
        return card_budget(card, 0.5)

    monkeypatch.setattr(loader, "select", kernels)
    monkeypatch.setattr(loader, "budget", budget)
    monkeypatch.setattr(loader, "measure_steps", measure)
    options = LoadOptions(device="cpu", block_size=8, cuda_graphs=False, max_num_seqs=200)
    model = load_model(make_checkpoint("llama", tmp_path), options, lambda _: None, lambda *_: None)
    assert measured == [card]
    assert order == ["kernels", "card"], "their workspace is in use before, and counted there alone"
    left = (32 << 20) - (4 << 20) - (13 << 20)
    assert model.memory.tables == (5 << 20) - model.memory.weights
    assert model.memory.kv <= left < model.memory.kv + model.memory.block
    assert model.kv.data.nbytes == model.memory.kv
