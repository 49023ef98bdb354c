"""Which backends attend long prefills: what is timed at load decides, and what fails is left out."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels import gathered, prefill_choice
from engine.kernels.gathered import CUDNN, FLASH, ContiguousBackend, LongPrefillBackends
from engine.kernels.kv_cache import KVShape
from engine.kernels.prefill_choice import Model, choose
from engine.kernels.reference import PagedAttention

CPU = torch.device("cpu")
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
NO_BACKEND = ContiguousBackend(name="none", backend=SDPBackend.CUDNN_ATTENTION, takes_later_chunks=True)
"""There is no such kernel on a CPU."""


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> ContiguousBackend:
    """What stands for cuDNN where there is none."""
    backend = replace(CUDNN, backend=SDPBackend.MATH)
    monkeypatch.setattr(prefill_choice, "CUDNN", backend)
    monkeypatch.setattr(prefill_choice, "PLAN_ALIGNMENT", 4)
    return backend


class Stopwatch:
    """Runs what is timed, and says what it was told to: of each backend that runs, in the order of asking."""

    def __init__(self, *times_s: float) -> None:
        self._times_s: Iterator[float] = iter(times_s)

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        return next(self._times_s)


def chosen(*times_s: float, model: Model = MODEL) -> tuple[LongPrefillBackends, list[str]]:
    said: list[str] = []
    return choose(model, PagedAttention, Stopwatch(*times_s), said.append), said


def test_each_case_goes_the_way_that_was_fastest() -> None:
    backends, said = chosen(0.003, 0.002, 0.004, 0.005)
    assert backends == LongPrefillBackends(min_queries=32, first_chunk=FLASH, later_chunk=None)
    assert said == [
        "attention of long prefills, ms a layer: "
        "flash 2.00, triton 3.00 (70 tokens seen); triton 4.00, flash 5.00 (280 tokens seen)"
    ]
    assert chosen(0.002, 0.003, 0.005, 0.004)[0] == LongPrefillBackends(
        min_queries=32, first_chunk=None, later_chunk=FLASH
    )


def test_cudnn_is_for_whole_contexts_alone(padded: ContiguousBackend) -> None:
    backends, said = chosen(0.003, 0.002, 0.001, 0.005, 0.004)
    assert backends == LongPrefillBackends(
        min_queries=32, first_chunk=replace(padded, length_multiple=12), later_chunk=FLASH
    )
    assert "cuDNN 1.00, flash 2.00, triton 3.00 (70 tokens seen)" in said[0]
    assert "cuDNN" not in said[0].partition(";")[2]


def test_what_torch_does_not_have_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_choice, "FLASH", NO_BACKEND)
    assert chosen(0.003, 0.003) == (LongPrefillBackends(min_queries=32), [])


def test_nor_does_anybody_hear_torchs_reasons() -> None:
    def no_kernel(_: Callable[[], object]) -> float:
        warnings.warn("Flash attention kernel not used because:", stacklevel=2)
        raise RuntimeError("No available kernel. Aborting execution.")

    said: list[str] = []
    assert choose(MODEL, PagedAttention, no_kernel, said.append) == LongPrefillBackends(min_queries=32)
    assert said == []


@pytest.mark.parametrize(
    "changes", [{"max_queries": 31}, {"max_position": 31}], ids=["steps", "the longest context"]
)
def test_what_can_never_be_long_is_not_timed(changes: dict[str, Any]) -> None:
    assert chosen(model=replace(MODEL, **changes)) == (LongPrefillBackends(min_queries=32), [])


def test_a_context_too_short_for_two_long_chunks_is_timed_whole() -> None:
    backends, said = chosen(0.002, 0.001, model=replace(MODEL, max_position=63))
    assert backends == LongPrefillBackends(min_queries=32, first_chunk=FLASH, later_chunk=None)
    assert said == ["attention of long prefills, ms a layer: flash 1.00, triton 2.00 (63 tokens seen)"]


def test_a_card_without_room_for_the_trial_keeps_triton() -> None:
    def no_room(_: Callable[[], object]) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    said: list[str] = []
    assert choose(MODEL, PagedAttention, no_room, said.append) == LongPrefillBackends(min_queries=32)
    assert said == []


class FailsWith:
    """A timer that runs the trials, and then fails the one of this number."""

    def __init__(self, number: int, error: Exception) -> None:
        self._number, self._error, self._calls = number, error, 0

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self._calls += 1
        if self._calls == self._number:
            raise self._error
        return 1.0 / self._calls


FAILURES = [
    (AssertionError("expected 16"), "AssertionError: expected 16"),
    (
        ValueError("out of resource: shared memory\nRequired: 230400"),
        "ValueError: out of resource: shared memory",
    ),
    (RuntimeError("cuDNN Frontend error"), "RuntimeError: cuDNN Frontend error"),
    (NotImplementedError(), "NotImplementedError"),
]


@pytest.mark.parametrize(("error", "reason"), FAILURES, ids=[reason for _, reason in FAILURES])
def test_a_backend_that_fails_is_left_out_and_named(error: Exception, reason: str) -> None:
    said: list[str] = []
    backends = choose(MODEL, PagedAttention, FailsWith(2, error), said.append)
    assert backends == LongPrefillBackends(min_queries=32, later_chunk=FLASH)
    assert said[0] == f"attention of long prefills is not by flash, which fails at 70 of 70 tokens ({reason})"
    assert "(280 tokens seen)" in said[1]
    assert "(70 tokens seen)" not in said[1]
    assert len(said) == 2


def test_paged_attention_that_fails_at_long_chunks_leaves_them_to_others() -> None:
    said: list[str] = []
    backends = choose(MODEL, PagedAttention, FailsWith(1, AssertionError("no")), said.append)
    assert backends == LongPrefillBackends(min_queries=32, first_chunk=FLASH, later_chunk=FLASH)
    assert "not by triton, which fails at 70 of 70 tokens (AssertionError: no)" in said[0]


def test_a_lost_device_ends_the_load() -> None:
    said: list[str] = []
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        choose(
            MODEL, PagedAttention, FailsWith(2, torch.AcceleratorError("illegal memory access")), said.append
        )
    assert said == []


class Created(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the tensors of trials without keeping them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor):
            self.storages.append(StorageWeakRef(result.untyped_storage()))  # type: ignore[no-untyped-call]
        return result

    def num_left(self) -> int:
        return sum(not storage.expired() for storage in self.storages)  # type: ignore[no-untyped-call]


class KeepsItself(RuntimeError):
    """An error in a circle, as one that a frame of its own traceback holds."""

    def __init__(self) -> None:
        super().__init__("no plan")
        self.itself = self


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Circles stay until somebody asks for a collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_nothing_of_the_trials_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the cache of the allocator is emptied, nobody has any of their tensors any more."""
    left: list[int] = []
    monkeypatch.setattr(gathered, "causal_lower_right", lower_right)
    timer = FailsInside(KeepsItself)
    with Created() as created:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(created.num_left()))
        choose(MODEL, PagedAttention, timer, lambda _: None)
    assert len(created.storages) > 10
    assert left == [0]


class FailsInside:
    """Fails every second trial, with its tensors in the frame that the error comes from."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error, self._calls = error, 0

    def __call__(self, run: Callable[[], object]) -> float:
        attended = run()
        self._calls += 1
        if self._calls % 2 == 0:
            raise self._error()
        return 1.0 if attended is not None else 0.0


def lower_right(num_queries: int, context: int) -> Tensor:
    """What torch makes of its own mask, which cannot be made while a mode is at work."""
    return torch.ones(num_queries, context, dtype=torch.bool).tril(context - num_queries)


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
        patch.setattr(prefill_choice, "FLASH", NO_BACKEND)
        patch.setattr(prefill_choice, "CUDNN", replace(CUDNN, backend=SDPBackend.FLASH_ATTENTION))
        patch.setattr(prefill_choice, "PLAN_ALIGNMENT", 4)
        patch.setattr(prefill_choice, "MAX_TRIED_TOKENS", 40)
        with Lengths() as at_load:
            backends, _ = chosen(0.002, 0.001, 0.001)
        assert backends.first_chunk is not None
        with Lengths() as serving:
            prefill_choice.trial(MODEL, (length, length), PagedAttention, backends.first_chunk)()
    assert len(serving.seen) == 1
    assert serving.seen <= at_load.seen
    assert len(at_load.seen) <= prefill_choice.NUM_PLANS


@pytest.mark.usefixtures("padded")
def test_a_way_without_its_plans_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pad = gathered.ContiguousBackend._padded

    def refusing(backend: ContiguousBackend, queries: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if queries.shape[0] == 48:
            raise RuntimeError("no plan for 48")
        return pad(backend, queries, *rest)

    monkeypatch.setattr(gathered.ContiguousBackend, "_padded", refusing)
    assert chosen(0.003, 0.002, 0.001, 0.004, 0.005)[0].first_chunk == FLASH


@given(st.integers(1, 1 << 17))
def test_plans_are_few_and_waste_little(longest: int) -> None:
    step = prefill_choice._plan_multiple(longest)
    assert step % gathered.PLAN_ALIGNMENT == 0
    assert -(-longest // step) <= prefill_choice.NUM_PLANS
    assert step < longest / prefill_choice.NUM_PLANS + gathered.PLAN_ALIGNMENT
