"""The prefix cache: what a prompt finds in it, what is evicted first, and how requests that wait for a prefix go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.prefix_index import extend_hashes, with_hashes
from penstock.engine.planning.request import FinishReason, Request, Sequence
from tests.engine.fake_runner import expected_output, make_request
from tests.engine.workloads import BLOCK_SIZE, Run, Workload, workloads
from tests.few import examples

modest = settings(max_examples=examples(40), deadline=None)
few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=18)
SALTS = [b"", b"alice", b"bob"]


def chain(token_ids: list[int], salt: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, len(token_ids) // BLOCK_SIZE, BLOCK_SIZE, salt)
    return hashes


def one_by_one(requests: list[Request], num_blocks: int = 400) -> Run:
    """Each request arrives when those before it are done."""
    workload = Workload(
        requests=tuple(requests),
        arrivals=tuple(12 * i for i in range(len(requests))),
        num_blocks=num_blocks,
        budget=64,
        max_num_seqs=4,
        max_model_len=200,
        prefix_cache=True,
    )
    return Run(workload)


def num_cached(run: Run, name: str) -> int:
    timings = run.ended[name, 0].timings
    assert timings is not None
    return timings.num_cached_tokens


@modest
@given(few_tokens, st.binary(max_size=8), st.binary(max_size=8))
def test_chains_of_two_salts_have_no_hash_in_common(tokens: list[int], one: bytes, other: bytes) -> None:
    tokens = tokens * 4
    assert bool(set(chain(tokens, one)) & set(chain(tokens, other))) == (one == other)


@modest
@given(st.integers(1, 8), st.integers(0, 3))
def test_the_same_tokens_at_another_depth_are_another_block(depth: int, token: int) -> None:
    assert len(set(chain([token] * BLOCK_SIZE * depth))) == depth


@modest
@given(few_tokens, few_tokens, st.integers(0, 3))
def test_a_changed_token_changes_every_hash_from_its_block_on(
    before: list[int], after: list[int], new: int
) -> None:
    one, other = [*before, 7, *after], [*before, 8 + new, *after]
    changed = len(before) // BLOCK_SIZE
    left, right = chain(one), chain(other)
    assert left[:changed] == right[:changed]
    assert not set(left[changed:]) & set(right[changed:])


@modest
@given(st.lists(st.tuples(few_tokens, st.sampled_from(SALTS)), min_size=2, max_size=6))
def test_a_prompt_finds_the_longest_run_of_full_blocks_that_its_salt_has_computed(
    prompts: list[tuple[list[int], bytes]],
) -> None:
    requests = [make_request(f"r{i}", p, max_tokens=1, salt=salt) for i, (p, salt) in enumerate(prompts)]
    run = one_by_one(requests).finish()
    for i, (prompt, salt) in enumerate(prompts):
        common = 0
        for earlier in (p for p, other in prompts[:i] if other == salt):
            for end in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE):
                if earlier[:end] == prompt[:end]:
                    common = max(common, end)
        assert num_cached(run, f"r{i}") == common


@modest
@given(workloads(prefix_cache=True))
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(workload: Workload) -> None:
    run = Run(workload).finish()
    for last in run.ended.values():
        timings = last.timings
        assert timings is not None
        assert timings.num_cached_tokens % BLOCK_SIZE == 0
        assert timings.num_cached_tokens <= timings.num_prompt_tokens - 1
    hits = run.scheduler.sequences.counters.num_prefix_hit_tokens
    first_choices = [o.timings for o in run.ended.values() if o.index == 0 and o.timings]
    assert hits == sum(timings.num_cached_tokens for timings in first_choices)
    queries = run.scheduler.sequences.counters.num_prefix_query_tokens
    assert queries == sum(len(request.prompt_token_ids) for request in workload.requests)


@modest
@given(workloads(prefix_cache=True))
def test_a_prefix_cache_changes_no_token(workload: Workload) -> None:
    assert Run(workload).finish().tokens == Run(replace(workload, prefix_cache=False)).finish().tokens


@modest
@given(workloads(prefix_cache=True))
def test_requests_of_other_salts_change_no_hit(workload: Workload) -> None:
    """One after another, with room for all, a salt's hits are those it would have alone."""
    requests = list(workload.requests)
    together = one_by_one(requests).finish()
    for salt in {request.salt for request in requests}:
        own = [request for request in requests if request.salt == salt]
        alone = one_by_one(own).finish()
        for request in own:
            assert num_cached(alone, request.request_id) == num_cached(together, request.request_id)


class Library:
    """Prompts of whole blocks, computed and released by hand in a pool that they fill."""

    def __init__(self, lengths: list[int]) -> None:
        self.tables = SequenceMemory(1 + sum(lengths), BLOCK_SIZE)
        self.prompts = [[100 * i + k for k in range(n * BLOCK_SIZE)] for i, n in enumerate(lengths)]

    def compute(self, i: int) -> Sequence:
        sequence = Sequence(make_request(f"p{i}", self.prompts[i]))
        self.tables.start(sequence)
        sequence.num_computed = len(self.prompts[i])
        self.tables.commit(sequence, sequence.num_computed)
        return sequence

    def num_found(self, i: int) -> int:
        """Blocks of a prompt that a longer one would find."""
        longer = Sequence(make_request("x", [*self.prompts[i], 1]))
        return len(self.tables.find_prefix(longer).entries)


@modest
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_what_was_used_longest_ago_goes_first_and_of_that_its_end(
    lengths: list[int], data: st.DataObject
) -> None:
    library = Library(lengths)
    sequences = [library.compute(i) for i in range(len(lengths))]
    order = data.draw(st.permutations(range(len(lengths))))
    for i in order:
        library.tables.release(sequences[i])
    left = list(lengths)
    for number in range(data.draw(st.integers(0, sum(lengths)))):
        fresh = Sequence(make_request(f"f{number}", [9_000 + number]))
        library.tables.start(fresh)
        oldest = next(i for i in order if left[i])
        left[oldest] -= 1
        assert [library.num_found(i) for i in range(len(lengths))] == left


def test_a_hit_makes_what_was_hit_the_last_to_go() -> None:
    library = Library([2, 2, 1])
    for sequence in [library.compute(i) for i in (0, 1)]:
        library.tables.release(sequence)
    again = Sequence(make_request("again", [*library.prompts[0], 1]))
    library.tables.start(again)
    library.tables.release(again)
    for number in range(3):
        library.tables.start(Sequence(make_request(f"f{number}", [9_000 + number])))
    assert [library.num_found(i) for i in (0, 1)] == [2, 0]


@modest
@given(st.lists(st.integers(1, 3), min_size=2, max_size=4))
def test_what_somebody_holds_is_not_given_up(lengths: list[int]) -> None:
    library = Library(lengths)
    held = library.compute(0)
    for i in range(1, len(lengths)):
        library.tables.release(library.compute(i))
    while library.tables.pool.num_free:
        library.tables.start(Sequence(make_request("f", [9_000 + library.tables.pool.num_free])))
    assert [library.num_found(i) for i in range(len(lengths))] == [lengths[0]] + [0] * (len(lengths) - 1)
    again = Sequence(make_request("x", [*library.prompts[0], 1]))
    assert held.block_table == library.tables.find_prefix(again).entries


tries = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=4), st.sampled_from(SALTS[:2])), min_size=1, max_size=7
)


@modest
@given(tries, st.integers(1, 20), st.integers(1, 7))
def test_a_prefix_that_several_want_at_once_is_computed_once(
    paths: list[tuple[list[int], bytes]], budget: int, seats: int
) -> None:
    """Prompts are paths in a tree of blocks and one token more, so that every block can be shared."""
    requests = [
        make_request(
            f"r{i}", [t for step in path for t in [step] * BLOCK_SIZE] + [50 + i], max_tokens=1, salt=salt
        )
        for i, (path, salt) in enumerate(paths)
    ]
    workload = Workload(
        requests=tuple(requests),
        arrivals=(0,) * len(requests),
        num_blocks=200,
        budget=budget,
        max_num_seqs=seats,
        max_model_len=100,
        prefix_cache=True,
    )
    run = Run(workload).finish()
    blocks = {(salt, tuple(path[:depth])) for path, salt in paths for depth in range(1, len(path) + 1)}
    assert run.runner.num_tokens == BLOCK_SIZE * len(blocks) + len(requests)


disturbances = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(["cancel", "preempt"]), st.integers(0, 6)), max_size=8
)


@modest
@given(st.integers(2, 7), st.integers(4, 20), st.integers(8, 16), st.integers(1, 9), disturbances)
def test_who_waits_for_a_prefix_goes_on_whatever_becomes_of_its_owner(
    count: int, length: int, num_blocks: int, budget: int, actions: list[tuple[int, str, int]]
) -> None:
    """`finish` fails on a step that is empty while somebody waits."""
    shared = list(range(length))
    requests = [make_request(f"r{i}", [*shared, 30 + i], max_tokens=3, n=1 + i % 2) for i in range(count)]
    workload = Workload(
        requests=tuple(requests),
        arrivals=(0,) * count,
        num_blocks=num_blocks,
        budget=budget,
        max_num_seqs=3,
        max_model_len=40,
        prefix_cache=True,
    )

    def disturb(run: Run) -> None:
        for at, action, pick in actions:
            if at == len(run.steps):
                if action == "cancel":
                    run.cancel(requests[pick % count])
                else:
                    run.preempt(pick)

    run = Run(workload).finish(disturb)
    assert run.tables.index.num_pending == 0
    for (name, index), tokens in run.tokens.items():
        expected = expected_output(requests[int(name[1:])], index, workload.max_len)
        assert tokens == expected[: len(tokens)]


def test_who_waits_for_a_long_prefix_does_not_hold_up_who_waits_for_a_short_one() -> None:
    """The third step has room beside the end of the long prompt: its waiter is passed over for the other one."""
    long, short = list(range(20)), [30 + i for i in range(8)]
    prompts = {"short": [*short, 50], "long": [*long, 51], "waits long": [*long, 52], "waits": [*short, 53]}
    requests = tuple(make_request(name, prompt, max_tokens=1) for name, prompt in prompts.items())
    workload = Workload(
        requests=requests,
        arrivals=(0, 0, 0, 0),
        num_blocks=100,
        budget=14,
        max_num_seqs=8,
        max_model_len=100,
        prefix_cache=True,
    )
    steps = Run(workload).finish().steps
    planned = [[(piece.key[0], piece.start, piece.end) for piece in step.pieces] for step in steps]
    assert planned == [
        [("short", 0, 9), ("long", 0, 5)],
        [("long", 5, 19)],
        [("long", 19, 21), ("waits", 8, 9)],
        [("waits long", 20, 21)],
    ]


def test_a_prompt_that_was_hashed_before_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(4 * BLOCK_SIZE + 1))
    hashed = with_hashes(make_request("r", prompt), BLOCK_SIZE)
    monkeypatch.setattr(
        "penstock.engine.planning.prefix_index.blake2b", None
    )  # hashing a block fails from now on
    tables, sequence = SequenceMemory(20, BLOCK_SIZE), Sequence(hashed)
    assert tables.find_cached(hashed.block_hashes) == (0, 0)
    tables.start(sequence)
    tables.commit(sequence, len(prompt))
    assert tables.find_cached(hashed.block_hashes) == (4 * BLOCK_SIZE, 4 * BLOCK_SIZE)
    tables.release(sequence)
    assert tables.find_cached(hashed.block_hashes) == (4 * BLOCK_SIZE, 0)


@pytest.mark.parametrize("num_tokens", [16, 100])
def test_nobody_finds_blocks_of_a_sequence_whose_output_was_not_finite(num_tokens: int) -> None:
    """A prompt of 100 is computed in two steps, and only the last says so."""
    prompt = list(range(num_tokens))
    run = one_by_one([make_request(name, prompt, max_tokens=1) for name in ("good", "bad", "again", "last")])
    run.runner.bad.add(("bad", 0))
    run.finish()
    assert run.ended["bad", 0].finish_reason is FinishReason.FAILED
    assert num_cached(run, "bad") > 0  # what "good" left was as suspect as its own
    assert num_cached(run, "again") == 0
    assert num_cached(run, "last") == num_cached(run, "bad")
