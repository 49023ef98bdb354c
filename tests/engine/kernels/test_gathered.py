"""Long prefills by torch's attention in the table of kernels: which backends serve, and the memory that it takes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from engine.execution.memory import largest_batches
from engine.fields import Fields
from engine.kernels import gathered
from engine.kernels import select as selecting
from engine.kernels.batch import Batch, blank_batch
from engine.kernels.gathered import CUDNN, FLASH, ContiguousBackend
from engine.kernels.kv_cache import KVCache, KVShape
from engine.kernels.ops import Kernels, reference_kernels
from engine.kernels.reference import PagedAttention
from engine.model.config import LoadOptions, ModelConfig
from engine.model.parse import parse_config, read_config
from engine.model.safetensors import TensorFiles
from engine.model.transformer import Decoder
from engine.model.weights import load_weights
from tests.engine.checkpoints import make_checkpoint, make_config

pytestmark = pytest.mark.combinations("combinations of what the native kernels take")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = KVShape(num_layers=1, num_kv_heads=2, head_dim=16, block_size=16)
LLAMA = parse_config(Fields("config.json", make_config("llama")))
MISTRAL = parse_config(Fields("config.json", make_config("mistral")))
AMPERE, HOPPER, BLACKWELL, RTX_50 = 8, 9, 10, 12
NO_BACKEND = replace(FLASH, backend=SDPBackend.CUDNN_ATTENTION)
"""There is no such kernel on a CPU."""


def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    backends: list[ContiguousBackend] | None = None,
    *,
    config: ModelConfig = LLAMA,
    max_batch_tokens: int = 64,
    is_static: bool = True,
) -> tuple[Kernels, Kernels, list[str]]:
    """The table that is chosen, the one that it was made of, and what was said.

    Args:
        backends: those that there are for the card.
    """
    plain = replace(reference_kernels(CPU, torch.float32), name="triton", is_static=is_static)
    said: list[str] = []
    monkeypatch.setattr(selecting, "triton_kernels", lambda *_: plain)
    monkeypatch.setattr(selecting, "only_what_runs", lambda kernels, *_: kernels)
    monkeypatch.setattr(selecting, "LONG_CHUNK", 32)
    monkeypatch.setattr(gathered, "backends_for", lambda *_: [FLASH] if backends is None else backends)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (AMPERE, 0))
    options = LoadOptions(max_batch_tokens=max_batch_tokens)
    kernels = selecting.select(config, CUDA, torch.float32, options, said.append)
    return kernels, plain, said


def chosen(kernels: Kernels) -> list[ContiguousBackend]:
    """The backends of a table."""
    return list(kernels.attention.keywords["backends"]) if isinstance(kernels.attention, partial) else []


def batch_of(num_tokens: int, context: int) -> Batch:
    tables = torch.arange(1, 1 + -(-context // 16), dtype=torch.int32)[None]
    return blank_batch([num_tokens], [context], tables)


def test_long_chunks_go_to_torch_and_short_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, plain, said = on_a_gpu(monkeypatch)
    assert replace(kernels, attention=plain.attention) == plain
    assert said == []
    assert isinstance(kernels.attention(batch_of(32, 40), SHAPE), gathered.GatheredAttention)
    assert isinstance(kernels.attention(batch_of(31, 40), SHAPE), PagedAttention)


@pytest.mark.parametrize("major", [AMPERE, RTX_50])
def test_flash_attention_serves_cards_that_multiply_from_registers(major: int) -> None:
    assert gathered.backends_for(major, 8192) == [FLASH]


@pytest.mark.parametrize("major", [HOPPER, BLACKWELL])
def test_cudnn_goes_first_where_warp_groups_multiply(major: int) -> None:
    first, second = gathered.backends_for(major, 8192)
    assert (first, second) == (replace(CUDNN, length_multiple=1024), FLASH)
    assert first.takes(2000, 2000)
    assert not first.takes(2000, 2001), "its causal mask is aligned to the first key"
    assert second.takes(2000, 2001)


@pytest.mark.parametrize(
    "changes",
    [
        {"config": MISTRAL},
        {"max_batch_tokens": 31},
        {"config": replace(LLAMA, max_position=31)},
        {"is_static": False},
    ],
    ids=["windows", "short steps", "short contexts", "plain torch"],
)
def test_what_has_no_use_for_it_tries_nothing(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered.ContiguousBackend, "warm_up", None)
    kernels, plain, said = on_a_gpu(monkeypatch, **changes)
    assert kernels == plain
    assert said == []


def test_what_torch_does_not_have_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, plain, said = on_a_gpu(monkeypatch, [NO_BACKEND])
    assert kernels == plain
    assert said == []


def failing(monkeypatch: pytest.MonkeyPatch, name: str, error: Callable[[], Exception]) -> None:
    """The backend of this name fails, with its tensors in the frame that the error comes from."""
    attend = ContiguousBackend.__call__

    def call(self: ContiguousBackend, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attended = attend(self, queries, keys, values)
        if self.name == name:
            warnings.warn("attention kernel not used because:", stacklevel=2)
            raise error()
        return attended

    monkeypatch.setattr(ContiguousBackend, "__call__", call)


MATH = replace(FLASH, name="math", backend=SDPBackend.MATH)
SILENT = [
    RuntimeError("No available kernel. Aborting execution."),
    torch.OutOfMemoryError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", SILENT, ids=["not offered", "no room"])
def test_nobody_hears_of_what_is_not_offered_or_finds_no_room(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of torch's reasons, which are warnings."""
    failing(monkeypatch, "flash", lambda: error)
    kernels, _, said = on_a_gpu(monkeypatch, [FLASH, MATH])
    assert chosen(kernels) == [MATH]
    assert said == []


FAILURES = [
    (AssertionError("expected 16"), "expected 16"),
    (ValueError("out of resource: shared memory\nRequired: 230400"), "out of resource: shared memory"),
    (RuntimeError("cuDNN Frontend error"), "cuDNN Frontend error"),
    (NotImplementedError(), "NotImplementedError"),
]


@pytest.mark.parametrize(("error", "reason"), FAILURES, ids=[reason for _, reason in FAILURES])
def test_a_backend_that_fails_is_left_out_and_named(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "flash", lambda: error)
    kernels, _, said = on_a_gpu(monkeypatch, [FLASH, MATH])
    assert chosen(kernels) == [MATH]
    assert said == [f"long prefills are not attended by flash, which fails here ({reason})"]


def test_a_lost_device_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "flash", lambda: torch.AcceleratorError("illegal memory access"))
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        on_a_gpu(monkeypatch)


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
    failing(monkeypatch, "math", KeepsItself)
    with Created() as created:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(created.num_left()))
        on_a_gpu(monkeypatch, [FLASH, MATH])
    assert len(created.storages) > 10
    assert left == [0]


def lower_right(num_queries: int, context: int) -> Tensor:
    """Returns the mask of torch's `causal_lower_right` as a tensor; its own cannot be made while a mode is at work."""
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


def on_hopper(patch: pytest.MonkeyPatch, longest: int) -> ContiguousBackend:
    """Makes a backend that stands in for cuDNN, for chunks of 32 tokens up to the longest."""
    patch.setattr(gathered, "PLAN_ALIGNMENT", 4)
    patch.setattr(gathered, "CUDNN", replace(CUDNN, backend=SDPBackend.FLASH_ATTENTION))
    return gathered.backends_for(HOPPER, longest)[0]


@given(length=st.integers(32, 70))
def test_all_lengths_that_a_plan_is_made_for_are_made_at_load(length: int) -> None:
    """And they are few."""
    with pytest.MonkeyPatch.context() as patch:
        backend, plain = on_hopper(patch, 70), reference_kernels(CPU, torch.float32)
        with Lengths() as at_load:
            backend.warm_up(32, 70, LLAMA, plain)
        with Lengths() as serving:
            backend(torch.ones(length, 4, 16), *torch.ones(2, 2, length, 16))
    assert len(serving.seen) == 1
    assert serving.seen <= at_load.seen
    assert len(at_load.seen) <= gathered.NUM_PLANS


def test_a_backend_without_all_its_plans_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pad = gathered.ContiguousBackend._padded

    def refusing(backend: ContiguousBackend, queries: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if queries.shape[0] == 48:
            raise RuntimeError("no plan for 48")
        return pad(backend, queries, *rest)

    monkeypatch.setattr(gathered.ContiguousBackend, "_padded", refusing)
    padded = on_hopper(monkeypatch, 64)
    assert chosen(on_a_gpu(monkeypatch, [padded, FLASH])[0]) == [FLASH]


@given(st.integers(1, 1 << 17))
def test_plans_are_few_and_waste_little(longest: int) -> None:
    step = gathered.backends_for(HOPPER, longest)[0].length_multiple
    assert step % gathered.PLAN_ALIGNMENT == 0
    assert -(-longest // step) <= gathered.NUM_PLANS
    assert step < longest / gathered.NUM_PLANS + gathered.PLAN_ALIGNMENT


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
    kernels = replace(
        plain,
        attention=partial(
            gathered.prepare_attention, prepare_paged=plain.attention, backends=[FLASH], min_queries=32
        ),
    )
    weights = load_weights(config, TensorFiles(tmp_path), kernels, lambda *_: None)
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=24, block_size=16)
    decoder = Decoder(config, weights, kernels, KVCache(shape, 1, torch.float32, CPU), 100)
    monkeypatch.setattr(gathered, "causal_lower_right", lower_right)
    with Gathered() as found:
        for batch in largest_batches(LoadOptions(max_batch_tokens=50, max_num_seqs=7), 100, 16):
            decoder(batch)
    keys_or_values = 2 * 7 * 16 * 24
    assert found.sizes == [keys_or_values] * 6  # of 3 layers
