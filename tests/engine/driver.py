"""Runs requests through scheduler and runner, step by step, on the test's own thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock

from penstock.engine.config import MAX_DRAFTS, LoadOptions
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.launching import launch_fitting
from penstock.engine.model.drafts import DraftSource
from penstock.engine.parallel import leader as parallel
from penstock.engine.parallel.leader import Followers
from penstock.engine.planning.device import Runner, StepInFlight
from penstock.engine.planning.drafting import Drafting, Proposer
from penstock.engine.planning.masks import StepMasks
from penstock.engine.planning.request import FinishReason, Output, Request, Sequence
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits, TokenSink
from penstock.engine.planning.setup import make_memory
from penstock.engine.planning.step import StepPlan
from penstock.engine.text.grammar import CompiledGrammar
from penstock.engine.text.grammars import Grammars
from penstock.priority.queue import LaneQueue


def compiled(request: Request, grammars: Grammars) -> Request:
    """The request with its grammar, if it has one, compiled."""
    grammar = request.sampling.grammar
    if grammar is None or isinstance(grammar, CompiledGrammar):
        return request
    return replace(
        request, sampling=replace(request.sampling, grammar=grammars.compile(request.tenant, grammar))
    )


class NoText(TokenSink):
    """Sequences that end by their length alone."""

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:  # noqa: ARG002
        return "", FinishReason.LENGTH if is_last else None


class Driver:
    """A model with its scheduler. `sink` makes text of its tokens."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        budget: int = 64,
        max_num_seqs: int = 64,
        num_blocks: int = 512,
        draft: DraftSource | None = None,
        grammars: Grammars | None = None,
        sink: TokenSink | None = None,
        quantize: str | None = None,
        followers: Followers | None = None,
        max_drafts: int | None = None,
        expert_parallel: str = "auto",
        data_parallel_attention: bool = False,
        kv_keep: int = 0,
        kv_dtype: str = "auto",
    ) -> None:
        """With `followers`, the model is on several ranks, and has no drafts unless `max_drafts` says so."""
        if max_drafts is None:
            max_drafts = MAX_DRAFTS if followers is None else 0
        options = LoadOptions(
            device="cpu",
            dtype=dtype,
            num_blocks=num_blocks,
            max_batch_tokens=budget,
            quantize=quantize,
            max_drafts=max_drafts,
            expert_parallel=expert_parallel,
            data_parallel_attention=data_parallel_attention,
            kv_keep=kv_keep,
            kv_dtype=kv_dtype,
        )

        world = None if followers is None else followers.world
        self.runner = ModelRunner(
            lambda: load_model(folder, options, lambda _: None, lambda *_: None, draft, world)
        )
        self.runs: Runner = self.runner
        """The object that runs the steps: the runner itself, or all ranks, of which it is the first."""
        if followers is not None:
            self.runs = parallel.make_runner(
                folder, options, start=lambda: followers, make_runner=lambda _: self.runner
            )
        self.folder = folder
        self.grammars = grammars
        self.masks = None if grammars is None else StepMasks(grammars)
        self.sink = sink or NoText()
        self.facts = self.runs.load()
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.fresh()

    def fresh(
        self,
        *,
        prefix_cache: bool = True,
        budget: int | None = None,
        num_blocks: int | None = None,
        num_states: int | None = None,
        max_scored: int | None = None,
        proposer: Proposer | None = None,
        model: bool = False,
    ) -> None:
        """An empty scheduler and prefix cache on the same model, with drafts of a proposer and of the draft model."""
        self.queue = LaneQueue(Lock())
        facts = replace(
            self.facts,
            num_blocks=num_blocks or self.facts.num_blocks,
            num_states=num_states or self.facts.num_states,
        )
        self.tables = make_memory(facts, prefix_cache=prefix_cache, log=None)
        limits = SchedulerLimits(
            max_batch_tokens=budget or self.budget,
            max_num_seqs=min(self.max_num_seqs, self.tables.max_running),
            max_model_len=10_000,
            max_scored=max_scored or facts.max_scored,
            num_stages=facts.num_stages,
        )
        has_drafts = proposer is not None or model
        drafting = Drafting(proposer, self.facts.max_drafts, has_model=model) if has_drafts else None
        self.scheduler = Scheduler(self.queue, self.tables, self.sink, limits, drafting)
        self.flights: deque[tuple[StepPlan, StepInFlight]] = deque()
        """As many as there are stages, at most; one, and landed at once, if the model is whole."""
        self.outputs: dict[tuple[str, int], list[Output]] = {}

    def run(self, *requests: Request, before_step: Callable[[int], None] = lambda _: None) -> None:
        """To the end of all of them; `before_step` is told the number of each step."""
        for request in requests:
            self.queue.put(request if self.grammars is None else compiled(request, self.grammars), 0.0)
        step = 0
        while not self.scheduler.sequences.is_idle or any(self.queue.depths().values()):
            before_step(step)
            self.step()
            step += 1
        self.scheduler.sequences.check()

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(0.0)
        self.runs.forget(self.scheduler.sequences.take_departed())
        if self.masks is not None:
            plan.masks = self.masks.of(plan)
        num_left = len(self.flights) - 1
        if plan.chunks:
            self.flights.append((plan, launch_fitting(self.runs, self.scheduler, plan)))
            num_left = self.facts.num_stages - 1
        while len(self.flights) > max(0, num_left):
            self.land()
        return plan

    def land(self) -> None:
        """The oldest step in flight comes back."""
        plan, step = self.flights.popleft()
        result = step.wait()
        plan.experts = result.experts
        outputs = self.scheduler.commit(plan, result, 0.0)
        if (drafting := self.scheduler.drafting) is not None:
            drafting.observe(plan, 1.0)
        for output in outputs:
            self.outputs.setdefault((output.request_id, output.index), []).append(output)
        self.runs.forget(self.scheduler.sequences.take_departed())

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [token for output in self.outputs[name, index] for token in output.token_ids]
