"""The calendar's windows of a quota: the present day and month, in UTC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from penstock.gateway.store.interface import Allotment, Grant, Quota, Window


def windows_of(quota: Quota, now_s: float) -> tuple[Window, ...]:
    """Returns the windows in which a quota has a bound, for a request that comes at `now_s` (seconds since 1970)."""
    now = datetime.fromtimestamp(now_s, UTC)
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    month = day.replace(day=1)
    bounded = (
        ("day", day, day + timedelta(days=1), quota.requests_per_day, quota.tokens_per_day),
        (
            "month",
            month,
            (month + timedelta(days=32)).replace(day=1),
            quota.requests_per_month,
            quota.tokens_per_month,
        ),
    )
    return tuple(
        Window(
            name,
            begin.strftime("%Y-%m-%d" if name == "day" else "%Y-%m"),
            max_requests,
            max_tokens,
            end.timestamp() - now_s,
            end.timestamp(),
        )
        for name, begin, end, max_requests, max_tokens in bounded
        if max_requests is not None or max_tokens is not None
    )


def allotments(grant: Grant, windows: Sequence[Window]) -> dict[str, Allotment]:
    """Returns where a tenant stands against each of its bounds: "requests" and "tokens" per minute, "tokens-day"..."""
    standing = {"requests": grant.requests, "tokens": grant.tokens, **dict(_in_windows(grant, windows))}
    return {bound: allotment for bound, allotment in standing.items() if allotment is not None}


def _in_windows(grant: Grant, windows: Sequence[Window]) -> Iterator[tuple[str, Allotment]]:
    for window, use in zip(windows, grant.uses, strict=True):
        limits = {"requests": window.max_requests, "tokens": window.max_tokens}
        for unit, limit in limits.items():
            if limit is not None:
                used = use.requests if unit == "requests" else use.tokens
                yield f"{unit}-{window.name}", Allotment(limit, max(0, limit - used), window.left_s)
