"""A runner whose KV is the tokens themselves, and whose model is a hash: planning's mistakes become wrong tokens.

What a sequence sees is read back through its block table from "device" blocks that hold (position, token) pairs. A
block shared wrongly, written while shared, copied late, or reused too early changes what is read, and the runner says
so.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from math import inf

from penstock.engine.execution.draft_kv import DraftChunk, DraftKV
from penstock.engine.planning.device import OutOfMemory, RunnerFacts, StepInFlight
from penstock.engine.planning.drafting import Drafting, Proposer
from penstock.engine.planning.guesses import Guess
from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.pace import Pace
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.ranked_memory import Memory
from penstock.engine.planning.request import FinishReason, Request, Sequence
from penstock.engine.planning.scheduler import TokenSink
from penstock.engine.planning.state_records import ChunkState
from penstock.engine.planning.step import Chunk, Sampled, StepPlan, StepResult
from tests.engine.fake_states import FakeRows, FakeStates

VOCABULARY = 50


def next_token(token_ids: list[int], request: Request, index: int, window: int = 0) -> int:
    """The fake model: depends on every token before that is in the window, on the seed and on the choice."""
    state = request.sampling.seed * 31 + index
    for token_id in token_ids[-window:]:
        state = (state * 1_000_003 + token_id + 1) % 2_147_483_647
    return state % VOCABULARY


def expected_output(request: Request, index: int, max_len: int, window: int = 0) -> list[int]:
    """Returns the tokens that an undisturbed run brings."""
    known = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_tokens):
        if len(known) >= max_len:
            break
        known.append(next_token(kept(known, request.keeping), request, index, window))
    return known[len(request.prompt_token_ids) :]


def kept(token_ids: list[int], keeping: Keeping | None) -> list[int]:
    """The tokens that the last one attends to."""
    num_dropped = 0 if keeping is None else keeping.num_dropped(len(token_ids) - 1)
    if keeping is None or not num_dropped:
        return token_ids
    return token_ids[: keeping.num_first] + token_ids[keeping.num_first + num_dropped :]


DROPPED = -1
"""In place of a block."""


def blocks_by_position(sequence: Sequence, block_size: int, num_tables: int = 1) -> list[int]:
    """The block table of a sequence, with an entry for all of its tokens."""
    if not sequence.num_dropped:
        return sequence.block_table
    assert sequence.keeping is not None
    first, num = (n // block_size * num_tables for n in (sequence.keeping.num_first, sequence.num_dropped))
    return sequence.block_table[:first] + [DROPPED] * num + sequence.block_table[first:]


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that ended before `launch` returned."""

    result: StepResult

    def choose(self) -> None:
        pass

    def wait(self) -> StepResult:
        return self.result


class FakeRunner:
    """Executes plans on blocks of (block table, position, token)."""

    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int, ...] = (0,)) -> None:
        """Through each block table of a sequence, a token sees so many tokens, itself included; 0 sees all."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.window = 0 if 0 in windows else max(windows)
        self.max_batch_tokens = 1 << 30
        self.num_ahead = 0
        self.num_stages = 1
        self.num_tokens = 0
        self.fault: Exception | None = None
        """Raised, once, by the next step."""
        self.room = 1 << 30
        """Tokens of the largest step that the device has memory for at this moment."""
        self.refuses_late = True
        """Whether copies are made and KV is written when it finds out."""
        self.num_refused = 0
        """Launches that it had no room for."""
        self.bad: set[tuple[str, int]] = set()
        """Choices whose logits are not finite."""
        self.closed = False
        self.drafter: FakeDraftModel | None = None
        self._left: dict[Sequence, list[int]] = {}
        """Drafts that the host does not know, for the next step to be launched."""
        self.states: FakeStates | None = None
        self._blocks: list[list[tuple[int, int, int] | None]] = [
            [None] * block_size for _ in range(num_blocks)
        ]

    def load(self) -> RunnerFacts:
        return RunnerFacts(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_batch_tokens=self.max_batch_tokens,
            num_ahead=self.num_ahead,
            num_stages=self.num_stages,
            num_states=len(self.states.states) if self.states else 0,
            num_pending=self.states.num_pending if self.states else 0,
        )

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Nothing of a sequence is held but by the draft model."""
        for sequence in sequences:
            if self.drafter is not None:
                self.drafter.kv.forget(sequence)

    def draft(self, plan: StepPlan, *, may_stay: bool) -> list[list[int]] | None:
        """Some drafts stay, at random, and some of those that stay are of the first places only."""
        assert self.drafter is not None
        made, self._left = self.drafter.draft(plan), {}
        if not may_stay or not all(made) or not self.drafter.leaves():
            return made
        asked = [chunk for chunk in plan.chunks if chunk.is_open]
        self._left = {
            chunk.sequence: [*drafts, *[-1] * (len(chunk.drafts) - len(drafts))]
            for chunk, drafts in zip(asked, made, strict=True)
        }
        return None

    def drafts_of(self, chunk: Chunk) -> ListLike[int]:
        """The drafts of a chunk, whether the host knows them or not."""
        return self._left[chunk.sequence] if chunk.is_open else chunk.drafts

    def made(self, plan: StepPlan) -> list[list[int]]:
        """The drafts of a plan that the host does not know."""
        return [self._left[chunk.sequence] for chunk in plan.chunks if chunk.is_open]

    def close(self) -> None:
        self.closed = True

    def launch(self, plan: StepPlan) -> StepInFlight:
        return EndedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        if self._has_room(plan) or self.refuses_late:
            self._copy(plan.copies)
            plan.copies = []
            for chunk in plan.chunks:
                self._write(chunk)
            self._run_states(
                [self._rows(chunk) for chunk in plan.chunks], breaks_off=not self._has_room(plan)
            )
        self._refuse_if_too_large(plan)
        sampled = [self._sample(chunk) for chunk in plan.chunks if chunk.samples]
        return StepResult(sampled, made=self.made(plan), drafting_s=1.0)

    def _has_room(self, plan: StepPlan) -> bool:
        return plan.num_tokens <= self.room

    def _refuse_if_too_large(self, plan: StepPlan) -> None:
        if not self._has_room(plan):
            self.num_refused += 1
            raise OutOfMemory(f"tried to allocate {plan.num_tokens} tokens")

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        before = [list(self._blocks[source]) for source, _ in copies]
        for (_, target), content in zip(copies, before, strict=True):
            self._blocks[target] = content

    def _rows(self, chunk: Chunk) -> tuple[ChunkState | None, int, int, int, ListLike[int]]:
        """The slots of a chunk, where it begins and ends, its drafts, and the blocks that it has written."""
        end = chunk.start + chunk.num_tokens
        return chunk.state, chunk.start, end, len(chunk.drafts), self._table_of(chunk.sequence)

    def _table_of(self, sequence: Sequence) -> list[int]:
        return blocks_by_position(sequence, self.block_size, len(self.windows))

    def _run_states(
        self, chunks: list[tuple[ChunkState | None, int, int, int, ListLike[int]]], *, breaks_off: bool
    ) -> None:
        """Brings the states of chunks on by the tokens that were written; they follow from all those before."""
        if self.states is None:
            assert not any(chunk[0] for chunk in chunks)
            return
        step = []
        for told, start, end, num_drafts, table in chunks:
            assert told is not None
            rows = [self._read(table, 0, position) for position in range(start, end)]
            step.append(FakeRows(told, rows, num_drafts))
        if breaks_off:
            self.states.break_off(step)
            return
        for before, (_, start, _, _, table) in zip(self.states.run(step), chunks, strict=True):
            assert len(before) == start, f"the state of {len(before)} tokens is read at {start}"
            for number, window in enumerate(self.windows):
                first = self.visible(start + 1, window).start
                seen = [self._read(table, number, position) for position in range(first, start)]
                assert before[first:] == seen, f"the state is of {before}, {seen} are seen"

    def _write(self, chunk: Chunk) -> None:
        table, tokens = self._table_of(chunk.sequence), [*chunk.sequence.token_ids, *self.drafts_of(chunk)]
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            self._store(table, position, tokens[position])

    def _store(self, entries: ListLike[int], position: int, token: int) -> None:
        """Writes a token into a block of every table."""
        for table in range(len(self.windows)):
            block = entries[position // self.block_size * len(self.windows) + table]
            assert block > 0, "block 0 is padding"
            self._blocks[block][position % self.block_size] = (table, position, token)
        self.num_tokens += 1

    def _sample(self, chunk: Chunk) -> Sampled:
        sequence, drafts = chunk.sequence, self.drafts_of(chunk)
        tokens = [*sequence.token_ids, *drafts]
        if sequence.key in self.bad:
            return Sampled([], error="logits were not finite", is_finite=False)
        drawn: list[int] = []
        while True:
            length = len(sequence.token_ids) + len(drawn)
            seen = self._seen_by(self._table_of(sequence), length)
            visible = kept(tokens[:length], sequence.keeping)
            assert seen == visible[-self.window :], f"{sequence!r} sees {seen}"
            drawn.append(next_token(seen, sequence.request, sequence.index, self.window))
            if len(drawn) > len(drafts) or drawn[-1] != drafts[len(drawn) - 1]:
                return Sampled(drawn)

    def visible(self, length: int, window: int) -> range:
        """Positions that the last of `length` tokens sees through a table."""
        return range(max(0, length - window) if window else 0, length)

    def _seen_by(self, entries: ListLike[int], length: int) -> list[int]:
        """The tokens that the last of `length` tokens sees; every table has those in its window."""
        most: list[int] = []
        for table, window in enumerate(self.windows):
            there = (p for p in self.visible(length, window) if self._entry(entries, table, p) != DROPPED)
            seen = [self._read(entries, table, position) for position in there]
            most = max(most, seen, key=len)
            assert most[len(most) - len(seen) :] == seen, f"through table {table}, {seen} are seen"
        return most

    def _entry(self, entries: ListLike[int], table: int, position: int) -> int:
        return entries[position // self.block_size * len(self.windows) + table]

    def _read(self, entries: ListLike[int], table: int, position: int) -> int:
        block = self._entry(entries, table, position)
        entry = self._blocks[block][position % self.block_size]
        assert entry is not None, f"position {position} is read, which nobody wrote"
        assert entry[:2] == (table, position), f"{entry} is seen at {position} through table {table}"
        return entry[2]


class FakeProposer:
    """Knows what the fake model says, and tells it as it is with a probability of `accuracy`."""

    name = "fake"
    is_behind = False

    def __init__(self, pace: random.Random, accuracy: float, window: int = 0) -> None:
        self._pace, self._rightness, self._window = pace, accuracy, window

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        return [self._propose(*pair) for pair in zip(sequences, lengths, strict=True)]

    def _propose(self, sequence: Sequence, most: int) -> list[int]:
        tokens, drafts = list(sequence.token_ids), list[int]()
        for _ in range(self._pace.randint(0, most)):
            tokens.append(next_token(tokens, sequence.request, sequence.index, self._window))
            is_right = self._pace.random() < self._rightness
            drafts.append(tokens[-1] if is_right else self._pace.randrange(VOCABULARY))
        return drafts

    def forget(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None


class FakeDraftModel:
    """A draft model on blocks of its own, of the same numbers; it says at once if these are not what they should be."""

    def __init__(
        self, num_blocks: int, block_size: int, pace: random.Random, accuracy: float, num_tables: int = 1
    ) -> None:
        self.block_size, self.num_tables = block_size, num_tables
        self.kv = DraftKV(block_size, max_tokens=16, keeps_drafts=True, num_tables=num_tables)
        self._pace, self._rightness = pace, accuracy
        self._blocks: list[list[tuple[int, int] | None]] = [[None] * block_size for _ in range(num_blocks)]

    def draft(self, plan: StepPlan) -> list[list[int]]:
        """Of some of the sequences, at random, it knows nothing."""
        asked = [chunk for chunk in plan.chunks if chunk.is_open]
        lengths = {c.sequence: len(c.drafts) for c in asked if self._pace.random() < 0.9}
        chunks, found = self.kv.begin(lengths), dict[Sequence, list[int]]()
        assert sum(chunk.num_tokens for chunk in chunks) <= 16
        for chunk in chunks:
            found[chunk.sequence] = drafts = self.run(chunk, lengths[chunk.sequence])
            self.kv.end(chunk, drafts)
        return [found.get(chunk.sequence, []) for chunk in asked]

    def leaves(self) -> bool:
        """Whether drafts that may stay on the device do."""
        return self._pace.random() < 0.5

    def run(self, chunk: DraftChunk, length: int) -> list[int]:
        sequence, tokens = chunk.sequence, list(chunk.sequence.token_ids)
        end = chunk.start + chunk.num_tokens
        assert chunk.start < end <= len(tokens)
        for position in range(chunk.start, end):
            self._write(sequence, position, tokens[position])
        found = [self._read(sequence, position) for position in range(end)]
        assert found == list(enumerate(tokens[:end])), f"of {sequence!r}, the draft knows something else"
        if end < len(tokens):
            return []
        drafts: list[int] = []
        for number in range(length):
            right = next_token([*tokens, *drafts], sequence.request, sequence.index)
            is_right = self._pace.random() < self._rightness
            drafts.append(right if is_right else self._pace.randrange(VOCABULARY))
            if number < length - 1:
                self._write(sequence, end + number, drafts[-1])
        return drafts

    def _write(self, sequence: Sequence, position: int, token: int) -> None:
        block = sequence.block_table[position // self.block_size * self.num_tables]
        self._blocks[block][position % self.block_size] = (position, token)

    def _read(self, sequence: Sequence, position: int) -> tuple[int, int] | None:
        block = sequence.block_table[position // self.block_size * self.num_tables]
        return self._blocks[block][position % self.block_size]


class UnpricedDrafting(Drafting):
    """Has as many drafts as there is room for, or some of them, whatever they cost."""

    def __init__(
        self,
        lookup: Proposer | None,
        most: int,
        pace: random.Random,
        *,
        has_model: bool = False,
        may_follow: bool = False,
    ) -> None:
        super().__init__(lookup, most, has_model=has_model, may_follow=may_follow)
        self._random = pace

    @property
    def is_due(self) -> bool:
        return not self.is_followed and self._random.random() < 0.8

    def extend(self, plan: StepPlan, tables: Memory, num_tokens: int, most_s: float = inf) -> None:
        self._pace(sum(chunk.samples for chunk in plan.chunks)).begin_paying()
        super().extend(plan, tables, num_tokens, most_s)

    def _may_pay(self, num_sampling: int) -> bool:  # noqa: ARG002
        return True

    def _best_length(self, *_: object) -> int:
        return self._random.randint(0, self.most)

    def _counts(self, guesses: list[Guess], num_sampling: int, room: int) -> tuple[list[int], float]:
        counts = []
        for guess in guesses:
            counts.append(min(room, self._random.randint(len(guess.drafts) // 2, len(guess.drafts))))
            room -= counts[-1]
        return counts, num_sampling


def drafting_always(
    proposer: Proposer | None, most: int, *, has_model: bool = False, forced: Proposer | None = None
) -> Drafting:
    """Drafts in every step, whether they pay or not."""
    drafting = Drafting(proposer, most, has_model=has_model, forced=forced)
    for number in range(8):
        drafting._paces[number] = pace = Pace()
        pace._try()
        pace._left = 1 << 30
    return drafting


class FakeSink(TokenSink):
    """Text is the token's number; a sequence ends by its length."""

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:  # noqa: ARG002
        return f"{token_id} ", FinishReason.LENGTH if is_last else None


def make_request(
    name: str,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    n: int = 1,
    lane: int = 1,
    salt: bytes = b"",
    seed: int = 0,
    arrival_s: float = 0.0,
    keeping: Keeping | None = None,
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed),
        n=n,
        lane=lane,
        salt=salt,
        arrival_s=arrival_s,
        keeping=keeping,
    )
