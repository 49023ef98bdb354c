"""Engine: the step thread, its inbox and its outbox.

One thread owns everything that computes: it loads the model, plans, launches and commits, one step after another. Other
threads put requests into the queue, call `wake`, and call `cancel`; a step's results leave in one StepReport.

On a device that runs concurrently with the host, a step is planned and launched before the one before it is waited for,
unless that one has drafts, or this one is to have drafts, that the host has to know. Of a model that is cut into stages
as many steps are in flight. Without such a device, the loop is the same, and each step has ended before the next is
planned.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

from penstock.engine.launching import goes_beside, launch_fitting, step_load
from penstock.engine.planning.block_map import BlockMap, block_map
from penstock.engine.planning.blocks import PoolViolation
from penstock.engine.planning.device import DeviceError, OutOfMemory, Runner, RunnerFacts
from penstock.engine.planning.drafting import Drafting
from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.lookup import Lookup
from penstock.engine.planning.masks import ForcedTokens, StepMasks
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.prefix_events import PrefixLog
from penstock.engine.planning.ranked_memory import Memory
from penstock.engine.planning.rehearsal import MOST_S, Rehearsal
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import Output, Request
from penstock.engine.planning.request_queue import RequestQueue
from penstock.engine.planning.scheduler import Counters, Scheduler, SchedulerLimits, TokenSink
from penstock.engine.planning.setup import fit_limits, make_memory
from penstock.engine.planning.state_records import StateUse
from penstock.engine.planning.step import StepPlan, StepResult
from penstock.engine.planning.timings import NO_SECONDS, DraftCount
from penstock.engine.text.grammars import Grammars
from penstock.engine.tiers.block_file import BlockKey
from penstock.engine.tiers.giving import Given
from penstock.engine.tiers.opening import TierOptions, open_tiers
from penstock.engine.tiers.tiers import Tiers, TiersUse

log = logging.getLogger("penstock.engine")

_IDLE_WAIT_S = 0.5
"""An idle engine shows at least this often that it is alive."""
_NO_ROOM = "the device has not enough memory for this request"


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The contents of the engine, as another thread sees them: the numbers are of one moment, give or take a step."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    block_size: int = 16
    """Tokens of a block."""
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_kv_tokens: int = 0
    """Tokens that all blocks have room for."""
    num_free_tokens: int = 0
    """Tokens that the free blocks have room for."""
    num_steps: int = 0
    num_preemptions: int = 0
    num_pool_violations: int = 0
    max_batch_tokens: int = 0
    """The most tokens of one step."""
    max_num_seqs: int = 0
    states: StateUse = field(default_factory=StateUse)
    tiers: TiersUse = field(default_factory=TiersUse)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was launched and not waited for."""

    plan: StepPlan
    wait: Callable[[], StepResult]
    """Waits for the results of the step; raises the error of its launch, if that failed."""
    started_s: float


class Engine:
    """Runs steps as long as there is work.

    `make_runner` is called on the step thread, where all of torch's work belongs, its import included. `deliver` is
    called there once per step that brought anything; it must not block. `on_state` is called there at every change of
    `state`.
    """

    def __init__(
        self,
        make_runner: Callable[[], Runner],
        queue: RequestQueue,
        sink: TokenSink,
        limits: SchedulerLimits,
        *,
        deliver: Callable[[StepReport], None],
        clock: Callable[[], float],
        on_state: Callable[[EngineState], None] = lambda _: None,
        prefix_cache: bool = True,
        grammars: Grammars | None = None,
        rehearsal: Rehearsal | None = None,
        tiers: TierOptions | None = None,
    ) -> None:
        """If `grammars` is None, no request may have a grammar. A `rehearsal` is served before the engine is READY.
        `tiers` keep KV blocks outside of the device's memory."""
        self.state = EngineState.STARTING
        self.error: str | None = None
        self.failure: BaseException | None = None
        """The error that ended the engine, if it FAILED."""
        self.last_progress_s = clock()
        """The time at which the last step, or turn without work, ended; if it is far in the past, a step hangs."""
        self._make_runner = make_runner
        self._runner: Runner
        self._facts: RunnerFacts
        self._queue = queue
        self._sink = sink
        self._limits = limits
        self._deliver = deliver
        self._clock = clock
        self._on_state = on_state
        self._prefix_cache = prefix_cache
        self._masks = None if grammars is None else StepMasks(grammars)
        self._rehearsal = rehearsal
        self._tier_options = tiers
        self._tiers: Tiers | None = None
        self._prefix_log = PrefixLog()
        self._scheduler: Scheduler | None = None
        self._cancels: deque[str] = deque()
        self._undelivered: list[Output] = []
        """The outputs that the turn has brought so far."""
        self._flights: deque[_Flight] = deque()
        self._reported = Counters()
        """The scheduler's counters as the last report saw them."""
        self._ended_s = 0.0
        """The time at which the last step ended."""
        self._awake = threading.Event()
        self._stopping = threading.Event()
        self._num_steps = 0
        self._num_pool_violations = 0
        self._proven = True
        self._thread = threading.Thread(target=self._run, name="penstock-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Signals that there may be something to do: a request was queued."""
        self._awake.set()

    def expect(self, requests: Sequence[Request]) -> None:
        """Brings KV of requests that were queued back from the tiers while they wait. It is no more than a hint."""
        if self._tiers is not None:
            self._tiers.expect(requests)

    def expect_from(self, source: str, hashes: Sequence[bytes], *, is_busy: bool = False) -> None:
        """Says that another server has a chain of blocks that a request is about to need; it is no more than a hint.

        `is_busy` says that it still computes the prompt whose blocks they are.
        """
        if self._tiers is not None:
            self._tiers.expect_from(source, hashes, is_busy=is_busy)

    def give(self, keys: Sequence[BlockKey], done: Given) -> None:
        """Reads the contents of the first of these blocks, up to the first that is not here, for another server.

        Args:
            done: takes them, once, from any thread.
        """
        if self._tiers is None or self._tiers.peers is None:
            done([])
        else:
            self._tiers.giver.ask(keys, done)

    @property
    def kv_digest(self) -> bytes:
        """What gives blocks their meaning, the same for servers that can exchange them; empty if this one does not."""
        return b"" if self._tiers is None or self._tiers.peers is None else self._tiers.digest

    @property
    def pull_rate(self) -> float:
        """The tokens a second whose KV comes from other servers; 0 if none can."""
        return 0.0 if self._tiers is None else self._tiers.pull_rate

    def cancel(self, request_id: str) -> None:
        """Ends a request at the next step boundary; ids that are not here, or no longer, are ignored."""
        self._cancels.append(request_id)
        self._awake.set()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ends the thread after the steps in flight; unfinished requests stay so. False if it did not end in time."""
        self._stopping.set()
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        if scheduler is None:
            return EngineStats()
        return EngineStats(
            num_running=len(scheduler.sequences.running),
            num_waiting=len(scheduler.sequences.waiting),
            num_blocks=scheduler.memory.num_blocks,
            block_size=scheduler.memory.block_size,
            num_free_blocks=scheduler.memory.num_free_blocks,
            num_cached_blocks=scheduler.memory.num_cached_blocks,
            num_kv_tokens=scheduler.memory.num_kv_tokens,
            num_free_tokens=scheduler.memory.num_free_tokens,
            num_steps=self._num_steps,
            num_preemptions=scheduler.sequences.counters.num_preemptions,
            num_pool_violations=self._num_pool_violations,
            max_batch_tokens=scheduler.limits.max_batch_tokens,
            max_num_seqs=scheduler.limits.max_num_seqs,
            states=scheduler.memory.state_use,
            tiers=TiersUse() if self._tiers is None else self._tiers.use,
        )

    def unfilled_kv(self) -> float:
        """See `SequenceMemory.unfilled`; for any thread, and of one moment, give or take a step."""
        scheduler = self._scheduler
        return scheduler.memory.unfilled(list(scheduler.sequences.running)) if scheduler else 0.0

    def block_map(self) -> BlockMap | None:
        """The KV blocks as a picture, for any thread; None before the engine is READY."""
        scheduler = self._scheduler
        if scheduler is None:
            return None
        memory = scheduler.memory
        return block_map(memory.ref_counts, memory.findable)

    def find_cached(self, hashes: Sequence[bytes], token_ids: Sequence[int] = ()) -> tuple[int, int]:
        """Guesses from outside the step thread how many tokens of a prompt are cached, and how many of them in use.

        Args:
            hashes: the hashes of the prompt's blocks.
            token_ids: the prompt; without it, nothing is found where layers have a state.
        """
        scheduler, tiers = self._scheduler, self._tiers
        if scheduler is None:
            return 0, 0
        num_cached, num_in_use = scheduler.memory.find_cached(hashes, token_ids)
        if tiers is not None:
            size = scheduler.memory.block_size
            num_gained = tiers.tokens_gained(hashes, num_cached // size)
            num_cached = max(num_cached, num_cached // size * size + num_gained)
        return num_cached, num_in_use

    @property
    def max_sequence_tokens(self) -> int:
        """The prompt and output tokens that one sequence can ever have; known once the engine is READY."""
        return self._scheduler.max_len if self._scheduler else self._limits.max_model_len

    def longest(self, keeping: Keeping | None) -> int:
        """The same of a sequence of which so much is kept."""
        return self._scheduler.longest(keeping) if self._scheduler else self._limits.max_model_len

    # The step thread

    def _run(self) -> None:
        try:
            self._runner = self._make_runner()
            try:
                self._serve()
            finally:
                self._runner.close()
        except BaseException as error:
            self._fail(error)

    def _serve(self) -> None:
        self._facts = self._runner.load()
        if self._masks is not None:
            self._masks.prepare()
        if self._rehearsal is not None:
            self._rehearse(self._rehearsal)
        self._scheduler = scheduler = self._new_scheduler()
        if self._tier_options is not None:
            step_seconds = self._queue.step_seconds
            self._tiers = open_tiers(self._tier_options, self._facts, step_seconds, self.wake)
            self._attach_tiers(scheduler.memory)
        self._become(EngineState.READY)
        while not self._stopping.is_set():
            self._turn(scheduler)
        self._land_but(scheduler, 0)
        if self._tiers is not None:
            self._tiers.finish()
        self._become(EngineState.STOPPED)

    def _attach_tiers(self, memory: Memory) -> None:
        if self._tiers is not None and isinstance(memory, SequenceMemory):
            self._tiers.attach(memory)

    def _rehearse(self, rehearsal: Rehearsal) -> None:
        """Serves requests of its own with a scheduler of their own; nobody is told, but the queue of the steps."""
        queue, deliver = self._queue, self._deliver
        self._queue, self._deliver = rehearsal, lambda _: None
        scheduler, until_s = self._new_scheduler(), self._clock() + MOST_S
        while not rehearsal.is_over and self._clock() < until_s and not self._stopping.is_set():
            self._turn(scheduler)
        self._land_but(scheduler, 0)
        for request_id in rehearsal.end():
            scheduler.sequences.cancel(request_id, self._clock())
        self._forget_departed(scheduler)
        rehearsal.tell()
        self._queue, self._deliver = queue, deliver
        self._prefix_log.clear()
        self._num_steps, self._reported, self._proven = 0, Counters(), True

    def _new_scheduler(self) -> Scheduler:
        memory = make_memory(self._facts, prefix_cache=self._prefix_cache, log=self._prefix_log)
        limits = fit_limits(self._limits, self._facts, memory)
        return Scheduler(self._queue, memory, self._sink, limits, self._new_drafting())

    def _new_drafting(self) -> Drafting | None:
        facts, step_seconds = self._facts, self._queue.step_seconds
        if not facts.max_drafts:
            return None
        return Drafting(
            Lookup(),
            facts.max_drafts,
            has_model=facts.has_draft_model,
            forced=None if self._masks is None else ForcedTokens(),
            clock=self._clock,
            max_rows=facts.max_rows,
            step_seconds=step_seconds,
            has_experts=facts.has_experts,
            num_ahead=facts.num_ahead,
            may_follow=facts.drafts_ahead,
        )

    def _turn(self, scheduler: Scheduler) -> None:
        """Launches a step and waits for the one before, or waits for work."""
        self._awake.clear()
        started = self._clock()
        self._undelivered = self._cancel_asked(scheduler, started)
        if self._flights and scheduler.awaits_tokens:
            self._land_but(scheduler, 0)
        if self._tiers is not None and self._tiers.turn():
            self._awake.set()  # more has arrived than one turn takes
        plan = scheduler.plan(started)
        self._forget_departed(scheduler)
        plan.is_beside = goes_beside(plan, scheduler, self._facts)
        is_at_rest = not plan.chunks and not self._flights
        if self._flights and self._facts.plain_ahead_s is not None and not plan.is_beside:
            self._land_but(scheduler, 0, plan)  # or else their tokens would wait for this step, too
            if scheduler.size.withdraw_ended(plan):
                self._report(scheduler, StepPlan(), started)  # or else its memory would not be shown as free
        num_left = len(self._flights) - 1  # if nothing can be planned before the oldest step is back
        if plan.chunks:
            is_launched = self._launch(scheduler, plan, started)
            num_left = self._facts.num_ahead if is_launched and plan.is_beside else 0
        self._land_but(scheduler, max(0, num_left))
        if self._undelivered:
            self._report(scheduler, StepPlan(), started)
        self.last_progress_s = self._clock()
        if is_at_rest:
            self._rest(scheduler)

    def _launch(self, scheduler: Scheduler, plan: StepPlan, now: float) -> bool:
        """Returns False if the launch failed; the step is in flight all the same, and waiting for it says why."""
        self._num_steps += 1
        self._proven = False
        try:
            if self._tiers is not None:
                self._tiers.save()
            limit = partial(self._limit, scheduler, plan)
            land = partial(self._land_but, scheduler, 0, is_launching=True)
            step = launch_fitting(self._runner, scheduler, plan, limit, land)
        except DeviceError:
            raise
        except Exception as error:
            self._flights.append(_Flight(plan, partial(_raise, error), now))
            return False
        self._flights.append(_Flight(plan, step.wait, now))
        return True

    def _limit(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """Says which tokens a step may choose; where that depends on tokens in flight, these land first."""
        constrained = [c for c in plan.chunks if c.samples and c.sequence.request.sampling.is_guided]
        if constrained and self._masks is not None:
            if any(chunk.sequence.num_pending > 1 for chunk in constrained):
                self._land_but(scheduler, 0, is_launching=True)
            plan.masks = self._masks.of(plan)

    def _land_but(
        self,
        scheduler: Scheduler,
        num_left: int,
        planned: StepPlan | None = None,
        *,
        is_launching: bool = False,
    ) -> None:
        """Waits for the steps in flight, but for the last so many of them.

        Args:
            planned: the step that is to be launched next, if it is planned already.
            is_launching: whether another step is being launched.
        """
        while len(self._flights) > num_left:
            self._land(scheduler, planned, is_launching=is_launching)

    def _land(self, scheduler: Scheduler, planned: StepPlan | None, *, is_launching: bool) -> None:
        """Waits for the oldest step and commits it; a fault ends the sequences of this step, and no others."""
        flight = self._flights.popleft()
        plan, error = flight.plan, None
        try:
            result = flight.wait()
        except DeviceError:
            raise
        except Exception as fault:
            if isinstance(fault, OutOfMemory) and plan.num_tokens > 1 and not is_launching:
                log.warning("a step of %d tokens found no room while it ran: %s", plan.num_tokens, fault)
                self._give_up(scheduler, plan, planned)
                self._report(scheduler, StepPlan(), self._clock())
                return
            log.exception("a step failed; its %d sequences end with an error", len(plan.chunks))
            said = _NO_ROOM if isinstance(fault, OutOfMemory) else "the step failed"
            self._undelivered += scheduler.fail_step(plan, said, self._clock())
            error = f"{type(fault).__name__}: {fault}"
        else:
            plan.experts = result.experts
            self._undelivered += scheduler.commit(plan, result, self._clock())
        self._forget_departed(scheduler)
        self._report(scheduler, plan, max(flight.started_s, self._ended_s), error)

    def _give_up(self, scheduler: Scheduler, plan: StepPlan, planned: StepPlan | None) -> None:
        """Has smaller steps compute what a step lacked memory for, and what was to follow the tokens of it."""
        plans = [plan]
        while self._flights:
            flight = self._flights.popleft()
            try:
                flight.wait()
            except DeviceError:
                raise
            except Exception as fault:
                log.warning("nor did the step after it end well: %s", fault)
            plans.append(flight.plan)
        scheduler.size.give_up(plans if planned is None else [*plans, planned])
        self._forget_departed(scheduler)

    def _forget_departed(self, scheduler: Scheduler) -> None:
        departed = scheduler.sequences.take_departed()
        self._runner.forget(departed)
        if scheduler.drafting is not None:
            scheduler.drafting.forget(departed)

    def _report(self, scheduler: Scheduler, plan: StepPlan, started: float, error: str | None = None) -> None:
        """Delivers a report of the step that ended, with everything that was not delivered before."""
        now = self.last_progress_s = self._ended_s = self._clock()
        num_prefill, num_drafts = plan.num_prefill, plan.num_drafts
        if plan.chunks:
            self._queue.observe(step_load(scheduler, plan, now - started - plan.drafting_s))
        counters, before = scheduler.sequences.counters, self._reported
        drafting, failed, draft_seconds = scheduler.drafting, list[str](), NO_SECONDS
        if drafting is not None:
            failed, drafting.failed = drafting.failed, []
            if plan.chunks and error is None:
                draft_seconds = drafting.observe(plan, now - started)
        self._deliver(
            StepReport(
                outputs=self._undelivered,
                started_s=started,
                duration_s=now - started,
                num_prefill_tokens=num_prefill,
                num_decode_tokens=plan.num_tokens - num_prefill - num_drafts,
                drafts=_drafts(plan) if num_drafts else {},
                draft_seconds=draft_seconds,
                failed_proposers=failed,
                num_running=len(scheduler.sequences.running),
                num_waiting=len(scheduler.sequences.waiting),
                num_blocks=scheduler.memory.num_blocks,
                num_free_blocks=scheduler.memory.num_free_blocks,
                num_preemptions=counters.num_preemptions - before.num_preemptions,
                num_prefix_query_tokens=counters.num_prefix_query_tokens - before.num_prefix_query_tokens,
                num_prefix_hit_tokens=counters.num_prefix_hit_tokens - before.num_prefix_hit_tokens,
                prefix_events=self._prefix_log.drain(),
                experts=plan.experts,
                error=error,
            )
        )
        self._undelivered = []
        self._reported = replace(counters)

    def _cancel_asked(self, scheduler: Scheduler, now: float) -> list[Output]:
        outputs: list[Output] = []
        while self._cancels:
            outputs.extend(scheduler.sequences.cancel(self._cancels.popleft(), now))
        return outputs

    def _rest(self, scheduler: Scheduler) -> None:
        if scheduler.sequences.is_idle and not self._proven:
            self._prove(scheduler)
        if self._tiers is not None:
            self._tiers.save()
        self._awake.wait(_IDLE_WAIT_S)

    def _prove(self, scheduler: Scheduler) -> None:
        """Checks that every block is free while no sequence runs; if one is not, the pool starts afresh."""
        self._proven = True
        try:
            scheduler.memory.check_idle()
        except PoolViolation as violation:
            log.error("KV pool violation, starting it afresh: %s", violation)
            self._num_pool_violations += 1
            self._scheduler = None
            scheduler.start_afresh(self._new_scheduler().memory)
            self._attach_tiers(scheduler.memory)
            self._prefix_log.clear()
            self._scheduler = scheduler

    def _fail(self, error: BaseException) -> None:
        log.error("the engine failed: %s", error)
        self.failure = error
        self.error = str(error) or type(error).__name__
        scheduler = self._scheduler
        if scheduler is not None:
            now = self._clock()
            outputs = self._undelivered + scheduler.sequences.fail_all("the engine failed", now)
            try:
                self._deliver(StepReport(outputs=outputs, started_s=now, error=self.error))
            except Exception:
                log.exception("nobody takes the last outputs")
        if self._tiers is not None:
            self._tiers.close()
        self._become(EngineState.FAILED)

    def _become(self, state: EngineState) -> None:
        self.state = state
        try:
            self._on_state(state)
        except Exception:
            log.exception("whoever is told of the state raised; going on")


def _drafts(plan: StepPlan) -> dict[str, DraftCount]:
    """Counts the drafts of a step that came back, by proposer."""
    found: dict[str, DraftCount] = {}
    for chunk in plan.chunks:
        if chunk.drafts:
            found.setdefault(chunk.proposer, DraftCount()).note(len(chunk.drafts), chunk.num_accepted)
    return found


def _raise(error: Exception) -> StepResult:
    raise error
