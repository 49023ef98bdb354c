"""Whether drafts pay, on machines whose steps take simulated time: noisy, disturbed, and bound by one thing or another.

Time alone is pretended: drafting, its pace, the model of step times and the block tables are real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.drafting import Drafting
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.pace import _PAIRS, _SHORTEST_REST, Pace
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import Chunk, StepPlan
from penstock.priority.steptime import StepTimeModel
from tests.engine.fake_runner import make_request
from tests.few import examples

WRITES, REPEATS = 0.05, 0.97
"""The chance that a draft is right where a text is new, and where it repeats itself."""
MEMORY, ARITHMETIC = (0.010, 0.0005), (0.002, 0.002)
"""Seconds of a step and of each of its rows, where steps wait for memory, and where they multiply."""


@dataclass
class Noise:
    """How much longer steps take than they would on a quiet machine."""

    random: Random
    spread: float = 0.05
    burst: float = 0.0
    """The chance of a step to be the first of a disturbance."""
    burst_steps: int = 6
    burst_factor: float = 3.0
    left: int = 0

    def factor(self) -> float:
        if self.left == 0 and self.random.random() < self.burst:
            self.left = self.burst_steps
        self.left = max(0, self.left - 1)
        slow = self.burst_factor if self.left else 1.0
        return slow * self.random.lognormvariate(0.0, self.spread)


@dataclass
class Guesser:
    """Proposes 8 tokens for each sequence; the machine decides how many are right."""

    name: str = "guesser"
    is_behind: bool = False

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:  # noqa: ARG002
        return [[1] * length for length in lengths]

    def forget(self, sequence: Sequence) -> None: ...


@dataclass
class Machine:
    """Runs streams that never end, step by step."""

    num_streams: int
    cost: tuple[float, float]
    chance: Callable[[int], float]
    """By step: the chance that a draft is right."""
    noise: Noise
    unforeseen: float = 1.0
    """What a step with drafts takes beyond what any model knows, as a factor."""
    most_s: float = inf
    drafts: bool = True
    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    longest_s: float = 0.0
    rows: list[int] = field(default_factory=list)
    """By step, the drafts that it had."""

    def __post_init__(self) -> None:
        self.model = StepTimeModel()
        self.drafting = Drafting(Guesser(), 8, step_seconds=self._expected_s)
        self.tables = SequenceMemory(64 * self.num_streams, 16)
        self.random = Random(self.noise.random.random())
        self.streams = [self._stream(i) for i in range(self.num_streams)]

    def _stream(self, number: int) -> Sequence:
        sequence = Sequence(make_request(f"r{number}", [1, 2, 3], max_tokens=1 << 20))
        self.tables.start(sequence)
        sequence.token_ids.append(4)
        return sequence

    def _expected_s(self, num_prefill: int, num_decode: int, num_context: int, num_attended: int) -> float:
        rest = num_context, num_attended
        return self.model.seconds(num_prefill, num_decode, *rest) if self.model.is_known else 0.0

    def run(self, num_steps: int) -> float:
        """Takes so many steps, and returns the tokens a second of them."""
        tokens, seconds = self.num_tokens, self.seconds
        for _ in range(num_steps):
            self._step()
        return (self.num_tokens - tokens) / (self.seconds - seconds)

    def _step(self) -> None:
        plan = StepPlan()
        for sequence in self.streams:
            if len(sequence.token_ids) > 900:  # the tables are not what is tested
                del sequence.token_ids[4:]
            sequence.num_computed, sequence.num_pending = len(sequence.token_ids), 1
            plan.chunks.append(Chunk(sequence, sequence.num_computed - 1, 1, samples=True))
        plan.num_tokens = len(plan.chunks)
        if self.drafts:
            self.drafting.extend(plan, self.tables, 4096, self.most_s)
        fixed_s, row_s = self.cost
        quiet_s = (fixed_s + row_s * plan.num_tokens) * (self.unforeseen if plan.num_drafts else 1.0)
        seconds = quiet_s * self.noise.factor()
        for chunk in plan.chunks:
            brought = self._brought(len(chunk.drafts))
            chunk.num_accepted = len(brought) - 1
            chunk.sequence.token_ids += brought
            self.num_tokens += len(brought)
        self.model.observe(0, plan.num_tokens, 0, seconds)
        self.drafting.observe(plan, seconds)
        self.rows.append(plan.num_drafts)
        self.num_steps += 1
        self.seconds += seconds
        self.longest_s = max(self.longest_s, quiet_s)

    def _brought(self, num_drafts: int) -> list[int]:
        """The tokens of a sequence: those that are as they were guessed are 1."""
        chance, tokens = self.chance(self.num_steps), list[int]()
        while len(tokens) <= num_drafts and tokens[-1:] != [2]:
            tokens.append(1 if self.random.random() < chance else 2)
        return tokens


machines: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    num_streams=st.sampled_from([1, 4, 16, 48]),
    cost=st.sampled_from([MEMORY, ARITHMETIC]),
    chance=st.sampled_from([WRITES, 0.5, REPEATS]),
)
noises = st.sampled_from([(0.03, 0.0), (0.25, 0.0), (0.1, 0.03)])
"""The spread of every step, and the chance of a disturbance of six steps."""


def ratio(
    seed: int,
    num_streams: int,
    cost: tuple[float, float],
    chance: float,
    noise: tuple[float, float] = (0.03, 0.0),
    num_steps: int = 240,
) -> float:
    """The tokens a second with drafts, in units of those without, on the same machine with the same noise."""
    rates = []
    for drafts in (True, False):
        found = Machine(num_streams, cost, lambda _: chance, Noise(Random(seed), *noise), drafts=drafts)
        found.run(30)
        rates.append(found.run(num_steps))
    return rates[0] / rates[1]


@settings(max_examples=examples(20))
@given(machine=machines, noise=noises, seed=st.integers(0, 1 << 20))
def test_drafts_are_never_a_loss_whatever_else_the_machine_does(
    machine: dict[str, Any], noise: tuple[float, float], seed: int
) -> None:
    assert ratio(seed, noise=noise, **machine) > 0.96


@pytest.mark.combinations("machines and noises")
@pytest.mark.parametrize(
    ("num_streams", "cost", "least"),
    [(1, MEMORY, 4.0), (4, MEMORY, 2.5), (16, MEMORY, 1.4), (1, ARITHMETIC, 1.3)],
)
@pytest.mark.parametrize("noise", [(0.03, 0.0), (0.25, 0.0), (0.1, 0.03)])
def test_where_text_repeats_and_steps_wait_for_memory_drafts_gain(
    num_streams: int, cost: tuple[float, float], least: float, noise: tuple[float, float]
) -> None:
    assert ratio(1, num_streams, cost, REPEATS, noise) > least


def test_where_steps_multiply_nothing_is_drafted_that_hardly_gains() -> None:
    """48 streams: even drafts that are all right would bring 2 % more tokens a second, in steps many times as long."""
    found = Machine(48, ARITHMETIC, lambda _: REPEATS, Noise(Random(2), 0.03))
    found.run(300)
    plain_s = ARITHMETIC[0] + 48 * ARITHMETIC[1]
    assert found.longest_s < 1.5 * plain_s
    assert sum(map(bool, found.rows)) < 0.1 * found.num_steps


@given(promise_s=st.floats(0.012, 0.06), num_streams=st.sampled_from([1, 4, 16]), seed=st.integers(0, 99))
@settings(max_examples=examples(15))
def test_no_step_with_drafts_breaks_a_promise_on_the_time_per_token(
    promise_s: float, num_streams: int, seed: int
) -> None:
    """On a machine that is known; one whose steps are longer without drafts gets none."""
    fixed_s, row_s = MEMORY
    found = Machine(num_streams, MEMORY, lambda _: REPEATS, Noise(Random(seed), 0.0), most_s=promise_s)
    found.model = StepTimeModel({"alpha_s": fixed_s, "gamma_s": row_s}, learns=False)
    found.run(60)
    plain_s = fixed_s + num_streams * row_s
    assert found.longest_s <= max(plain_s, promise_s) + 1e-9
    if promise_s > plain_s + num_streams * row_s:
        assert max(found.rows) > 0
    if promise_s < plain_s + row_s:
        assert not any(found.rows)


def test_a_disturbance_does_not_put_drafts_to_rest() -> None:
    """Six steps of a trial take three times as long: the trial is decided by the others."""
    for first in range(30, 60):
        found = Machine(4, MEMORY, lambda _: REPEATS, Noise(Random(3), 0.02))
        for number in range(60):
            found.noise.left = 6 if number == first else found.noise.left
            found.run(1)
        assert found.drafting._pace(4).pays, f"it was disturbed at step {first}"


def test_what_no_model_foresees_is_learnt_in_a_trial() -> None:
    """Steps with drafts take three times as long, for what is not in their rows: looking for them, say."""
    found = Machine(16, MEMORY, lambda _: REPEATS, Noise(Random(4), 0.05), unforeseen=3.0)
    found.run(800)
    assert 0 < sum(map(bool, found.rows)) < 0.05 * 800


def test_what_begins_to_repeat_itself_is_drafted_soon() -> None:
    """That is seen by looking: a rest is not waited out."""
    found = Machine(
        16, MEMORY, lambda step: REPEATS if step >= 200 else WRITES, Noise(Random(5), 0.1, burst=0.02)
    )
    found.run(280)
    assert sum(map(bool, found.rows[:200])) <= 2 * _PAIRS
    assert sum(map(bool, found.rows[200:])) > 20


def test_what_ends_to_repeat_itself_is_not_drafted_for_long() -> None:
    found = Machine(
        16, MEMORY, lambda step: REPEATS if step < 100 else WRITES, Noise(Random(6), 0.1, burst=0.02)
    )
    found.run(300)
    assert sum(map(bool, found.rows[30:100])) > 10
    assert sum(map(bool, found.rows[140:])) < 0.2 * 160


# By itself


def measure(pace: Pace, plain_s: float, drafted_s: float, num_steps: int) -> list[bool]:
    """Takes so many steps, of which those with drafts bring two tokens; by step, whether it had some."""
    had = []
    for _ in range(num_steps):
        had.append(pace.drafts)
        seconds = drafted_s if pace.drafts else plain_s
        pace.observe(1, 1 + pace.drafts, plain_s=1.0, modelled_s=1.0, seconds=seconds)
    return had


@pytest.mark.parametrize("block", [1, 3])
def test_what_pays_is_kept_with_a_look_at_steps_without(block: int) -> None:
    pace = Pace(block=block)
    measure(pace, 1.0, 1.6, 100)
    had = measure(pace, 1.0, 1.6, 1_000)
    assert pace.pays
    assert 0.8 < sum(had) / len(had) < 1.0


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("drafted_s", [2.05, 2.2, 2.6])
def test_what_drafts_lose_is_a_small_share_of_the_time(block: int, drafted_s: float) -> None:
    num_drafted = sum(measure(Pace(block=block), 1.0, drafted_s, 10_000))
    assert 0.0 < num_drafted * (drafted_s - 2.0) < 0.02 * 10_000


def test_what_loses_again_and_again_is_tried_ever_more_seldom() -> None:
    had = measure(Pace(), 1.0, 2.5, 10_000)
    drafted = [number for number, one in enumerate(had) if one]
    rests = [after - before for before, after in pairwise(drafted) if after - before > 2]
    assert rests[0] <= _SHORTEST_REST + 2
    assert rests == sorted(rests)
    assert rests[-1] > 1_000


def test_where_a_device_is_ahead_the_first_step_of_a_turn_counts_in_nothing() -> None:
    """With drafts it takes ten times as long: nothing was launched before it."""
    pace, before = Pace(block=3), False
    for _ in range(200):
        seconds = 1.0 if not pace.drafts else 1.4 if before else 14.0
        before = pace.drafts
        pace.observe(1, 1 + pace.drafts, plain_s=1.0, modelled_s=1.0, seconds=seconds)
    assert pace.pays


def test_steps_with_drafts_that_took_no_time_on_a_coarse_clock_have_a_price_above_nothing() -> None:
    pace = Pace(block=1)
    for _ in range(40):
        pace.observe(1, 2, plain_s=0.01, modelled_s=0.01, seconds=0.0 if pace.drafts else 0.01)
    assert pace.overhead > 0


def test_looks_are_so_seldom_that_they_take_a_small_share_of_the_time() -> None:
    for look_s, most in ((1e-6, 1.0), (1e-3, 0.25), (1.0, 0.07)):
        pace, num_looks = Pace(is_watched=True), 0
        for _ in range(500):
            if pace.is_look_due():
                num_looks += 1
                pace.note_outlook(1.0, look_s, plain_s=0.05)
        assert 0.9 * most < num_looks / 500 <= most
