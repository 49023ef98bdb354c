"""Which way long prefills go: what is timed at load decides, and what does not run is not offered."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from engine.execution.memory import largest_batches
from engine.kernels import gathered, ops, prefill_choice
from engine.kernels.gathered import CUDNN, FLASH, Way, Ways
from engine.kernels.kv_cache import KVCache, KVShape
from engine.kernels.ops import Kernels, reference_kernels, select
from engine.kernels.prefill_choice import Model, choose
from engine.kernels.reference import PagedAttention
from engine.model.config import LoadOptions, ModelConfig
from engine.model.fields import Fields
from engine.model.parse import parse_config, read_config
from engine.model.safetensors import TensorFiles
from engine.model.transformer import Decoder
from engine.model.weights import load_weights
from tests.engine.checkpoints import make_checkpoint, make_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = KVShape(num_layers=1, num_kv_heads=2, head_dim=16, block_size=16)
MODEL = Model(
    shape=SHAPE,
    num_heads=4,
    dtype=torch.float32,
    device=CPU,
    max_position=500,
    min_queries=32,
    max_queries=70,
)
NO_WAY = Way(name="none", backend=SDPBackend.CUDNN_ATTENTION, after_context=True)
"""There is no such kernel on a CPU."""


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> Way:
    """What stands for cuDNN where there is none."""
    way = replace(CUDNN, backend=SDPBackend.MATH)
    monkeypatch.setattr(prefill_choice, "CUDNN", way)
    monkeypatch.setattr(prefill_choice, "PLAN_ALIGNMENT", 4)
    return way


class Stopwatch:
    """Runs what is timed, and says what it was told to: of each way that runs, in the order of asking."""

    def __init__(self, *times_s: float) -> None:
        self._times_s: Iterator[float] = iter(times_s)

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        return next(self._times_s)


def chosen(*times_s: float, model: Model = MODEL) -> tuple[Ways, list[str]]:
    said: list[str] = []
    return choose(model, PagedAttention, Stopwatch(*times_s), said.append), said


def test_each_case_goes_the_way_that_was_fastest() -> None:
    ways, said = chosen(0.003, 0.002, 0.004, 0.005)
    assert ways == Ways(min_queries=32, whole=FLASH, later=None)
    assert said == [
        "attention of long prefills, ms a layer: "
        "flash 2.00, triton 3.00 (70 tokens seen); triton 4.00, flash 5.00 (280 tokens seen)"
    ]
    assert chosen(0.002, 0.003, 0.005, 0.004)[0] == Ways(min_queries=32, whole=None, later=FLASH)


def test_cudnn_is_for_whole_contexts_alone(padded: Way) -> None:
    ways, said = chosen(0.003, 0.002, 0.001, 0.005, 0.004)
    assert ways == Ways(min_queries=32, whole=replace(padded, step=12), later=FLASH)
    assert "cuDNN 1.00, flash 2.00, triton 3.00 (70 tokens seen)" in said[0]
    assert "cuDNN" not in said[0].partition(";")[2]


def test_what_torch_does_not_have_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_choice, "FLASH", NO_WAY)
    assert chosen(0.003, 0.003) == (Ways(min_queries=32), [])


def test_nor_does_anybody_hear_torchs_reasons() -> None:
    def no_kernel(_: Callable[[], object]) -> float:
        warnings.warn("Flash attention kernel not used because:", stacklevel=2)
        raise RuntimeError("No available kernel. Aborting execution.")

    said: list[str] = []
    assert choose(MODEL, PagedAttention, no_kernel, said.append) == Ways(min_queries=32)
    assert said == []


@pytest.mark.parametrize(
    "changes", [{"max_queries": 31}, {"max_position": 31}], ids=["steps", "the longest context"]
)
def test_what_can_never_be_long_is_not_timed(changes: dict[str, Any]) -> None:
    assert chosen(model=replace(MODEL, **changes)) == (Ways(min_queries=32), [])


def test_a_context_too_short_for_two_long_chunks_is_timed_whole() -> None:
    ways, said = chosen(0.002, 0.001, model=replace(MODEL, max_position=63))
    assert ways == Ways(min_queries=32, whole=FLASH, later=None)
    assert said == ["attention of long prefills, ms a layer: flash 1.00, triton 2.00 (63 tokens seen)"]


def test_a_card_without_room_for_the_trial_keeps_triton() -> None:
    def no_room(_: Callable[[], object]) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    said: list[str] = []
    assert choose(MODEL, PagedAttention, no_room, said.append) == Ways(min_queries=32)
    assert said == []


class Lengths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how many queries and keys torch's attention is given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[tuple[int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in func.overloadpacket.__name__:
            self.seen.add((args[0].shape[2], args[1].shape[2]))
        return func(*args, **kwargs or {})


@given(length=st.integers(32, 70))
def test_all_lengths_that_a_plan_is_made_for_are_made_at_load(length: int) -> None:
    """And they are few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_choice, "FLASH", NO_WAY)
        patch.setattr(prefill_choice, "CUDNN", replace(CUDNN, backend=SDPBackend.FLASH_ATTENTION))
        patch.setattr(prefill_choice, "PLAN_ALIGNMENT", 4)
        patch.setattr(prefill_choice, "MAX_TRIED_TOKENS", 40)
        with Lengths() as at_load:
            ways, _ = chosen(0.002, 0.001, 0.001)
        assert ways.whole is not None
        with Lengths() as serving:
            prefill_choice.trial(MODEL, (length, length), PagedAttention, ways.whole)()
    assert len(serving.seen) == 1
    assert serving.seen <= at_load.seen
    assert len(at_load.seen) <= prefill_choice.NUM_PLANS


@pytest.mark.usefixtures("padded")
def test_a_way_without_its_plans_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pad = gathered.Way._padded

    def refusing(way: Way, queries: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if queries.shape[0] == 48:
            raise RuntimeError("no plan for 48")
        return pad(way, queries, *rest)

    monkeypatch.setattr(gathered.Way, "_padded", refusing)
    assert chosen(0.003, 0.002, 0.001, 0.004, 0.005)[0].whole == FLASH


@given(st.integers(1, 1 << 17))
def test_plans_are_few_and_waste_little(longest: int) -> None:
    step = prefill_choice._plan_step(longest)
    assert step % gathered.PLAN_ALIGNMENT == 0
    assert -(-longest // step) <= prefill_choice.NUM_PLANS
    assert step < longest / prefill_choice.NUM_PLANS + gathered.PLAN_ALIGNMENT


# In the table


LLAMA = parse_config(Fields("config.json", make_config("llama")))
MISTRAL = parse_config(Fields("config.json", make_config("mistral")))


def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    *times_s: float,
    config: ModelConfig = LLAMA,
    max_batch_tokens: int = 64,
    name: str = "triton",
) -> tuple[Kernels, Kernels, list[str]]:
    """The table that is chosen, the one that it was made of, and what was said."""
    plain = replace(reference_kernels(CPU, torch.float32), name=name)
    said: list[str] = []
    monkeypatch.setattr(ops, "triton_kernels", lambda *_: plain)
    monkeypatch.setattr(ops, "LONG_CHUNK", 32)
    monkeypatch.setattr(prefill_choice, "seconds_on_card", Stopwatch(*times_s))
    options = LoadOptions(max_batch_tokens=max_batch_tokens)
    kernels = select(config, CUDA, torch.float32, options, said.append)
    return kernels, plain, said


def test_the_table_has_what_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, plain, said = on_a_gpu(monkeypatch, 0.002, 0.001, 0.002, 0.001)
    assert len(said) == 1
    assert replace(kernels, attention=plain.attention) == plain
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=16, block_size=16)
    long, short = (
        prefill_choice._batch(replace(MODEL, shape=shape), num_tokens, 40) for num_tokens in (32, 31)
    )
    assert isinstance(kernels.attention(long, shape), gathered.GatheredAttention)
    assert isinstance(kernels.attention(short, shape), PagedAttention)


def test_the_table_stays_as_it_is_where_triton_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, plain, said = on_a_gpu(monkeypatch, 0.001, 0.002, 0.001, 0.002)
    assert kernels is plain
    assert len(said) == 1


@pytest.mark.parametrize(
    "changes",
    [{"config": MISTRAL}, {"max_batch_tokens": 31}, {"name": "torch"}],
    ids=["windows", "short steps", "no Triton"],
)
def test_what_has_no_use_for_it_is_not_asked(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_choice, "choose", None)
    kernels, plain, said = on_a_gpu(monkeypatch, **changes)
    assert kernels is plain
    assert said == []


# Memory


class Gathered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the sizes of what is gathered, in elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ == "index_select" and args[0].shape[1:] == (16 * 24,):
            self.sizes.append(result.numel())
        return result


def test_the_steps_that_are_measured_gather_the_longest_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(make_checkpoint("qwen3", tmp_path))
    plain = reference_kernels(CPU, torch.float32)
    ways = Ways(min_queries=32, whole=FLASH, later=FLASH)
    kernels = replace(
        plain,
        attention=lambda batch, shape: gathered.attention(batch, shape, others=plain.attention, ways=ways),
    )
    weights = load_weights(config, TensorFiles(tmp_path), kernels, lambda *_: None)
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=24, block_size=16)
    decoder = Decoder(config, weights, kernels, KVCache(shape, 1, torch.float32, CPU), 100)
    monkeypatch.setattr(
        gathered,
        "causal_lower_right",  # cannot be made while a mode is at work
        lambda rows, columns: torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows),
    )
    with Gathered() as found:
        for batch in largest_batches(LoadOptions(max_batch_tokens=50, max_num_seqs=7), 100, 16):
            decoder(batch)
    keys_or_values = 2 * 7 * 16 * 24
    assert found.sizes == [keys_or_values] * 6  # of 3 layers
