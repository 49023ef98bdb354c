"""Permissive policies, requests, and a simulated engine with a clock of its own, for tests of the lanes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from math import inf

from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Output, Request, Sequence
from penstock.engine.planning.request_queue import StepLoad
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits
from penstock.engine.planning.step import StepPlan
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.queue import LaneQueue
from penstock.priority.shares import cost_of
from penstock.priority.steptime import StepTimeModel
from penstock.priority.verdict import Refusal
from penstock.priority.waiting import Account, LaneLine, Stage
from tests.engine.fake_runner import FakeRunner, FakeSink, expected_output

COEFFICIENTS = {"alpha_s": 7e-3, "beta_s": 28e-6, "gamma_s": 20e-6, "delta_s": 40e-9, "epsilon_s": 1e-9}
"""The coefficients of a machine that prefills some 30,000 tokens a second."""
ROOMY = LanePolicy(max_requests=10**6, max_tokens=10**9, max_bytes=10**12, ttl_s=10**6, tenant_share=1.0)
"""Bounds that nobody reaches, and no promise."""
_COUNTING = tuple(range(40)) * 200


def permissive(
    weights: tuple[int, int, int] = (16, 4, 1),
    ttft_s: tuple[float, float, float] = (inf, inf, inf),
    ageing_s: tuple[float, float, float] = (inf, inf, inf),
) -> dict[Lane, LanePolicy]:
    """Lanes that differ in what is asked for alone."""
    return {
        lane: replace(ROOMY, weight=weights[lane], ttft_s=ttft_s[lane], ageing_s=ageing_s[lane])
        for lane in Lane
    }


def make_queue(
    policies: dict[Lane, LanePolicy] | None = None,
    *,
    weights: dict[str, int] | None = None,
    promises: bool = False,
    model: StepTimeModel | None = None,
) -> LaneQueue:
    return LaneQueue(nullcontext(), policies or permissive(), weights=weights, promises=promises, model=model)


def known_model(factor: float = 1.0) -> StepTimeModel:
    return StepTimeModel({name: factor * value for name, value in COEFFICIENTS.items()}, learns=False)


def ask(
    name: str,
    num_prompt: int = 8,
    *,
    lane: Lane = Lane.INTERACTIVE,
    tenant: str = "a",
    at_s: float = 0.0,
    max_tokens: int = 4,
    n: int = 1,
    first: int = 0,
) -> Request:
    """A request whose prompt counts up from `first`: equal `first`, equal prefix."""
    return Request(
        request_id=name,
        prompt_token_ids=_COUNTING[first % 40 : first % 40 + num_prompt],
        sampling=SamplingParams(max_tokens=max_tokens),
        n=n,
        lane=lane,
        tenant=tenant,
        arrival_s=at_s,
    )


def serve(queue: LaneQueue, request: Request, num_output: int = 1, now: float = 0.0, num_hit: int = 0) -> int:
    """All that the engine reports of a request that ran alone; what that costs."""
    num_prompt = len(request.prompt_token_ids)
    queue.charge([(request, num_prompt - num_hit, 1, num_prompt + 1)], now)
    if num_output > 1:
        queue.charge([(request, 0, num_output - 1, num_prompt + num_output)], now)
    settle(queue, request, now)
    return cost_of(num_prompt, num_hit, num_output)


def settle(queue: LaneQueue, request: Request, now: float = 0.0) -> None:
    """Reports the end of one choice."""
    queue.settle(request, now, Sequence(request))


def take(queue: LaneQueue) -> Request | None:
    """The next one, whatever it needs."""
    return queue.take(lambda _: True)


def take_all(queue: LaneQueue) -> list[str]:
    taken = []
    while (request := take(queue)) is not None:
        taken.append(request.request_id)
    return taken


def refusal_of(put: Callable[[], object]) -> Refusal | None:
    """Why it was not let in, if it was not."""
    try:
        put()
    except Refusal as refusal:
        return refusal
    return None


def lines(queue: LaneQueue) -> list[LaneLine]:
    return list(queue._lanes.values())


def accounts(queue: LaneQueue) -> list[Account]:
    return [account for line in lines(queue) for account in line.accounts.values()]


def check_books(queue: LaneQueue) -> None:
    """Every sum that the queue keeps is the sum of its parts, and no part is negative."""
    tickets = list(queue._tickets.values())
    for line in lines(queue):
        own = [t for t in tickets if t.account.lane is line]
        waiting = list(line.waiting())
        running = [t for t in own if t not in waiting]
        assert all(t in own for t in waiting)
        assert line.num_requests == len(waiting) == queue.depths()[line.lane]
        assert line.num_tokens == sum(t.size.num_uncached for t in waiting)
        assert line.num_attended == sum(t.size.num_attended for t in waiting)
        assert line.num_kv == sum(t.size.num_kv for t in waiting)
        assert line.num_growth == sum(t.num_growth for t in waiting)
        assert line.weight == sum(a.share.weight for a in line.accounts.values())
        assert line.floor == min((a.share.clock for a in line.active.values()), default=line.last_clock)
        assert [key for key, _ in line.tickets] == sorted(
            t.key for a in line.active.values() for _, t in a.tickets
        )
        assert line.num_choices == sum(t.num_places for t in waiting)
        assert line.num_bytes == sum(t.num_bytes for t in waiting)
        assert line.num_running == len(running)
        assert line.num_prefill_left == sum(t.num_prefill_left for t in running) >= 0
        assert line.num_attended_left == sum(t.num_attended_left for t in running) >= 0
        assert not any(t.num_prefill_left for t in own if t.stage is not Stage.PREFILLING)
        assert line.share.charged == sum(a.share.charged for a in line.accounts.values())
        assert {a.tenant for a in line.accounts.values() if a.tickets} == set(line.active)
        for account in line.accounts.values():
            assert account.num_tokens == sum(t.size.num_uncached for _, t in account.tickets)
            assert account.num_open == sum(1 for t in own if t.account is account)
            assert [key for key, _ in account.tickets] == sorted(t.key for _, t in account.tickets)


class SimulatedEngine:
    """Queue, scheduler and a fake runner, in steps that take what the step model says."""

    def __init__(
        self,
        queue: LaneQueue,
        *,
        num_blocks: int = 200,
        block_size: int = 4,
        budget: int = 64,
        max_num_seqs: int = 8,
        prefix_cache: bool = True,
        kv_shares: tuple[float, ...] = (),
    ) -> None:
        self.queue = queue
        self.runner = FakeRunner(num_blocks, block_size)
        self.tables = SequenceMemory(num_blocks, block_size, prefix_cache=prefix_cache)
        self.limits = SchedulerLimits(
            max_batch_tokens=budget, max_num_seqs=max_num_seqs, max_model_len=10_000, kv_shares=kv_shares
        )
        self.scheduler = Scheduler(queue, self.tables, FakeSink(), self.limits)
        self.model = known_model()
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], FinishReason] = {}
        self.num_preemptions: dict[str, int] = {}
        self.starts: list[str] = []
        """Who was in a step that was not in the step before."""
        self._in_step: set[str] = set()

    def put(self, request: Request, num_cached: int = 0) -> None:
        self.queue.put(request, self.now, num_cached)
        self.requests[request.request_id] = request

    def step(self) -> StepPlan:
        return self.run(self.scheduler.plan(self.now))

    def run(self, plan: StepPlan) -> StepPlan:
        names = [chunk.sequence.request.request_id for chunk in plan.chunks]
        self.starts += [name for name in dict.fromkeys(names) if name not in self._in_step]
        self._in_step = set(names)
        num_decode = sum(1 for c in plan.chunks if c.start >= c.sequence.num_prompt_tokens)
        num_context = sum(c.start + c.num_tokens for c in plan.chunks)
        duration_s = self.model.seconds(
            plan.num_tokens - num_decode, num_decode, num_context, plan.num_attended
        )
        self.now += duration_s
        self.receive(self.scheduler.commit(plan, self.runner.execute(plan), self.now))
        self.queue.observe(
            StepLoad(
                num_prefill_tokens=plan.num_tokens - num_decode,
                num_decode_tokens=num_decode,
                num_context_tokens=num_context,
                num_attended=plan.num_attended,
                duration_s=duration_s,
                num_running=len(self.scheduler.sequences.running),
                max_num_seqs=self.limits.max_num_seqs,
                max_batch_tokens=self.limits.max_batch_tokens,
                num_free_tokens=self.tables.num_free_tokens,
                num_kv_tokens=self.tables.num_kv_tokens,
                preempted=self.scheduler.sequences.preempted,
            )
        )
        return plan

    def receive(self, outputs: list[Output]) -> None:
        for output in outputs:
            key = output.request_id, output.index
            assert key not in self.ended, f"{key} went on after its end"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.timings is not None
                self.ended[key] = output.finish_reason
                most = max(self.num_preemptions.get(key[0], 0), output.timings.num_preemptions)
                self.num_preemptions[key[0]] = most

    def cancel(self, name: str) -> None:
        """As the gateway does it: out of the queue if it waits there, else out of the engine."""
        if self.queue.cancel(name):
            for index in range(self.requests[name].n):
                self.ended[name, index] = FinishReason.CANCELLED
        else:
            self.receive(self.scheduler.sequences.cancel(name, self.now))

    @property
    def is_done(self) -> bool:
        return self.scheduler.sequences.is_idle and not any(self.queue.depths().values())

    def finish(self, most_steps: int = 5_000) -> None:
        for _ in range(most_steps):
            if self.is_done:
                break
            assert self.step().chunks, "there is work, and the step is idle"
        assert self.is_done, "the work does not end"
        self.scheduler.sequences.check()

    def check_tokens(self) -> None:
        """Everybody got the tokens of an undisturbed run, or the first of them if it was stopped."""
        for name, request in self.requests.items():
            for index in range(request.n):
                tokens = self.tokens.get((name, index), [])
                expected = expected_output(request, index, self.scheduler.max_len)
                if self.ended[name, index] is FinishReason.LENGTH:
                    assert tokens == expected
                else:
                    assert tokens == expected[: len(tokens)]
