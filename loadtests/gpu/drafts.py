"""Measures what drafts cost and bring: an 8 B shape with drafts, of which a given share is right, and without.

They come from a lookup, a draft model, an EAGLE-3 head, and a layer of the model's own for multi-token prediction.

`python -m loadtests.gpu.drafts --mode MODE --scratch DIR`
"""

from __future__ import annotations

import gc
import shutil
import sys
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import torch

from lab.bench.stepping import Always, Step, Stepper
from loadtests.gpu.figures import emit, emit_skip, say
from loadtests.gpu.sizes import (
    TEXT_TOKENS,
    Arguments,
    DraftedModel,
    DraftSizes,
    parse_arguments,
    speculation,
)
from loadtests.gpu.timing import measure_each
from penstock.app.bench.checkpoint import write_checkpoint
from penstock.engine.config import LoadOptions
from penstock.engine.execution.loader import load_model
from penstock.engine.model.drafts import DraftSource
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.step import StepPlan

_PROMPT_TOKENS = 32
_SETTLING_STEPS = 4
"""The first steps of all streams are not measured: a draft model catches up."""
_BIAS = 1000.0
_NUM_AHEAD = 1
"""As on a GPU, also where a dry run has none."""


class Forced:
    """Proposes what the model will say, with a given probability."""

    name = "forced"
    is_behind = False

    def __init__(self, token_id: int, rightness: float) -> None:
        self._right, self._rightness = token_id, rightness
        self._random = Random(0)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:  # noqa: ARG002
        return [[self._draft() for _ in range(length)] for length in lengths]

    def forget(self, sequence: Sequence) -> None: ...

    def _draft(self) -> int:
        return self._right + int(self._random.random() >= self._rightness)


class ForcedModel(Always):
    """Has the draft model or head draft, and takes the tokens that a proposer forces in place of its own."""

    def __init__(self, forced: Forced, length: int) -> None:
        super().__init__(None, length)
        self.forced = forced

    def must_know(self, plan: StepPlan) -> bool:  # noqa: ARG002
        return True

    def fill(self, plan: StepPlan, made: list[list[int]], seconds: float) -> None:
        super().fill(plan, self.forced.propose([], [len(drafts) for drafts in made]), seconds)

    def give_up(self, plan: StepPlan) -> None:  # noqa: ARG002
        """Ends the run with what failed: steps without drafts are not what is measured."""
        raise


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one model, step by step on this thread, as the engine goes."""

    drafted: DraftedModel
    sizes: DraftSizes
    stepper: Stepper
    random: Random = field(default_factory=lambda: Random(0))

    def run(self) -> None:
        """Without drafts, with drafts for nothing unless they were measured with another drafter, and with its own.

        Its own are measured as the host forces them, and as they stay on the device, with a step ahead and without.
        """
        drafted, right, rightness = self.drafted, TEXT_TOKENS[0], self.sizes.rightness
        length, kept = self.sizes.length, f"{rightness:.0%} right"
        beside = f", beside {drafted.drafter}" if drafted.reads_model else ""
        for streams in self.sizes.streams:
            self._tell(streams, f"no drafts{beside}", None)
            if not drafted.reads_model:
                self._tell(streams, f"{length} drafts, {kept}", Always(Forced(right, rightness), length))
            what = f"{length} drafts of {drafted.drafter}, {kept}"
            self._tell(streams, what, ForcedModel(Forced(right, rightness), length))
            # Its own drafts are all right: the bias leaves it one token, too.
            what = f"{length} drafts of {drafted.drafter}, all right"
            self._tell(streams, what, Always(None, length))
            if self.stepper.facts.drafts_ahead:
                self._tell(streams, f"{what}, a step ahead", Always(None, length, may_follow=True))

    def _tell(self, streams: int, what: str, drafting: Always | None) -> None:
        say(f"drafts: {streams} streams, {what}")
        steps = self._steady(streams, drafting)
        name = f"{self.drafted.name}: TPOT, batch {streams}, {what}"
        if not steps:
            emit_skip(name, "no steps of all streams")
            return
        seconds, num_tokens = sum(step.seconds for step in steps), sum(step.num_tokens for step in steps)
        how = f"{num_tokens / len(steps) / streams:.2f} tokens a step of {seconds / len(steps) * 1000:.2f} ms"
        emit(name, seconds * streams / num_tokens * 1000, "ms", how)

    def _steady(self, streams: int, drafting: Always | None) -> list[Step]:
        """The steps in which every stream decodes."""
        steps = [
            step
            for step in self.stepper.run(self._requests(streams), drafting)
            if len(step.plan.chunks) == streams
            and all(chunk.samples and chunk.num_tokens == 1 + len(chunk.drafts) for chunk in step.plan.chunks)
        ]
        return steps[_SETTLING_STEPS:]

    def _requests(self, streams: int) -> list[Request]:
        """Requests whose bias leaves one token to choose, whatever the weights are."""
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=self.sizes.num_tokens,
            ignore_eos=True,
            logit_bias={TEXT_TOKENS[0]: _BIAS},
        )
        prompts = [tuple(self.random.choices(TEXT_TOKENS, k=_PROMPT_TOKENS)) for _ in range(streams)]
        return [
            Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)
            for number, prompt in enumerate(prompts)
        ]


class Bench:
    """Models and what drafts for them, one after another."""

    def __init__(self, arguments: Arguments) -> None:
        self._models, self._sizes = speculation(arguments.mode)
        self._options = LoadOptions(device=arguments.device.type, max_batch_tokens=0)
        self._scratch = arguments.scratch / "drafts"

    def run(self) -> int:
        measures = {f"{one.name} and {one.drafter}": partial(self._measure, one) for one in self._models}
        try:
            return measure_each("drafts", "drafts", measures)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _measure(self, drafted: DraftedModel) -> None:
        release_memory()
        stepper = self._load(drafted)
        if not stepper.facts.has_draft_model:
            raise RuntimeError(f"{drafted.drafter} is not used")
        Runs(drafted, self._sizes, stepper).run()

    def _load(self, drafted: DraftedModel) -> Stepper:
        say("drafts: writing the checkpoints")
        configs = {drafted.name: drafted.config}
        if drafted.draft is not None:
            configs[drafted.drafter] = drafted.draft
        model, *drafts = self._written(configs)
        source = DraftSource(drafts[0]) if drafts else None
        say("drafts: loading")
        return Stepper(
            lambda: load_model(model, self._options, say, lambda *_: None, source), num_ahead=_NUM_AHEAD
        )

    def _written(self, configs: dict[str, dict[str, object]]) -> list[Path]:
        """The checkpoints by name; those of the model before are kept as far as they are wanted again."""
        for folder in self._scratch.glob("*"):
            if folder.name not in configs:
                shutil.rmtree(folder)
        for name, config in configs.items():
            if not (self._scratch / name).exists():
                write_checkpoint(config, self._scratch / name)
        return [self._scratch / name for name in configs]


def release_memory() -> None:
    """Frees what a model leaves behind: cycles, and the memory that torch keeps."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    try:
        return Bench(parse_arguments()).run()
    except Exception as error:
        traceback.print_exc()
        emit_skip("the rest of drafts", f"{type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
