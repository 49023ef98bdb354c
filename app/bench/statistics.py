"""Figures from answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.app.reader import TimedAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """The outcome of one run of streams."""

    streams: int
    requests: int
    failed: int
    """Requests that were not answered whole, refused ones included."""
    refused: int
    """Requests that the server had no room for (429 or 503)."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    duration_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_frame: float
    first_error: str | None


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the closest ranks; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarise(answers: Sequence[TimedAnswer], streams: int) -> StreamFigures:
    """Rates count the tokens of answers that came whole, over the time from first request to last byte."""
    whole = [answer for answer in answers if answer.error is None and answer.token_times_s]
    failed = [answer for answer in answers if answer not in whole]
    ttft_ms = [answer.ttft_s * 1000 for answer in whole]
    gaps_ms = [gap * 1000 for answer in whole for gap in answer.gaps_s]
    output_tokens = sum(answer.num_output_tokens for answer in whole)
    num_frames = sum(len(answer.token_times_s) for answer in whole)
    duration_s = max(a.ended_s for a in answers) - min(a.started_s for a in answers)
    return StreamFigures(
        streams=streams,
        requests=len(answers),
        failed=len(failed),
        refused=sum(answer.was_refused for answer in failed),
        prompt_tokens=sum(answer.num_prompt_tokens for answer in whole),
        cached_tokens=sum(answer.num_cached_tokens for answer in whole),
        output_tokens=output_tokens,
        duration_s=duration_s,
        tokens_per_s=output_tokens / duration_s,
        ttft_p50_ms=percentile(ttft_ms, 50),
        ttft_p99_ms=percentile(ttft_ms, 99),
        itl_p50_ms=percentile(gaps_ms, 50),
        itl_p99_ms=percentile(gaps_ms, 99),
        tokens_per_frame=output_tokens / num_frames if num_frames else math.nan,
        first_error=next((answer.error or "no text came" for answer in failed), None),
    )


def rate_until(answers: Sequence[TimedAnswer], seconds: float) -> float:
    """Output tokens a second in the first `seconds` of streams; a request's frames carry equally many tokens each."""
    end_s = min(answer.started_s for answer in answers) + seconds
    return (
        sum(
            answer.num_output_tokens
            * sum(at <= end_s for at in answer.token_times_s)
            / len(answer.token_times_s)
            for answer in answers
            if answer.error is None and answer.token_times_s
        )
        / seconds
    )
