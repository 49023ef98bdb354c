"""Launching a step that was planned: first its drafts are made, and it is halved until the device has room for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.engine.planning.chunks import is_plain
from penstock.engine.planning.device import OutOfMemory, Runner, RunnerFacts, StepInFlight
from penstock.engine.planning.drafting import Drafting
from penstock.engine.planning.request_queue import StepLoad
from penstock.engine.planning.scheduler import Scheduler
from penstock.engine.planning.step import StepPlan, StepResult

log = logging.getLogger("penstock.engine")


def goes_beside(plan: StepPlan, scheduler: Scheduler, facts: RunnerFacts) -> bool:
    """Returns whether the next step is to be planned while this one runs."""
    longest_s = facts.plain_ahead_s
    if longest_s is None or not facts.num_ahead:
        return facts.num_ahead > 0 and scheduler.may_be_followed(plan)
    if scheduler.awaits_tokens or not plan.chunks or plan.num_drafts or not is_plain(plan):
        return False
    return scheduler.queue.step_seconds(0, plan.num_tokens, plan.num_context, 0) <= longest_s


def launch_fitting(
    runner: Runner,
    scheduler: Scheduler,
    plan: StepPlan,
    limit: Callable[[], None] = lambda: None,
    land: Callable[[], None] = lambda: None,
) -> StepInFlight:
    """Launches a step and the choice of its tokens; the step is halved until the device has room for it.

    Drafts that are open are made first.

    Args:
        limit: is called between the two, while the pass runs: it sets the plan's masks.
        land: waits for the steps in flight; called before a step is launched anew that follows drafts: the host has to
            know where its sequences are.

    Raises:
        OutOfMemory: there is no room for a single token.
        Exception: see Runner.launch.
    """
    if scheduler.drafting is not None and any(chunk.is_open for chunk in plan.chunks):
        _make_drafts(runner, scheduler.drafting, plan)
    while plan.chunks:
        num_tokens = plan.num_tokens
        try:
            step = runner.launch(plan)
            limit()
            step.choose()
            return step
        except OutOfMemory as error:
            if any(chunk.sequence.num_unsure > len(chunk.drafts) for chunk in plan.chunks):
                land()
            if not scheduler.size.halve(plan):
                raise
            log.warning(
                "the device has no room for a step of %d tokens, %d are tried: %s",
                num_tokens,
                plan.num_tokens,
                error,
            )
    return _NoStep()


def _make_drafts(runner: Runner, drafting: Drafting, plan: StepPlan) -> None:
    """Has the draft model make the drafts of a plan that are open; if it fails, the plan goes on without them.

    They may be open still when the plan is launched: the host does not wait for what only the device has to know.
    """
    started = drafting.clock()
    try:
        made = runner.draft(plan, may_stay=not drafting.must_know(plan))
    except Exception:
        drafting.give_up(plan)
    else:
        if made is not None:
            drafting.fill(plan, made, drafting.clock() - started)


class _NoStep:
    """Nothing was left of a step that the device had no room for: its beams gave way."""

    def choose(self) -> None:
        pass

    def wait(self) -> StepResult:
        return StepResult([])


def step_load(scheduler: Scheduler, plan: StepPlan, duration_s: float) -> StepLoad:
    """Returns the work of a step that took so long, and what the engine has after it."""
    num_prefill = plan.num_prefill
    return StepLoad(
        num_prefill_tokens=num_prefill,
        num_decode_tokens=plan.num_tokens - num_prefill,
        num_drafts=plan.num_drafts,
        num_accepted=sum(chunk.num_accepted for chunk in plan.chunks),
        num_context_tokens=plan.num_context,
        num_attended=plan.num_attended,
        duration_s=duration_s,
        num_running=len(scheduler.sequences.running),
        max_num_seqs=scheduler.limits.max_num_seqs,
        max_batch_tokens=scheduler.most_tokens,
        num_free_tokens=scheduler.memory.num_free_tokens,
        num_kv_tokens=scheduler.memory.num_kv_tokens,
        preempted=scheduler.sequences.preempted,
    )
