"""Measures what drafts cost and bring: an 8 B shape with drafts, of which a given share is right, and without.

`python -m loadtests.gpu.drafts --mode MODE --scratch DIR`
"""

from __future__ import annotations

import shutil
import sys
import traceback
from random import Random

from lab.bench.stepping import Always, Step, Stepper
from loadtests.gpu.figures import emit, emit_skip, say
from loadtests.gpu.sizes import TEXT_TOKENS, Arguments, parse_arguments, speculation
from penstock.app.bench.checkpoint import write_checkpoint
from penstock.engine.config import LoadOptions
from penstock.engine.execution.loader import load_model
from penstock.engine.model.drafts import DraftSource
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.step import Plan

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
    """Has the draft model draft, and takes the tokens that a proposer forces in place of its own."""

    def __init__(self, forced: Forced, length: int) -> None:
        super().__init__(None, length)
        self.forced = forced

    def must_know(self, plan: Plan) -> bool:  # noqa: ARG002
        return True

    def fill(self, plan: Plan, made: list[list[int]], seconds: float) -> None:
        super().fill(plan, self.forced.propose([], [len(drafts) for drafts in made]), seconds)


class Bench:
    """A model and its draft model, step by step on this thread, as the engine goes."""

    def __init__(self, arguments: Arguments) -> None:
        target, draft, self.sizes = speculation(arguments.mode)
        folders = [arguments.scratch / name for name in ("drafted-for", "draft")]
        options = LoadOptions(device=arguments.device.type, max_batch_tokens=0)
        try:
            say("drafts: writing the checkpoints")
            for shape, folder in zip((target, draft), folders, strict=True):
                write_checkpoint(shape.config, folder)
            say("drafts: loading")
            model, source = folders[0], DraftSource(folders[1])
            self._stepper = Stepper(
                lambda: load_model(model, options, say, lambda *_: None, source), num_ahead=_NUM_AHEAD
            )
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        self._text = TEXT_TOKENS
        self._random = Random(0)

    def run(self) -> None:
        sizes, facts = self.sizes, self._stepper.facts
        kept = f"{sizes.rightness:.0%} right"
        for streams in sizes.streams:
            self._tell(streams, "no drafts", None)
            right, length = self._text[0], sizes.length
            drafting = Always(Forced(right, sizes.rightness), length)
            self._tell(streams, f"{length} drafts, {kept}", drafting)
            if facts.has_draft_model:
                drafting = ForcedModel(Forced(right, sizes.rightness), length)
                self._tell(streams, f"{length} drafts of a draft model, {kept}", drafting)

    def _tell(self, streams: int, what: str, drafting: Always | None) -> None:
        say(f"drafts: {streams} streams, {what}")
        steps = self._steady(streams, drafting)
        name = f"llama-8b: TPOT, batch {streams}, {what}"
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
            for step in self._stepper.run(self._requests(streams), drafting)
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
            logit_bias={self._text[0]: _BIAS},
        )
        prompts = [tuple(self._random.choices(self._text, k=_PROMPT_TOKENS)) for _ in range(streams)]
        return [
            Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)
            for number, prompt in enumerate(prompts)
        ]


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
