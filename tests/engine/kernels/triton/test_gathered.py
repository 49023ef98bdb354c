"""Steps with long chunks by torch's attention and all other sequences by Triton's, on shapes that fit nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from engine.kernels import gathered
from engine.kernels.batch import Batch
from engine.kernels.gathered import CUDNN, FLASH, ContiguousBackend, PrepareAttention
from engine.kernels.kv_cache import QUANTIZED
from engine.kernels.ops import Kernels, reference_kernels
from engine.kernels.reference import PagedAttention
from engine.kernels.triton import attention
from engine.kernels.triton.attention import TritonAttention
from tests.engine.kernels.random_inputs import Lengths, int32
from tests.engine.kernels.random_model import Checkpoint, Prompts
from tests.engine.kernels.test_gathered import lower_right
from tests.engine.kernels.triton.test_attention import DTYPES, AttentionInput
from tests.engine.kernels.triton.test_table import WAITING, Recorder, small, table
from tests.engine.ranges import UNIT, Range, assert_within
from tests.engine.rounding_noise import allowed, largest

pytestmark = pytest.mark.combinations("combinations of what Triton's kernels take")

ON_GPU = torch.cuda.is_available()
PADDED = replace(CUDNN, backend=CUDNN.backend if ON_GPU else SDPBackend.MATH, length_multiple=32)
Backends = list[ContiguousBackend]
BACKENDS: dict[str, Backends] = {"flash": [FLASH], "whole contexts padded": [PADDED]}
MIN_QUERIES = 20
STEPS: dict[str, Lengths] = {
    "a whole context": [(0, 37)],
    "a context of whole blocks": [(0, 32)],
    "after context": [(21, 30)],
    "after one token": [(1, 20)],
    "two": [(0, 37), (50, 23)],
    "with decodes before": [(70, 1), (3, 1), (0, 37)],
    "with others after": [(33, 25), (0, 1), (9, 11)],
    "between others": [(40, 1), (0, 37), (5, 1), (3, 4), (19, 25), (20, 20), (0, 9), (70, 1)],
}


def mixed(case: AttentionInput, backends: Backends, prepare_paged: PrepareAttention | None = None) -> Tensor:
    """[T, heads * d]"""
    prepare_paged = prepare_paged or partial(TritonAttention, workspace=case.workspace())
    batch = replace(case.batch, host_lengths=[(new, done + new) for done, new in case.lengths])
    attend = gathered.prepare_attention(
        batch, case.shape, prepare_paged=prepare_paged, backends=backends, min_queries=MIN_QUERIES
    )
    return attend(case.queries.to(case.device), case.layer_kv, 0).cpu()


def check(case: AttentionInput, backends: Backends) -> None:
    """Compares with the expected result; cache that nobody wrote is NaN, and must not matter."""
    assert_within(mixed(case, backends), case.expected())


needs_half = pytest.mark.skipif(ON_GPU, reason="on a GPU torch's kernels are for half precision")


@needs_half
@pytest.mark.parametrize("backends", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_every_sequence_gets_its_own(lengths: Lengths, backends: Backends, device: torch.device) -> None:
    check(AttentionInput(lengths=lengths, device=device), backends)


@pytest.mark.parametrize("dtype", DTYPES[ON_GPU:])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("backends", BACKENDS.values(), ids=BACKENDS)
def test_heads_share_keys_and_values_in_groups(
    backends: Backends, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [(40, 1), (0, 37), (19, 25)]
    check(AttentionInput(lengths=lengths, group=group, dtype=dtype, device=device), backends)


@needs_half
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 16), (80, 32), (12, 48)])
@pytest.mark.parametrize("backends", BACKENDS.values(), ids=BACKENDS)
def test_heads_and_blocks_of_all_sizes(
    backends: Backends, head_dim: int, block_size: int, device: torch.device
) -> None:
    lengths = [(0, 37), (7, 1), (50, 50)]
    check(AttentionInput(lengths=lengths, head_dim=head_dim, block_size=block_size, device=device), backends)


@needs_half
@pytest.mark.parametrize("kv_dtype", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("backends", BACKENDS.values(), ids=BACKENDS)
def test_a_quantized_cache_is_gathered_as_what_it_stands_for(
    backends: Backends, kv_dtype: torch.dtype, device: torch.device
) -> None:
    case = AttentionInput(lengths=STEPS["between others"], kv_dtype=kv_dtype, device=device)
    assert_within(mixed(case, backends), nearly(case.expected()))


def nearly(expected: Range) -> Range:
    """Keys and values are rounded once more where they are gathered: as if they were off by a unit of float32."""
    return expected.widened(0, 40 * UNIT)


@needs_half
def test_it_agrees_with_the_reference(device: torch.device) -> None:
    case = AttentionInput(lengths=STEPS["between others"], device=device)
    case.layer_kv.nan_to_num_()
    attended = PagedAttention(case.batch, case.shape)(case.queries.to(device), case.layer_kv, 0)
    for found in (mixed(case, BACKENDS["flash"]), attended):
        assert_within(found, case.expected())


class Others:
    """Notes the batches that are not torch's to attend."""

    def __init__(self, case: AttentionInput) -> None:
        self.workspace = case.workspace()
        self.batches: list[Batch] = []

    def __call__(self, batch: Batch, shape: Any) -> TritonAttention:
        self.batches.append(batch)
        return TritonAttention(batch, shape, self.workspace)


@needs_half
def test_decodes_beside_a_long_chunk_need_no_kernel_for_many_queries(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "prefill_attention_kernel", None)
    check(AttentionInput(lengths=[(40, 1), (0, 37), (5, 1)], device=device), BACKENDS["flash"])


@needs_half
def test_paged_attention_sees_no_context_of_what_it_does_not_attend(device: torch.device) -> None:
    case = AttentionInput(lengths=STEPS["between others"], device=device)
    others = Others(case)
    mixed(case, BACKENDS["flash"], others)
    (batch,) = others.batches  # one for all of them
    contexts = [0 if new >= MIN_QUERIES else done + new for done, new in case.lengths]
    assert batch.context_lens.tolist() == contexts
    assert batch.max_query_len == 9
    assert batch.host_lengths is None


@needs_half
def test_a_step_of_long_chunks_alone_needs_no_paged_attention(device: torch.device) -> None:
    case = AttentionInput(lengths=STEPS["two"], device=device)
    others = Others(case)
    assert_within(mixed(case, BACKENDS["flash"], others), case.expected())
    assert others.batches == []


@pytest.mark.parametrize(
    ("lengths", "told"),
    [([(40, 1), (0, 37)], False), ([(40, 1), (0, 19)], True), ([(4, 30)], True)],
    ids=["only the device knows", "none is long", "none that has a backend"],
)
def test_a_step_without_long_chunks_is_left_as_it_is(
    lengths: Lengths, told: bool, device: torch.device
) -> None:
    case = AttentionInput(lengths=lengths, device=device)
    others = Others(case)
    host_lengths = [(new, done + new) for done, new in lengths] if told else None
    batch = replace(case.batch, host_lengths=host_lengths)
    attend = gathered.prepare_attention(
        batch, case.shape, prepare_paged=others, backends=[PADDED], min_queries=MIN_QUERIES
    )
    assert isinstance(attend, TritonAttention)
    assert others.batches[0] is batch


@needs_half
def test_nothing_waits_for_the_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own cannot be made while a recorder is at work; on a CPU it becomes this mask, too.
    monkeypatch.setattr(gathered, "causal_lower_right", lower_right)
    case = AttentionInput(lengths=STEPS["between others"], device=device)
    with Recorder() as recorder:
        mixed(case, BACKENDS["flash"])
    assert "index_select" in recorder.names
    assert not set(recorder.names) & WAITING


def with_backends(kernels: Kernels, backends: Backends) -> Kernels:
    prepare = partial(
        gathered.prepare_attention, prepare_paged=kernels.attention, backends=backends, min_queries=6
    )
    return replace(kernels, attention=prepare)


def batch_of(prompts: Prompts, ranges: dict[int, tuple[int, int]]) -> Batch:
    batch = prompts.batch(ranges)
    batch.host_lengths = [(end - start, end) for start, end in ranges.values()]
    return batch


@pytest.mark.parametrize("dtype", DTYPES[ON_GPU:])
@pytest.mark.parametrize("backends", [[FLASH], [PADDED], [PADDED, FLASH]], ids=["flash", "padded", "both"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_are_those_of_plain_torch(
    name: str,
    backends: Backends,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Prefill in chunks beside another's decode, with blocks that are not a number where nobody wrote."""
    checkpoint = Checkpoint(small(name), dtype)
    decoder = checkpoint.decoder(with_backends(table(checkpoint.config, dtype, device), backends))
    reference = checkpoint.decoder(reference_kernels(torch.device("cpu"), torch.float32))
    decoder.kv.data.fill_(torch.nan)
    prompts = Prompts(checkpoint.config.vocab_size, [40, 9])
    ranges = ({0: (0, 19)}, {1: (0, 8), 0: (19, 33)}, {1: (8, 9), 0: (33, 40)})
    steps = [batch_of(prompts, each) for each in ranges]
    for batch, error in zip(steps, allowed(checkpoint.decoder, steps, dtype, dtype), strict=True):
        assert largest(decoder(batch.to(device)).float().cpu() - reference(batch)) <= error


def test_a_batch_keeps_its_lengths_on_its_way_to_a_device() -> None:
    numbers = int32([0, 1])
    batch = Batch(*[numbers] * 6, host_lengths=[(1, 1)])
    moved = batch.to(torch.device("meta"))
    assert moved.host_lengths == [(1, 1)]
    assert moved.positions.device.type == "meta"
