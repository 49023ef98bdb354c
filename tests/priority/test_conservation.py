"""The queue with the engine under a random machine: nobody is lost, and every charge is exact.

Requests are put, taken, computed in chunks, found in the prefix cache, preempted, cancelled, failed and expired in any
order; at the end all counters are back at nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.engine.planning.prefix_index import with_hashes
from penstock.engine.planning.request import FinishReason, Request
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.shares import COST_HIT, cost_of, output_cost, prompt_cost
from penstock.priority.steptime import StepTimeModel
from tests.few import examples
from tests.priority.simulated_engine import (
    SimulatedEngine,
    accounts,
    ask,
    check_books,
    known_model,
    lines,
    make_queue,
    refusal_of,
)

POLICY = LanePolicy(
    max_requests=6, max_tokens=120, max_bytes=36 * 200, ttl_s=0.6, ttft_s=0.5, tenant_share=0.6
)
POLICIES = {
    Lane.INTERACTIVE: replace(POLICY, weight=4, tpot_s=0.05),
    Lane.STANDARD: replace(POLICY, weight=2, ageing_s=0.2, kv_share=0.9),
    Lane.BATCH: replace(POLICY, weight=1, ageing_s=0.3, kv_share=0.7, ttft_s=float("inf")),
}


class Meter:
    """The reports of one request, and what that should cost."""

    def __init__(self, request: Request) -> None:
        self.num_prompt = len(request.prompt_token_ids)
        self.num_computed = 0
        """Prompt tokens, until the first output token."""
        self.num_output = 0
        self.output = 0
        """The cost of its output tokens."""

    def note(self, num_prompt: int, num_output: int, num_known: int) -> None:
        if not self.num_output:
            self.num_computed += num_prompt
        self.num_output += num_output
        self.output += output_cost(num_known - num_output, num_known)

    @property
    def cost(self) -> int:
        """The expected cost: tokens computed, each once; tokens found; tokens brought."""
        num_computed = min(self.num_prompt, self.num_computed)
        num_hit = self.num_prompt - num_computed if self.num_output else 0
        return COST_HIT * num_hit + prompt_cost(num_hit, num_hit + num_computed) + self.output


class Conservation(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(12, 40),
        budget=st.integers(4, 40),
        seats=st.integers(1, 5),
        prefix_cache=st.booleans(),
        promises=st.booleans(),
        known=st.booleans(),
    )
    def build(
        self, num_blocks: int, budget: int, seats: int, prefix_cache: bool, promises: bool, known: bool
    ) -> None:
        model = known_model() if known else StepTimeModel()
        self.queue = make_queue(POLICIES, weights={"a": 3}, promises=promises, model=model)
        self.engine = SimulatedEngine(
            self.queue,
            num_blocks=num_blocks,
            budget=budget,
            max_num_seqs=seats,
            prefix_cache=prefix_cache,
            kv_shares=tuple(POLICIES[lane].kv_share for lane in Lane),
        )
        self.meters: dict[str, Meter] = {}
        self.ends: Counter[str] = Counter()
        """Counts the requests that left without the engine: cancelled in the queue, or expired."""
        self.number = 0
        charge = self.queue.charge

        def metered(work: list[tuple[Request, int, int, int]], now: float) -> None:
            for request, num_prompt, num_output, num_known in work:
                self.meters[request.request_id].note(num_prompt, num_output, num_known)
            charge(work, now)

        self.queue.charge = metered  # type: ignore[method-assign]

    @rule(
        size=st.integers(1, 40),
        first=st.sampled_from([0, 0, 0, 7]),
        max_tokens=st.integers(1, 10),
        n=st.sampled_from([1, 1, 1, 2]),
        lane=st.sampled_from(Lane),
        tenant=st.sampled_from("abc"),
        late_s=st.sampled_from([0.0, 0.0, 0.3]),
    )
    def put(
        self, size: int, first: int, max_tokens: int, n: int, lane: Lane, tenant: str, late_s: float
    ) -> None:
        engine, name = self.engine, str(self.number)
        self.number += 1
        request = ask(
            name,
            min(size, engine.tables.max_tokens - 12),
            lane=lane,
            tenant=tenant,
            max_tokens=max_tokens,
            n=n,
            first=first,
            at_s=engine.now - late_s,
        )
        cached = engine.tables.find_cached(with_hashes(request, 4).block_hashes)[0]
        depth = self.queue.depths()[lane]
        refusal = refusal_of(partial(engine.put, request, cached))
        if refusal is not None:
            assert 1.0 <= refusal.retry_after_s <= 60.0
            assert self.queue.depths()[lane] == depth
            assert self.queue.position(name) is None
        else:
            self.meters[name] = Meter(request)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if not self.engine.is_done:
                assert self.engine.step().chunks

    @rule(seconds=st.floats(0.0, 0.5))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds

    @rule()
    def expire(self) -> None:
        """Invariant 16, in the machine."""
        for request in self.queue.expire(self.engine.now):
            assert self.engine.now - request.arrival_s > POLICIES[Lane(request.lane)].ttl_s
            self.ends[request.request_id] += 1
            for index in range(request.n):
                self.engine.ended[request.request_id, index] = FinishReason.CANCELLED

    @precondition(lambda self: self.meters)
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        """Invariant 15: what was cancelled is in no later step, wherever it was."""
        name = list(self.meters)[pick % len(self.meters)]
        if self.ends[name]:
            return
        waited = self.queue.position(name) is not None
        self.engine.cancel(name)
        self.ends[name] += waited
        assert self.queue.position(name) is None
        assert name not in {s.request.request_id for s in self.engine.scheduler.sequences._all()}

    @precondition(lambda self: hasattr(self, "engine") and self.engine.scheduler.sequences.running)
    @rule(pick=st.integers(0, 5))
    def preempt(self, pick: int) -> None:
        running = self.engine.scheduler.sequences.running
        self.engine.scheduler.sequences.preempt(running[pick % len(running)])

    @precondition(lambda self: hasattr(self, "engine") and self.engine.scheduler.sequences.running)
    @rule()
    def break_a_step(self) -> None:
        scheduler = self.engine.scheduler
        plan = scheduler.plan(self.engine.now)
        self.engine.receive(scheduler.fail_step(plan, "broken", self.engine.now))

    @invariant()
    def the_books_balance(self) -> None:
        """Invariants 1, 2 and 13 at every instant."""
        if not hasattr(self, "engine"):
            return
        check_books(self.queue)
        self.engine.scheduler.sequences.check()
        held = {s.request.request_id for s in self.engine.scheduler.sequences._all()}
        waiting = {name for name in self.meters if self.queue.position(name) is not None}
        ended = {name for name in self.meters if self.is_ended(name)}
        assert held | waiting | ended == set(self.meters), "somebody is lost"
        assert len(held) + len(waiting) + len(ended) == len(self.meters), "somebody is in two places"
        assert sum(self.queue.depths().values()) == len(waiting)
        for line in lines(self.queue):
            policy = line.policy
            assert line.num_requests <= policy.max_requests
            assert line.num_running == sum(1 for name in held if self.lane_of(name) is line.lane)
            if line.num_requests > 1:
                assert line.num_tokens <= policy.max_tokens
                assert line.num_bytes <= policy.max_bytes

    def lane_of(self, name: str) -> Lane:
        return Lane(self.engine.requests[name].lane)

    def is_ended(self, name: str) -> bool:
        return all((name, index) in self.engine.ended for index in range(self.engine.requests[name].n))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.finish()
        self.the_books_balance()
        assert all(self.is_ended(name) for name in self.meters)
        assert all(count <= 1 for count in self.ends.values())
        for line in lines(self.queue):
            assert (line.num_requests, line.num_tokens, line.num_bytes) == (0, 0, 0)
            assert (line.num_running, line.num_prefill_left, line.active) == (0, 0, {})
        assert all(account.num_open == 0 for account in accounts(self.queue))
        assert not self.queue._tickets
        self.check_charges()
        self.engine.check_tokens()

    def check_charges(self) -> None:
        """Invariant 13: by tenant and by lane, to the last unit."""
        by_tenant: Counter[str] = Counter()
        by_lane: Counter[Lane] = Counter()
        for name, meter in self.meters.items():
            by_tenant[self.engine.requests[name].tenant] += meter.cost
            by_lane[self.lane_of(name)] += meter.cost
        assert {t: c for t, c in self.queue.tenants().items() if c} == {
            t: c for t, c in by_tenant.items() if c
        }
        assert {line.lane: line.share.charged for line in lines(self.queue)} == {
            lane: by_lane[lane] for lane in Lane
        }


Conservation.TestCase.settings = settings(max_examples=examples(70), stateful_step_count=30, deadline=None)
TestConservation = Conservation.TestCase


def test_what_is_charged_is_what_was_done() -> None:
    """Invariant 13, by hand: computed, found, brought."""
    engine = SimulatedEngine(make_queue(), budget=16)
    engine.put(ask("first", 40, max_tokens=5))
    engine.finish()
    assert engine.queue.tenants() == {"a": cost_of(40, 0, 5)}
    engine.put(ask("again", 40, tenant="b", max_tokens=3))
    engine.finish()
    assert engine.queue.tenants()["b"] == cost_of(40, 36, 3)


def test_a_prompt_that_was_cancelled_costs_what_was_computed() -> None:
    """Invariant 13: the rest is given back."""
    engine = SimulatedEngine(make_queue(), budget=16)
    engine.put(ask("r", 40))
    engine.step()
    assert engine.queue.tenants() == {"a": cost_of(40, 0, 0)}, "charged when it is taken"
    engine.cancel("r")
    assert engine.queue.tenants() == {"a": cost_of(16, 0, 0)}


def test_what_is_computed_again_after_a_preemption_costs_nothing() -> None:
    """Invariant 13: whoever gives way does not pay for it."""
    engine = SimulatedEngine(make_queue(), budget=16, prefix_cache=False)
    engine.put(ask("r", 40, max_tokens=6))
    for _ in range(5):
        engine.step()
        if len(engine.tokens.get(("r", 0), [])) == 2:
            break
    engine.scheduler.sequences.preempt(engine.scheduler.sequences.running[0])
    engine.finish()
    assert engine.runner.num_tokens > 60
    assert engine.queue.tenants() == {"a": cost_of(40, 0, 6)}


def test_choices_share_one_prompt_and_one_place() -> None:
    """Invariant 1: a request with three choices is one until its last choice has ended."""
    engine = SimulatedEngine(make_queue())
    engine.put(ask("r", 20, n=3, max_tokens=4))
    engine.step()
    assert lines(engine.queue)[0].num_running == 1
    engine.finish()
    assert lines(engine.queue)[0].num_running == 0
    assert engine.queue.tenants() == {"a": cost_of(20, 0, 4, n=3)}


def test_who_is_cancelled_during_a_step_is_in_no_later_one() -> None:
    """Invariant 15: the step that was planned already is the last, and what it brings is for nobody."""
    engine = SimulatedEngine(make_queue(), budget=16)
    for name in ("stays", "goes"):
        engine.put(ask(name, 30, max_tokens=8))
    for _ in range(6):
        engine.step()
    plan = engine.scheduler.plan(engine.now)
    assert {chunk.sequence.request.request_id for chunk in plan.chunks} == {"stays", "goes"}
    result = engine.runner.execute(plan)
    engine.cancel("goes")
    brought = len(engine.tokens["goes", 0])
    engine.receive(engine.scheduler.commit(plan, result, engine.now))
    while not engine.is_done:
        names = {chunk.sequence.request.request_id for chunk in engine.step().chunks}
        assert names == {"stays"}
    assert len(engine.tokens["goes", 0]) == brought
    engine.check_tokens()
    check_books(engine.queue)
