"""Giving way: who, for whom, how often; and that it costs time but never a token."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.request import FinishReason, Sequence
from penstock.priority.lanes import Lane
from penstock.priority.yielding import MAX_PREEMPTIONS, MAX_VICTIMS
from tests.few import examples
from tests.priority.simulated_engine import SimulatedEngine, ask, make_queue


def make_sequence(name: str, lane: Lane, order: int, computed: int = 8, preemptions: int = 0) -> Sequence:
    made = Sequence(ask(name, 100, lane=lane), order=order)
    made.num_computed, made.num_preemptions, made.block_table = computed, preemptions, [1]
    return made


crowds = st.lists(
    st.tuples(st.sampled_from(Lane), st.integers(0, 90), st.integers(0, MAX_PREEMPTIONS + 1)), max_size=8
).map(lambda crowd: [make_sequence(str(i), *entry[:1], i, *entry[1:]) for i, entry in enumerate(crowd)])


@given(running=crowds, lane=st.sampled_from(Lane))
def test_only_strictly_lower_lanes_give_way(running: list[Sequence], lane: Lane) -> None:
    """Invariant 11: and none that was asked too often, and not many at once."""
    victims = make_queue().giving_way(ask("new", 10, lane=lane), running)
    assert len(victims) <= MAX_VICTIMS
    assert all(v.request.lane > lane and v.num_preemptions < MAX_PREEMPTIONS for v in victims)
    eligible = [s for s in running if s.request.lane > lane and s.num_preemptions < MAX_PREEMPTIONS]
    assert len(victims) == min(MAX_VICTIMS, len(eligible))


@given(running=crowds, lane=st.sampled_from(Lane))
def test_the_lowest_lane_gives_way_first_and_then_the_cheapest(running: list[Sequence], lane: Lane) -> None:
    victims = make_queue().giving_way(ask("new", 10, lane=lane), running)
    ranks = [(-v.request.lane, v.num_computed, -v.order) for v in victims]
    assert all(a < b for a, b in pairwise(ranks))
    others = [s for s in running if s not in victims and s.num_preemptions < MAX_PREEMPTIONS]
    for other in others:
        if other.request.lane > lane and victims:
            assert (-other.request.lane, other.num_computed, -other.order) > ranks[-1]


@given(running=crowds.filter(bool), pick=st.integers(0, 7))
def test_who_needs_a_block_never_takes_it_from_the_more_urgent(running: list[Sequence], pick: int) -> None:
    """Invariant 11: from a lower lane, else from the newest of its own, which may be itself."""
    beneficiary = running[pick % len(running)]
    victim = make_queue().victim(running, beneficiary)
    assert victim is not None
    assert victim.request.lane >= beneficiary.request.lane
    lower = [s for s in running if s.request.lane > beneficiary.request.lane]
    willing = [s for s in lower if s.num_preemptions < MAX_PREEMPTIONS]
    if willing:
        assert victim in willing
    elif not lower:
        assert victim.order == max(s.order for s in running if s.request.lane == beneficiary.request.lane)


def full_of_batch(num_preemptible: int = 2, seats: int = 2) -> SimulatedEngine:
    engine = SimulatedEngine(make_queue(), max_num_seqs=seats, budget=64, num_blocks=60)
    for i in range(num_preemptible):
        engine.put(ask(f"batch-{i}", 20, lane=Lane.BATCH, max_tokens=30, first=i))
    for _ in range(4):
        engine.step()
    assert len(engine.scheduler.sequences.running) == min(seats, num_preemptible)
    return engine


def test_an_urgent_request_gets_the_seat_of_a_patient_one_at_once() -> None:
    engine = full_of_batch()
    engine.put(ask("urgent", 10, max_tokens=3))
    plan = engine.step()
    assert "urgent" in {chunk.sequence.request.request_id for chunk in plan.chunks}
    assert engine.scheduler.sequences.counters.num_preemptions == 1
    engine.finish()
    engine.check_tokens()
    assert set(engine.ended.values()) == {FinishReason.LENGTH}


@given(lane=st.sampled_from(Lane), blocks=st.integers(14, 30), seats=st.integers(1, 3))
@settings(max_examples=examples(30))
def test_equal_lanes_never_preempt_each_other_for_a_newcomer(lane: Lane, blocks: int, seats: int) -> None:
    """Invariant 11: with one lane alone, whoever runs may run to the end, whatever waits."""
    engine = SimulatedEngine(make_queue(), num_blocks=blocks, max_num_seqs=seats, prefix_cache=False)
    for i in range(8):
        engine.put(ask(str(i), 16, lane=lane, tenant="ab"[i % 2], max_tokens=1))
    engine.finish()
    assert engine.scheduler.sequences.counters.num_preemptions == 0


@given(gap=st.integers(1, 6), seats=st.integers(1, 3), size=st.integers(1, 30))
@settings(max_examples=examples(30))
def test_nobody_is_asked_more_than_so_often_and_all_finish(gap: int, seats: int, size: int) -> None:
    """Invariant 11: urgent requests keep coming for the seats of the patient; that ends, and nothing loops."""
    engine = full_of_batch(seats, seats)
    num_steps = 0
    while not all((f"batch-{i}", 0) in engine.ended for i in range(seats)):
        assert num_steps < 1_500, "batch starves"
        if num_steps % gap == 0 and num_steps < 600:
            engine.put(ask(f"urgent-{num_steps}", size, max_tokens=2, at_s=engine.now))
        engine.step()
        num_steps += 1
    engine.finish()
    engine.check_tokens()
    batch = [engine.num_preemptions[f"batch-{i}"] for i in range(seats)]
    assert max(batch) <= MAX_PREEMPTIONS
    assert max(batch) > 0, "else it shows nothing"
    assert max(n for name, n in engine.num_preemptions.items() if name.startswith("urgent")) == 0


def test_who_gave_way_goes_before_those_that_came_later() -> None:
    """Invariant 11: a victim keeps its place."""
    engine = full_of_batch(1, 1)
    for i in range(3):
        engine.put(ask(f"later-{i}", 12, lane=Lane.BATCH, tenant="other", max_tokens=2, first=20 + i))
    engine.put(ask("urgent", 10, max_tokens=3))
    engine.finish()
    assert engine.num_preemptions["batch-0"] == 1
    assert engine.starts[:3] == ["batch-0", "urgent", "batch-0"]
    assert sorted(engine.starts[3:]) == ["later-0", "later-1", "later-2"]
    engine.check_tokens()


def test_of_two_that_gave_way_the_one_that_came_first_goes_on_first() -> None:
    """Invariant 11: the cheaper one was asked first, but that is not its place in the line."""
    engine = full_of_batch(2, 2)
    engine.put(ask("short", 10, max_tokens=3))
    engine.put(ask("long", 10, max_tokens=12))
    engine.finish()
    assert [engine.num_preemptions[f"batch-{i}"] for i in range(2)] == [1, 1]
    assert engine.starts[2:] == ["short", "long", "batch-0", "batch-1"]


@given(
    jobs=st.lists(
        st.tuples(
            st.sampled_from(Lane),
            st.integers(1, 30),
            st.integers(1, 16),
            st.integers(0, 5),
            st.integers(1, 2),
        ),
        min_size=2,
        max_size=10,
    ),
    blocks=st.integers(13, 30),
    seats=st.integers(1, 4),
    prefix_cache=st.booleans(),
)
@settings(max_examples=examples(50))
def test_whoever_gave_way_still_gets_the_tokens_of_an_undisturbed_run(
    jobs: list[tuple[Lane, int, int, int, int]], blocks: int, seats: int, prefix_cache: bool
) -> None:
    """Invariant 11: every output is that of a request alone on the machine, though memory is far too small for all."""
    engine = SimulatedEngine(
        make_queue(),
        num_blocks=blocks,
        max_num_seqs=seats,
        budget=24,
        prefix_cache=prefix_cache,
        kv_shares=(1.0, 0.9, 0.7),
    )
    for number, (lane, size, output, pause, n) in enumerate(jobs):
        engine.put(ask(str(number), size, lane=lane, max_tokens=output, n=n, at_s=engine.now))
        for _ in range(pause):
            engine.step()
    engine.finish()
    engine.check_tokens()
    assert set(engine.ended.values()) == {FinishReason.LENGTH}


# Memory by lane


@given(
    shares=st.tuples(st.floats(0.3, 1.0), st.floats(0.3, 1.0), st.floats(0.3, 1.0)),
    jobs=st.lists(
        st.tuples(st.sampled_from(Lane), st.integers(1, 60), st.integers(1, 6)), min_size=2, max_size=14
    ),
)
@settings(max_examples=examples(50))
def test_a_lane_starts_requests_only_within_its_part_of_the_memory(
    shares: tuple[float, float, float], jobs: list[tuple[Lane, int, int]]
) -> None:
    """Invariant 12: at every start beside others, what is in use afterwards is within the lane's share."""
    engine = SimulatedEngine(
        make_queue(), num_blocks=41, max_num_seqs=6, budget=200, prefix_cache=False, kv_shares=shares
    )
    tables = engine.tables
    start = tables.start

    def checked(sequence: Sequence) -> None:
        beside_others = bool(engine.scheduler.sequences.running)
        start(sequence)
        if beside_others:
            in_use = tables.pool.num_blocks - 1 - tables.pool.num_free
            assert in_use <= shares[sequence.request.lane] * (tables.pool.num_blocks - 1) + 1

    tables.start = checked  # type: ignore[method-assign]
    for number, (lane, size, output) in enumerate(jobs):
        engine.put(ask(str(number), size, lane=lane, max_tokens=output, tenant="ab"[number % 2]))
        if number % 3 == 0:
            engine.step()
    engine.finish()
    assert tables.pool.num_free == tables.pool.num_blocks - 1
    assert len(engine.ended) == len(jobs), "a share of the memory is no reason never to start"


def test_what_is_held_back_is_there_for_the_urgent() -> None:
    """Invariant 12: batch stops at its share, and an interactive request starts at once, with nobody giving way."""
    engine = SimulatedEngine(
        make_queue(),
        num_blocks=41,
        max_num_seqs=20,
        budget=400,
        prefix_cache=False,
        kv_shares=(1.0, 0.9, 0.5),
    )
    for i in range(10):
        engine.put(ask(f"batch-{i}", 16, lane=Lane.BATCH, max_tokens=4))
    engine.step()
    assert len(engine.scheduler.sequences.running) == 5
    engine.put(ask("urgent", 40, max_tokens=2))
    plan = engine.step()
    assert "urgent" in {chunk.sequence.request.request_id for chunk in plan.chunks}
    assert engine.scheduler.sequences.counters.num_preemptions == 0
