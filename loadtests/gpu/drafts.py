"""What drafts cost and bring: an 8 B shape with drafts, of which a given share is right, and without.

`python -m loadtests.gpu.drafts --mode MODE --scratch DIR`
"""

from __future__ import annotations

import shutil
import sys
import time
import traceback
from collections import deque
from random import Random
from threading import Lock

from engine.engine import launch_fitting
from engine.execution.loader import load_model
from engine.execution.runner import ModelRunner
from engine.model.config import LoadOptions
from engine.model.drafts import DraftSource
from engine.planning.block_tables import BlockTables
from engine.planning.draft_model import DraftModel
from engine.planning.request import Request, SamplingParams, Sequence
from engine.planning.scheduler import Scheduler, SchedulerLimits
from engine.planning.step import Plan, StepInFlight
from lab.bench.depth import Always
from loadtests.gpu.checkpoints import token_ids, write_checkpoint
from loadtests.gpu.figures import emit, emit_skip, say
from loadtests.gpu.sizes import Arguments, parse_arguments, speculation
from priority.queue import LaneQueue
from priority.simulator.run import NoText

_PROMPT_TOKENS = 32
_SETTLING_STEPS = 4
"""The first steps of all streams are not measured: a draft model catches up."""
_BIAS = 1000.0
_NUM_AHEAD = 1
"""As on a GPU, also where a dry run has none."""


class Forced:
    """Proposes what the model will say, with a given probability; it asks a draft model first, if there is one."""

    name = "forced"

    def __init__(self, token_id: int, rightness: float, model: DraftModel | None) -> None:
        self._right, self._rightness, self._model = token_id, rightness, model
        self._random = Random(0)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        if self._model is not None:
            lengths = [len(drafts) for drafts in self._model.propose(sequences, lengths)]
        return [[self._draft() for _ in range(length)] for length in lengths]

    def seconds(self, sequences: list[Sequence], length: int) -> float:  # noqa: ARG002
        return 0.0

    def forget(self, sequence: Sequence) -> None:
        if self._model is not None:
            self._model.forget(sequence)

    def _draft(self) -> int:
        return self._right + int(self._random.random() >= self._rightness)


class Bench:
    """A model and its draft model, step by step on this thread, as the engine goes."""

    def __init__(self, arguments: Arguments) -> None:
        target, draft, self.sizes = speculation(arguments.mode)
        num_random = 1 << (20 if arguments.is_dry else 26)
        folders = [arguments.scratch / name for name in ("drafted-for", "draft")]
        options = LoadOptions(device=arguments.device.type, max_batch_tokens=0)
        try:
            say("drafts: writing the checkpoints")
            for shape, folder in zip((target, draft), folders, strict=True):
                write_checkpoint(shape, folder, num_random)
            say("drafts: loading")
            model, source = folders[0], DraftSource(folders[1])
            self._runner = ModelRunner(
                lambda: load_model(model, options, say, lambda *_: None, source), num_ahead=_NUM_AHEAD
            )
            self._facts = self._runner.load()
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        self._text = token_ids()
        self._random = Random(0)

    def run(self) -> None:
        sizes, facts = self.sizes, self._facts
        kept = f"{sizes.rightness:.0%} right"
        for streams in sizes.streams:
            self._tell(streams, "no drafts", None)
            right = self._text[0]
            self._tell(streams, f"{sizes.length} drafts, {kept}", Forced(right, sizes.rightness, None))
            if facts.draft is not None:
                model = DraftModel(facts.draft, time.perf_counter)
                what = f"{sizes.length} drafts of a draft model, {kept}"
                self._tell(streams, what, Forced(right, sizes.rightness, model))

    def _tell(self, streams: int, what: str, proposer: Forced | None) -> None:
        say(f"drafts: {streams} streams, {what}")
        seconds, num_tokens, num_steps = self._steady(streams, proposer)
        name = f"llama-8b: TPOT, batch {streams}, {what}"
        if not num_steps:
            emit_skip(name, "no steps of all streams")
            return
        how = f"{num_tokens / num_steps / streams:.2f} tokens a step of {seconds / num_steps * 1000:.2f} ms"
        emit(name, seconds * streams / num_tokens * 1000, "ms", how)

    def _steady(self, streams: int, proposer: Forced | None) -> tuple[float, int, int]:
        """Seconds, tokens and number of the steps in which every stream decodes."""
        scheduler, flights = self._scheduler(streams, proposer), deque[tuple[Plan, StepInFlight]]()
        found, ended_s = list[tuple[float, int]](), time.perf_counter()

        def land(num_left: int) -> None:
            nonlocal ended_s
            while len(flights) > num_left:
                plan, step = flights.popleft()
                outputs = scheduler.commit(plan, step.wait(), time.perf_counter())
                self._runner.forget(scheduler.take_departed())
                began_s, ended_s = ended_s, time.perf_counter()
                is_decode = all(c.samples and c.num_tokens == 1 + len(c.drafts) for c in plan.chunks)
                if is_decode and len(plan.chunks) == streams:
                    found.append((ended_s - began_s, len(outputs)))

        is_over = False
        while not is_over:
            if scheduler.awaits_tokens:
                land(0)
            plan = scheduler.plan(time.perf_counter())
            if plan.chunks:
                flights.append((plan, launch_fitting(self._runner, scheduler, plan)))
            land(_NUM_AHEAD if plan.chunks and not plan.num_drafts else 0)
            is_over = scheduler.is_idle
        found = found[_SETTLING_STEPS:]
        return sum(seconds for seconds, _ in found), sum(num for _, num in found), len(found)

    def _scheduler(self, streams: int, proposer: Forced | None) -> Scheduler:
        """One that has all requests in its queue. Their bias leaves one token to choose, whatever the weights are."""
        facts, queue = self._facts, LaneQueue(Lock())
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=self.sizes.num_tokens,
            ignore_eos=True,
            logit_bias={self._text[0]: _BIAS},
        )
        for number in range(streams):
            prompt = tuple(self._random.choices(self._text, k=_PROMPT_TOKENS))
            queue.put(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling), 0.0)
        limits = SchedulerLimits(
            max_batch_tokens=facts.max_batch_tokens,
            max_num_seqs=streams,
            max_model_len=facts.max_model_len,
        )
        drafting = None if proposer is None else Always(proposer, self.sizes.length)
        return Scheduler(queue, BlockTables(facts.num_blocks, facts.block_size), NoText(), limits, drafting)


def main() -> int:
    try:
        Bench(parse_arguments()).run()
    except Exception as error:
        traceback.print_exc()
        emit_skip("the rest of drafts", f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
