"""Landing: the way of a step's tokens back to the host."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from penstock.engine.execution.prompt_rows import PromptFindings
from penstock.engine.planning.device import DeviceError
from penstock.engine.planning.request import TokenLogprobs
from penstock.engine.planning.step import OPEN, Sampled, StepResult

NOT_FINITE = "the model's output was not finite"


@dataclass(slots=True)
class Wanted:  # one for every token: frozen, it would take three times as long to make
    """The results that one chunk of a step is to bring."""

    rows: ListLike[int]
    """The rows whose tokens it brings: one; with drafts, one more for each, whose token counts if they are right."""
    drafts: ListLike[int] = ()
    num_logprobs: int | None = None
    """The log probabilities that are wanted, as in SamplingParams."""
    candidates: ListLike[int] = ()
    """The tokens whose log probabilities are wanted in the place of the one that it brings."""
    refusal: str | None = None
    """Why the chunk's sequence cannot be sampled."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens that were chosen for each of R rows, on the device."""

    token_ids: Tensor
    """[R] int32; -1 where there is no token."""
    asking: ListLike[int] = ()
    """The T rows of which log probabilities are wanted."""
    told: ListLike[Tensor] = ()
    """[T] float32 log probabilities of their tokens; [T, k] int32 ids and float32 log probabilities of the most likely
    ones, best first. Empty if T is 0."""
    scores: ListLike[Tensor] = ()
    """[N] float32 log probabilities of the N candidates of all rows, one row's after another's. Empty if N is 0."""


class Landing:
    """The tokens that a step chose, on their way to the host after the step."""

    def __init__(
        self,
        device: torch.device,
        wanted: list[Wanted],
        chosen: Chosen,
        found: PromptFindings | None = None,
        drafts: Tensor | None = None,
    ) -> None:
        """
        Args:
            drafts: those of the chunks that are open, one chunk's after another's.
        """
        self._wanted = wanted
        self._drafts = None if drafts is None else _to_host(drafts)
        if found is not None:
            pooled = None if found.pooled is None else _to_host(found.pooled)
            found = PromptFindings(found.scored, [_to_host(tensor) for tensor in found.scores], pooled)
        self._found = found
        self._places = {row: place for place, row in enumerate(chosen.asking)}
        tensors = [chosen.token_ids, *chosen.told] if wanted else []
        self._tensors = [_to_host(tensor) for tensor in tensors]
        self._scores = [_to_host(tensor) for tensor in chosen.scores]
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> StepResult:
        if self._event is not None:
            try:
                self._event.synchronize()
            except torch.AcceleratorError as error:
                raise DeviceError(str(error)) from error
        result = StepResult([])
        if self._found is not None:
            _add_found(result, self._found)
        if self._drafts is not None:
            result.made = _take_drafts(self._wanted, self._drafts.tolist())
        if self._wanted:
            token_ids, *told = (tensor.tolist() for tensor in self._tensors)
            result.sampled = [_sampled(wanted, token_ids, told, self._places) for wanted in self._wanted]
        for tensor in self._scores:
            _add_scores(result, self._wanted, tensor.tolist())
        return result


def _take_drafts(wanted: list[Wanted], token_ids: list[int]) -> list[list[int]]:
    """Gives the chunks that are open their drafts, and returns these."""
    rest, made = iter(token_ids), list[list[int]]()
    for one in wanted:
        if OPEN in one.drafts[:1]:
            one.drafts = drafts = list(islice(rest, len(one.drafts)))
            made.append(drafts)
    return made


def _add_found(result: StepResult, found: PromptFindings) -> None:
    told = zip(*(tensor.tolist() for tensor in found.scores), strict=True)
    result.scored = [[_logprobs(num_top, *one) for one in islice(told, num)] for num, num_top in found.scored]
    result.pooled = [] if found.pooled is None else found.pooled.tolist()


def _add_scores(result: StepResult, wanted: list[Wanted], scores: list[float]) -> None:
    rest = iter(scores)
    for one, sampled in zip(wanted, result.sampled, strict=True):
        if one.candidates:
            sampled.scores = list(islice(rest, len(one.candidates)))


def _sampled(wanted: Wanted, token_ids: list[int], told: list[Any], places: Mapping[int, int]) -> Sampled:
    """
    Args:
        token_ids: by row.
        told: see Chosen.told.
        places: by row, its place among the T rows with log probabilities.
    """
    rows = wanted.rows
    first = token_ids[rows[0]]
    if wanted.refusal is not None or first < 0:
        return Sampled([], error=wanted.refusal or NOT_FINITE, is_finite=first >= 0)
    if wanted.drafts:
        rows = rows[: num_right([token_ids[row] for row in rows], wanted.drafts)]
        sampled = Sampled([token_ids[row] for row in rows])
    else:
        sampled = Sampled([first])
    if wanted.num_logprobs is not None:
        sampled.logprobs = [
            _logprobs(wanted.num_logprobs, *(values[places[row]] for values in told)) for row in rows
        ]
    return sampled


def num_right(token_ids: ListLike[int], drafts: ListLike[int]) -> int:
    """Returns how many of a chunk's rows count: rows after right drafts alone, up to the first one without a token.

    Args:
        token_ids: by row, one more than there are drafts.
    """
    num = 1
    for token_id, draft, after in zip(token_ids, drafts, token_ids[1:], strict=False):
        if token_id != draft or after < 0:
            break
        num += 1
    return num


def _logprobs(num: int, logprob: float, token_ids: list[int], logprobs: list[float]) -> TokenLogprobs:
    """Returns the log probabilities of one token, and of the `num` most likely ones in its place."""
    return TokenLogprobs(logprob, tuple(zip(token_ids[:num], logprobs[:num], strict=True)))


def _to_host(tensor: Tensor) -> Tensor:
    """Returns a copy that is complete when all work now in the device's queue is done."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
