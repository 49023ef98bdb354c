"""Layers with a state in the native decoder: those of transformers, and bits that nothing about a step changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.kernels.cpu.native import NativeLibrary, Team
from penstock.engine.kernels.select import native_kernels
from penstock.engine.kernels.state_cache import StateCache
from penstock.engine.program.native import NativeDecoder
from tests.engine.families import STATES
from tests.engine.gguf_states import write_state_family
from tests.engine.kernels.state_layers import check_cuts
from tests.engine.model.test_states import NUM_PENDING, OPTIONS, TOKEN_IDS, Run, check
from tests.engine.model.test_transformer import make_batch, oracle_logits

ALL = [[0, 1, 0, len(TOKEN_IDS)]]
PROMPTS = [TOKEN_IDS[:26], [5 * i % 390 + 3 for i in range(17)], [9]]
FEW = ("Qwen 3.5", "LFM2", "Nemotron 3")
"""A family with each kind of mixer."""

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Writes a tiny model of a family once."""
    return functools.cache(lambda family: STATES[family].make(tmp_path_factory.mktemp("states")))


@functools.cache
def theirs(path: Path) -> Tensor:
    return oracle_logits(path, TOKEN_IDS)


def run(path: Path, team: Team, dtype: torch.dtype = torch.float32, options: LoadOptions = OPTIONS) -> Run:
    made = Run(path, options, kernels=native_kernels(team, dtype))
    assert isinstance(made.decoder, NativeDecoder)
    return made


def all_logits(one: Run) -> Tensor:
    """All logits of a prompt, however it is cut."""
    found = one.logits([(TOKEN_IDS, 0)], ALL)
    for size in (1, 7, 64):
        assert torch.equal(one.in_chunks(size), found)
    return found


@pytest.mark.parametrize("family", STATES)
def test_logits_are_those_of_transformers_and_no_cut_changes_a_bit(
    family: str, team: Team, folder: Folder
) -> None:
    one = run(folder(family), team)
    found = all_logits(one)
    check(found, theirs(folder(family)))
    assert torch.equal(one.weights.lm_head(one.decoder(make_batch([(TOKEN_IDS, 0)]))), found), "without slots"


def test_value_heads_of_a_gguf_file_lie_by_tiles(team: Team, folder: Folder, tmp_path: Path) -> None:
    path = write_state_family(folder("Qwen 3.5"), tmp_path / "model.gguf")
    check(all_logits(run(path, team)), theirs(folder("Qwen 3.5")))


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.bfloat16, OPTIONS), (torch.float32, replace(OPTIONS, quantize="int8"))],
    ids=["bfloat16", "int8"],
)
def test_nor_in_fewer_bits(
    family: str, dtype: torch.dtype, options: LoadOptions, team: Team, folder: Folder
) -> None:
    exact, found = theirs(folder(family)), all_logits(run(folder(family), team, dtype, options))
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.5


@pytest.mark.parametrize("family", FEW)
def test_nor_does_the_number_of_threads(family: str, library: NativeLibrary, folder: Folder) -> None:
    one, five = (run(folder(family), library.start_team(threads)) for threads in (1, 5))
    assert torch.equal(*(each.logits([(TOKEN_IDS, 0)], ALL) for each in (one, five)))


@dataclass
class Steps:
    """Steps of some prompts, of which all logits are looked at."""

    model: Run
    rows: list[list[int]]

    def cache(self, num_slots: int = 16) -> StateCache:
        assert num_slots <= self.model.states.num_slots
        self.model.states.data[1:] = torch.nan
        return self.model.states

    def step(
        self,
        cache: StateCache,
        parts: Sequence[tuple[int, int, int]],
        slots: Sequence[Sequence[int]],
        saves: Sequence[Sequence[int]] = (),
    ) -> Sequence[Tensor]:
        assert cache is self.model.states
        tables = make_batch([(known, 0) for known in self.rows]).block_tables
        batch = replace(
            make_batch([(self.rows[sequence][:end], first) for sequence, first, end in parts]),
            block_tables=tables[[sequence for sequence, _, _ in parts]],
            state_slots=torch.tensor(slots, dtype=torch.int32),
            state_saves=torch.tensor(saves, dtype=torch.int32).view(-1, 4),
        )
        made = self.model.weights.lm_head(self.model.decoder(batch))
        return torch.split(made, [end - first for _, first, end in parts])


@pytest.mark.parametrize("family", ["Qwen 3.5", "LFM2", "Granite 4 H", "Nemotron 3", "Mamba 2"])
def test_nor_do_batches_replays_forks_or_snapshots(family: str, team: Team, folder: Folder) -> None:
    model = Run(folder(family), kernels=native_kernels(team, torch.float32), num_slots=100)
    for seed in range(10):
        check_cuts(Steps(model, PROMPTS), seed)


@pytest.mark.parametrize("family", STATES)
def test_drafts_that_turn_out_wrong_leave_no_trace(family: str, team: Team, folder: Folder) -> None:
    one = run(folder(family), team)
    expected = one.logits([(TOKEN_IDS, 0)], ALL)
    assert torch.equal(one.logits([(TOKEN_IDS[:30], 0)], [[0, 1, 0, 30]]), expected[:30])
    drafted = [*TOKEN_IDS[:32], 3, 4]
    assert torch.equal(one.logits([(drafted, 30)], [[1, 1, 0, 1]])[:2], expected[30:32])
    assert torch.equal(one.logits([(TOKEN_IDS, 32)], [[1, 1, 1, 58]]), expected[32:])


@pytest.mark.parametrize("family", STATES)
def test_only_sampled_rows_are_made_and_every_row_is_seen(family: str, team: Team, folder: Folder) -> None:
    one = run(folder(family), team)
    expected = one.logits([(TOKEN_IDS, 0)], ALL)
    rows = torch.tensor([6, 36, 37, 59], dtype=torch.int32)
    slots = torch.tensor([[0, 1, 0, 37], [0, 2, 0, 23]], dtype=torch.int32)
    batch = replace(
        make_batch([(TOKEN_IDS[:37], 0), (TOKEN_IDS[:23], 0)]), sample_rows=rows, state_slots=slots
    )
    assert torch.equal(one.weights.lm_head(one.decoder(batch)), expected[[6, 36, 0, 22]])
    assert torch.equal(one.logits([(TOKEN_IDS[:38], 37)], [[1, 1, 0, 1]]), expected[37:38])


@pytest.mark.parametrize(
    ("slots", "saves", "said"),
    [
        ([8, 1, 0, 3], [], "a state slot does not exist"),
        ([0, -1, 0, 3], [], "a state slot does not exist"),
        ([1, 1, NUM_PENDING + 1, 3], [], "more pending ones"),
        ([1, 1, 0, 4], [], "more rows"),
        ([1, 1, 0, -1], [], "more rows"),
        ([0, 1, 0, 3], [[0, 1, 8, 0]], "a state slot does not exist"),
        ([0, 1, 0, 3], [[1, 1, 2, 0]], "more rows"),
        ([0, 1, 0, 3], [[0, 2, 2, 2]], "more rows"),
        ([0, 1, 0, 3], [[0, -1, 2, 0]], "more rows"),
    ],
)
def test_slots_and_rows_that_do_not_exist_are_refused(
    slots: list[int], saves: list[list[int]], said: str, team: Team, folder: Folder
) -> None:
    one = run(folder("LFM2"), team)
    with pytest.raises(ValueError, match=said):
        one.logits([(TOKEN_IDS[:3], 0)], [slots], saves)
    assert not one.states.data.any()


def test_more_pending_rows_than_a_slot_has_are_refused(team: Team, folder: Folder) -> None:
    one, known = run(folder("LFM2"), team), TOKEN_IDS[: NUM_PENDING + 1]
    with pytest.raises(ValueError, match="more pending ones"):
        one.logits([(known, 0)], [[0, 1, 0, 0]])
    one.logits([(known, 0)], [[0, 0, 0, 0]])  # nothing is kept


def test_their_time_counts_for_parts_of_their_own(team: Team, folder: Folder) -> None:
    one = run(folder("Qwen 3.5"), team)
    team.time(True)
    one.logits([(TOKEN_IDS, 0)], ALL)
    counts = {kind: spent.num_phases for kind, spent in team.times().items()}
    team.time(False)
    assert {kind: counts[kind] for kind in ("conv", "state", "gates", "attention", "qkv", "o")} == {
        "conv": 3,
        "state": 3,
        "gates": 3,
        "attention": 1,
        "qkv": 4,
        "o": 4,
    }
