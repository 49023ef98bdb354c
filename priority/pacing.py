"""The pace of steps: how much a step may do within the promises per token, and how much of that prompts get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite

from penstock.engine.planning.request_queue import UNLIMITED, Allowance
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.steptime import StepTimeModel

ALONE_SLACK = 1.5
"""A prompt that even alone takes longer than the promise is admitted if this multiple of that time can be kept."""
_STRETCH = 20.0
"""A prompt alone in a lane without a promise would be due after this multiple of its time."""
_MARGIN = 0.9
"""The part of a promised time per token that a step may take; the rest is for the work between steps."""
_STEPS_PER_TTFT = 8
"""No step takes longer than this part of the promise on the first token, because a newcomer may have to wait for it."""
_LEAST_PREFILL = 16
_GRAIN = 8
_CATCH_UP = 8
"""A stream without a promise decodes at least once in this many steps."""


@dataclass(frozen=True, slots=True)
class PromptPace:
    """Steps with at most so many prompt tokens, and decodes that take the fixed part of their time."""

    num_prefill: int
    fixed_s: float
    each_s: float
    """The time of a prompt token."""

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens a second, in full steps."""
        return self.num_prefill / (self.fixed_s + self.each_s * self.num_prefill)

    def seconds_for(self, num_tokens: float, *, is_filled: bool) -> float:
        """Returns the time to the end of the step that has the last of these prompt tokens; others' may fill it."""
        num_full, rest = divmod(num_tokens, self.num_prefill)
        if rest and is_filled:
            num_full, rest = num_full + 1, 0.0
        last_s = self.fixed_s + self.each_s * rest if rest else 0.0
        return num_full * (self.fixed_s + self.each_s * self.num_prefill) + last_s


@dataclass(frozen=True, slots=True)
class Streams:
    """The running sequences that decode."""

    by_lane: Mapping[Lane, int]
    num_context: float = 0.0
    """Tokens of their KV."""

    @property
    def num(self) -> int:
        return sum(self.by_lane.values())


NO_STREAMS = Streams({})


class StepPlanner:
    """Decides how much a step may do, by the lanes' promises and the model of step time.

    Drafts do not count: they get what prompts leave of the same time.
    """

    def __init__(self, policies: Mapping[Lane, LanePolicy], model: StepTimeModel) -> None:
        self.policies = policies
        self.model = model
        self._paces: dict[tuple[object, float, frozenset[Lane], int], PromptPace] = {}
        """The paces by these coefficients of the model, `_paced`."""
        self._paced: list[float] | None = None

    def allowance(self, streams: Streams, lively: Iterable[Lane]) -> Allowance:
        """Returns the allowance of a step.

        Args:
            lively: lanes in which requests are to be expected.
        """
        if not self.model.is_known:
            return UNLIMITED
        tpot_s = self._tpot_s(streams)
        num_decode = self._num_decodes(streams, tpot_s)
        newcomer_s = min((self.policies[lane].ttft_s for lane in lively), default=inf) / _STEPS_PER_TTFT
        num_prefill = min(
            max(least, self._num_prefill(cap_s, num_decode, streams.num_context))
            for cap_s, least in ((tpot_s, _LEAST_PREFILL), (newcomer_s, self._half_efficient()))
        )
        return Allowance(
            max(1, num_decode),
            max(num_prefill, _LEAST_PREFILL),
            min(tpot_s, newcomer_s),
            self.model.attended_each,
            self.model.context_each,
            _LEAST_PREFILL,
        )

    def pace(self, streams: Streams, lively: Iterable[Lane], max_batch_tokens: int) -> PromptPace:
        """Returns the pace of prompts while these streams run."""
        if self._paced is not self.model.coefficients:
            self._paces.clear()
            self._paced = self.model.coefficients
        key = tuple(streams.by_lane.items()), streams.num_context, frozenset(lively), max_batch_tokens
        if key not in self._paces:
            self._paces[key] = self._pace(streams, key[2], max_batch_tokens)
        return self._paces[key]

    def _pace(self, streams: Streams, lively: Iterable[Lane], max_batch_tokens: int) -> PromptPace:
        allowance = self.allowance(streams, lively)
        num_decode = min(streams.num, allowance.num_decodes)
        num_prefill = min(allowance.num_prefill, max(1, max_batch_tokens - num_decode))
        fixed_s = self.model.fixed_seconds(num_decode, _context_of(streams, num_decode))
        return PromptPace(num_prefill, max(1e-6, fixed_s), self.model.coefficients[1])

    def allowed_s(self, lane: Lane, work: float, max_batch_tokens: int, slack: float = ALONE_SLACK) -> float:
        """Returns the time that the lane promises to a prompt of this much work.

        Args:
            slack: the factor by which forecasts may be wrong; an idle server refuses nobody for that.
        """
        ttft_s = self.policies[lane].ttft_s
        if not isfinite(ttft_s):
            return inf
        alone_s = self.pace(NO_STREAMS, [lane], max_batch_tokens).seconds_for(work, is_filled=False)
        return max(ttft_s, max(slack, ALONE_SLACK) * alone_s)

    def due_s(self, lane: Lane, work: float) -> float:
        """Returns the time after which a prompt of this much work is due: in a patient lane, the shorter the sooner.

        The longer it takes alone, the closer it comes to the promise, so that prompts of different lengths are told
        apart on machines of any speed. No time is shorter than the shortest promise of any lane: in the most urgent
        lane, the order is that of arrival.
        """
        ttft_s = self.policies[lane].ttft_s
        if not isfinite(ttft_s):
            return 0.0
        stretched_s = _STRETCH * self.model.coefficients[1] * work
        if not self.model.is_known or not stretched_s:
            return ttft_s
        least_s = min(policy.ttft_s for policy in self.policies.values())
        return max(least_s, 1 / (1 / ttft_s + 1 / stretched_s))

    def _tpot_s(self, streams: Streams) -> float:
        """Returns the time that the least of the streams' promises leaves a step."""
        alone_s = self._decode_s(streams, 1)
        promised = (self.policies[lane].tpot_s for lane in streams.by_lane)
        # A promise that not even a single stream could be kept does not bind.
        return min((s * _MARGIN for s in promised if s >= alone_s), default=inf)

    def _half_efficient(self) -> int:
        """Returns the prompt tokens that take as long as the rest of their step."""
        fixed_s, beta_s = self.model.fixed_seconds(0, 0), self.model.coefficients[1]
        return int(fixed_s / beta_s) if beta_s > 0 else 0

    def _decode_s(self, streams: Streams, num: int) -> float:
        """Returns the time of a step in which only so many of the streams decode."""
        return self.model.seconds(0, num, _context_of(streams, num))

    def _num_decodes(self, streams: Streams, tpot_s: float) -> int:
        """Returns how many may decode: all, unless those without a promise make the others miss theirs."""
        excess_s = self._decode_s(streams, streams.num) - tpot_s
        patient = sum(n for lane, n in streams.by_lane.items() if not isfinite(self.policies[lane].tpot_s))
        if excess_s <= 0 or not patient:
            return streams.num
        each_s = self._decode_s(streams, streams.num) - self._decode_s(streams, streams.num - 1)
        too_many = int(excess_s / each_s) + 1 if each_s > 0 else patient
        return streams.num - min(too_many, patient - -(-patient // _CATCH_UP))

    def _num_prefill(self, cap_s: float, num_decode: int, num_context: float) -> int:
        """Returns the first tokens of a prompt for which a step of `cap_s` has room after its decodes."""
        fitting = self.model.prefill_within(cap_s, num_decode, num_context)
        return int(min(fitting, UNLIMITED.num_prefill)) // _GRAIN * _GRAIN


def _context_of(streams: Streams, num: int) -> float:
    """Returns the tokens of KV of so many of the streams."""
    return streams.num_context * num / max(1, streams.num)
