"""The whole decoder over the kernel table for CUDA, against the same decoder over plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.native import BLOCK_SIZE
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.select import triton_kernels
from penstock.engine.kernels.sequence_table import FROM_TABLE, SequenceTable, StepTokens
from tests.engine.kernels.random_model import Checkpoint, Prompts, config
from tests.engine.kernels.triton.dtypes import DTYPES
from tests.engine.ranges import gamma
from tests.engine.rounding_noise import allowed, largest

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"num_layers": 1},
    "qwen3": {"num_layers": 1, "qk_norm": True, "tie_word_embeddings": False},
    "qwen2, odd sizes": {
        "num_layers": 1,
        "hidden_size": 33,
        "head_dim": 10,
        "num_heads": 9,
        "num_kv_heads": 3,
        "qkv_bias": True,
    },
    "mistral, one window": {"num_layers": 2, "sliding_windows": (0, 5)},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.combinations("combinations of what Triton's kernels take"),
]


def table(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernels:
    return triton_kernels(config, device, dtype, LoadOptions(block_size=BLOCK_SIZE, max_num_seqs=4))


def small(name: str) -> ModelConfig:
    return config(intermediate_size=50, **VARIANTS[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_plain_torch(name: str, dtype: torch.dtype, device: torch.device) -> None:
    checkpoint = Checkpoint(small(name), dtype)
    decoder, reference = checkpoint.decoder(table(checkpoint.config, dtype, device)), checkpoint.plain()
    decoder.kv.data.fill_(torch.nan)  # what nobody wrote must not matter
    prompts = Prompts(checkpoint.config.vocab_size, [20, 9])
    ranges = ({0: (0, 7)}, {0: (7, 10), 1: (0, 5)}, {1: (5, 6), 0: (10, 11)})
    steps = [prompts.batch(each) for each in ranges]
    for batch, error in zip(steps, allowed(checkpoint.decoder, steps, dtype, dtype), strict=True):
        found = decoder(batch.to(device))
        assert found.dtype == dtype
        assert largest(found.float().cpu() - reference(batch)) <= error


@pytest.mark.parametrize("owned", [True, False])
def test_rows_that_pad_a_batch_change_nothing(owned: bool, device: torch.device) -> None:
    """As in a graph for more sequences than there are."""
    checkpoint = Checkpoint(small("qwen3"), torch.float32)
    kernels = table(checkpoint.config, torch.float32, device)
    decoder, reference = checkpoint.decoder(kernels), checkpoint.decoder(kernels)
    prompts = Prompts(checkpoint.config.vocab_size, [6, 3])
    for each in (decoder, reference):
        each(prompts.batch({0: (0, 5), 1: (0, 2)}).to(device))
    batch = prompts.batch({0: (5, 6), 1: (2, 3)})
    expected = reference(batch.to(device))
    found = decoder(padded(batch, 2, owned).to(device))
    steps = [prompts.batch({0: (0, 5), 1: (0, 2)}), batch]
    assert largest(found[:2] - expected) <= allowed(checkpoint.decoder, steps, torch.float32)[-1]
    # A product of more rows may add up in another order, in the padded step and in the other one.
    kv, expected_kv = decoder.kv.data, reference.kv.data
    assert largest(kv - expected_kv) <= 2 * gamma(checkpoint.config.hidden_size) * largest(expected_kv)


def padded(batch: Batch, num_rows: int, owned: bool) -> Batch:
    """With more rows: of sequences that have no context (position -1), or of no sequence at all."""

    def more(tensor: Tensor, *values: int) -> Tensor:
        return torch.cat((tensor, *(tensor.new_full((1, *tensor.shape[1:]), value) for value in values)))

    num_tokens = len(batch.token_ids)
    new_rows = range(num_tokens, num_tokens + num_rows)
    return Batch(
        token_ids=more(batch.token_ids, *[0] * num_rows),
        positions=more(batch.positions, *[-1 if owned else 0] * num_rows),
        query_starts=more(batch.query_starts, *[row + 1 if owned else num_tokens for row in new_rows]),
        context_lens=more(batch.context_lens, *[0] * num_rows),
        block_tables=more(batch.block_tables, *[0] * num_rows),
        sample_rows=more(batch.sample_rows, *new_rows),
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_out_of_the_table_is_what_the_host_would_have_made(name: str, device: torch.device) -> None:
    """A sequence with one token, one with three, and padding in sequences and in tokens, as in a graph."""
    checkpoint = Checkpoint(small(name), torch.float32)
    options = LoadOptions(block_size=BLOCK_SIZE, max_num_seqs=4, max_drafts=2)
    kernels = triton_kernels(checkpoint.config, device, torch.float32, options)
    decoder, reference = checkpoint.decoder(kernels), checkpoint.plain()
    decoder.kv.data.fill_(torch.nan)  # what nobody wrote must not matter
    prompts = Prompts(checkpoint.config.vocab_size, [3, 20])
    before = prompts.batch({0: (0, 2), 1: (0, 13)})
    step = prompts.batch({0: (2, 3), 1: (13, 16)}, all_rows=False)
    for batch in (before, step):
        expected = reference(batch)
    decoder(before.to(device))
    table = SequenceTable(3, 4, BLOCK_SIZE, device)
    table.lengths[:2] = torch.tensor([2, 13])
    table.last_tokens[0] = step.token_ids[0]
    table.block_tables[:2, : step.block_tables.shape[1]] = step.block_tables
    seats, starts = int32([0, 1, -1], device), int32([0, 1, 4, 4], device)
    tokens = int32([FROM_TABLE, *step.token_ids[1:].tolist(), 0, 0], device)
    inputs = kernels.gather(table, StepTokens(seats, starts, tokens, num_blocks=4, max_query_len=6))
    error = allowed(checkpoint.decoder, [before, step], torch.float32)[-1]
    assert largest(decoder(inputs.batch)[:2].cpu() - expected) <= error


def int32(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_no_rows_wanted_are_no_logits(device: torch.device) -> None:
    checkpoint = Checkpoint(small("llama"), torch.float32)
    decoder = checkpoint.decoder(table(checkpoint.config, torch.float32, device))
    batch = Prompts(83, [5]).batch({0: (0, 5)})
    batch.sample_rows = batch.sample_rows[:0]
    assert decoder(batch.to(device)).shape == (0, 83)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which of torch's operations run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select", "unique_dim"}
"""Operations that need a value or a length from the device."""
MOVING = {"_to_copy", "clone", "index", "cat"}
"""Operations that are a pass over memory of their own. (The interpreter itself uses copy_.)"""


def test_torch_is_left_with_the_linear_maps(device: torch.device) -> None:
    """Nothing in a step waits for the device, or moves what a kernel has moved already."""
    checkpoint = Checkpoint(small("qwen3"), torch.float32)
    decoder = checkpoint.decoder(table(checkpoint.config, torch.float32, device))
    batch = Prompts(83, [5, 9]).batch({0: (0, 3), 1: (0, 2)}).to(device)
    with Recorder() as recorder:
        decoder(batch)
    names = set(recorder.names)
    assert "embedding" in names
    assert not names & (WAITING | MOVING)
