"""Quotas: the store reserves a request's tokens before it is queued, and is charged the real use at its end.

How long an answer will be nobody knows when it is asked for, so what is reserved is a guess from the tenant's last
answers; the difference is charged or given back. Nothing but the first question is ever waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from weakref import WeakSet

from penstock.gateway.access.keys import UNBOUNDED, Client
from penstock.gateway.background import every, meanwhile
from penstock.gateway.errors import ApiError
from penstock.gateway.http.correlation import ANTHROPIC_PATH, CORRELATION
from penstock.gateway.store.interface import LEASE_S, Allotment, Grant, Quota, Store, StoreUnavailable, Window

log = logging.getLogger("penstock.gateway")

FIRST_GUESS_TOKENS = 512
"""The output that is expected of a tenant few of whose answers are known."""
_NUM_OUTPUTS = 64
_FEW_OUTPUTS = 8
_RECENT_S = 3_600.0
_QUANTILE = 0.75
_LAST_WORDS_S = 1.0
_NO_RETRY = {"x-should-retry": "false"}
_BOUNDS = {
    "requests": "requests per min (RPM)",
    "tokens": "tokens per min (TPM)",
    "streams": "requests at a time",
    "requests-day": "requests per day (RPD)",
    "tokens-day": "tokens per day (TPD)",
    "requests-month": "requests per month",
    "tokens-month": "tokens per month",
}
HEADERS = [
    f"x-ratelimit-{what}-{bound}"
    for what in ("limit", "remaining", "reset")
    for bound in _BOUNDS
    if bound != "streams"
]
"""OpenAI's names for bounds per minute; the others have the window at the end, as Cerebras has it."""
ANTHROPIC_HEADERS = [
    f"anthropic-ratelimit-{bound}-{what}"
    for bound in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
]


@dataclass(eq=False, slots=True, weakref_slot=True)
class QuotaReservation:
    """A reservation is one request's part of its tenant's quota, until `end`.

    Its lease is renewed for as long as somebody holds it: one that is lost without an end is over after `LEASE_S`.
    """

    quotas: Quotas
    client: Client
    lease_id: str
    num_prompt: int
    windows: Sequence[Window] = ()
    """The days and months in which it counts: those in which it began."""
    num_reserved: int | None = None
    """None if nothing was reserved: there is no quota, or the store did not answer."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """OpenAI's x-ratelimit headers, which say where the tenant stands; none without a quota."""
    ended: bool = False

    def end(self, num_tokens_used: int) -> None:
        """Charges the used tokens, prompt and output, instead of the reserved ones. Only the first call counts."""
        if not self.ended:
            self.ended = True
            self.quotas.settle(self, num_tokens_used)


class Quotas:
    """Quotas stand between the endpoints and the store, on the event loop's thread."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._clock = clock
        self._wall_clock = wall_clock
        self._open: WeakSet[QuotaReservation] = WeakSet()
        self._outputs: dict[str, deque[tuple[float, int]]] = {}
        """The end times and token counts of each tenant's last answers."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def reserve(
        self, client: Client, num_prompt_tokens: int, max_output_tokens: int, lease_id: str
    ) -> QuotaReservation:
        """Reserves room for one request with all its prompts and choices. A store in trouble refuses nobody.

        Without an id of a lease it does not count as one at work, and has no end.

        Raises:
            ApiError: 429 if a bound is reached; without Retry-After if the prompt alone is more than ever fits.
        """
        if client.quota is UNBOUNDED or client.quota == UNBOUNDED:
            return QuotaReservation(self, client, lease_id, num_prompt_tokens)
        windows = windows_of(client.quota, self._wall_clock())
        reservation = QuotaReservation(self, client, lease_id, num_prompt_tokens, windows)
        num_tokens = self._cost(client, num_prompt_tokens, max_output_tokens) if lease_id else 0
        try:
            grant = await self._store.reserve(client.tenant.name, client.quota, num_tokens, lease_id, windows)
        except StoreUnavailable:
            return reservation
        except asyncio.CancelledError:
            self._release(reservation)
            raise
        if grant.refused is not None:
            raise _refusal(grant, client.quota, num_tokens, windows, self._wall_clock())
        reservation.num_reserved = num_tokens
        reservation.headers = _headers(grant, windows, self._wall_clock())
        if lease_id:
            self._open.add(reservation)
        return reservation

    def settle(self, reservation: QuotaReservation, num_tokens_used: int) -> None:
        """Charges the used tokens; `QuotaReservation.end` calls it."""
        tenant, quota = reservation.client.tenant.name, reservation.client.quota
        if quota == UNBOUNDED:
            return
        self._open.discard(reservation)
        if num_tokens_used > reservation.num_prompt:
            outputs = self._outputs.setdefault(tenant, deque(maxlen=_NUM_OUTPUTS))
            outputs.append((self._clock(), num_tokens_used - reservation.num_prompt))
        counts_tokens = quota.tokens_per_minute is not None or reservation.windows
        if reservation.num_reserved is not None and counts_tokens:
            num_more, lease_id = num_tokens_used - reservation.num_reserved, reservation.lease_id
            self._spawn(self._store.settle(tenant, quota, num_more, lease_id, reservation.windows))
        self._release(reservation)

    async def count(self, client: Client) -> Mapping[str, str]:
        """Counts a request that is never at work, as one that looks something up; returns the quota's headers.

        Raises:
            ApiError: 429 if the bound of requests is reached.
        """
        quota = replace(client.quota.of_requests(), max_streams=None)
        return (await self.reserve(replace(client, quota=quota), 0, 0, "")).headers

    async def renew(self) -> None:
        """Renews the leases of all requests at work. `running` does it often enough."""
        reservations = list(self._open)
        if not reservations:
            return
        with contextlib.suppress(StoreUnavailable):
            await self._store.renew([(r.client.tenant.name, r.lease_id) for r in reservations])
        for reservation in reservations:
            # The renewal may have come after its release.
            if reservation.ended:
                self._release(reservation)

    async def standings(self, clients: Sequence[Client]) -> list[tuple[Sequence[Window], Grant]]:
        """Returns where clients stand, and in which windows; without asking for anything."""
        now_s = self._wall_clock()
        windows = [windows_of(client.quota, now_s) for client in clients]
        grants = await self._store.standings(
            [(client.tenant.name, client.quota, of) for client, of in zip(clients, windows, strict=True)]
        )
        return list(zip(windows, grants, strict=True))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renews leases while it is entered, and writes pending changes to the store when it ends."""
        try:
            async with meanwhile(every(LEASE_S / 3, self.renew, "renewing the leases")):
                yield
        finally:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_LAST_WORDS_S)

    def _cost(self, client: Client, num_prompt: int, max_output: int) -> int:
        """The tokens to reserve: a guess that always fits, but at least the prompt and one token."""
        quota = client.quota
        limits = (quota.tokens_per_minute, quota.tokens_per_day, quota.tokens_per_month)
        guess = num_prompt + min(max_output, self._typical_output(client.tenant.name))
        limit = min((limit for limit in limits if limit is not None), default=guess)
        return max(num_prompt + 1, min(guess, limit))

    def _typical_output(self, tenant: str) -> int:
        """The length that three quarters of the tenant's recent answers do not exceed."""
        horizon = self._clock() - _RECENT_S
        recent = sorted(num_tokens for end_s, num_tokens in self._outputs.get(tenant, ()) if end_s >= horizon)
        if len(recent) < _FEW_OUTPUTS:
            return FIRST_GUESS_TOKENS
        return recent[math.ceil(_QUANTILE * len(recent)) - 1]

    def _release(self, reservation: QuotaReservation) -> None:
        self._spawn(self._store.release(reservation.client.tenant.name, reservation.lease_id))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        # Of nobody's own context: what its request has waited for Redis is no reason not to tell it.
        task = asyncio.create_task(_tell(work), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _tell(work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except StoreUnavailable:
        pass  # a lease runs out by itself, and within a minute so does a reservation
    except Exception:
        log.exception("telling the store of the end of a request failed")


def windows_of(quota: Quota, now_s: float) -> tuple[Window, ...]:
    """Returns the windows in which a quota has a bound, for a request that comes at `now_s` (seconds since 1970)."""
    now = datetime.fromtimestamp(now_s, UTC)
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    month = day.replace(day=1)
    next_month = (month + timedelta(days=32)).replace(day=1)
    bounded = (
        ("day", f"{day:%Y-%m-%d}", day + timedelta(days=1), quota.requests_per_day, quota.tokens_per_day),
        ("month", f"{day:%Y-%m}", next_month, quota.requests_per_month, quota.tokens_per_month),
    )
    return tuple(
        Window(name, date, max_requests, max_tokens, end.timestamp() - now_s, end.timestamp())
        for name, date, end, max_requests, max_tokens in bounded
        if (max_requests, max_tokens) != (None, None)
    )


def allotments(grant: Grant, windows: Sequence[Window]) -> dict[str, Allotment]:
    """Returns where a tenant stands against each of its bounds: "requests" and "tokens" per minute, "tokens-day"..."""
    standings = {"requests": grant.requests, "tokens": grant.tokens}
    for window, use in zip(windows, grant.uses, strict=True):
        counts = {
            "requests": (window.max_requests, use.requests),
            "tokens": (window.max_tokens, use.tokens),
        }
        for unit, (limit, used) in counts.items():
            if limit is not None:
                left = Allotment(limit, max(0, limit - used), window.left_s)
                standings[f"{unit}-{window.name}"] = left
    return {bound: allotment for bound, allotment in standings.items() if allotment is not None}


def duration(seconds: float) -> str:
    """Writes a duration as Go and OpenAI do: 0s, 12ms, 1.5s, 6m0s, 1h0m0s; it is rounded up to milliseconds."""
    milliseconds = max(0, math.ceil(round(seconds * 1000, 3)))
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    whole, part = divmod(rest, 1000)
    text = f"{whole}.{part:03}".rstrip("0").rstrip(".") + "s" if part else f"{whole}s"
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def _headers(grant: Grant, windows: Sequence[Window], now_s: float) -> dict[str, str]:
    """Returns the headers that say where a tenant stands, in Anthropic's form as well where its API is asked."""
    headers: dict[str, str] = {}
    request = CORRELATION.get()
    is_anthropic = request is not None and request.path.startswith(ANTHROPIC_PATH)
    for bound, allotment in allotments(grant, windows).items():
        limit, remaining = str(allotment.limit), str(max(0, allotment.remaining))
        if is_anthropic and bound in ("requests", "tokens"):
            start, reset = f"anthropic-ratelimit-{bound}", utc(now_s + allotment.reset_s)
            headers |= {f"{start}-limit": limit, f"{start}-remaining": remaining, f"{start}-reset": reset}
        headers[f"x-ratelimit-limit-{bound}"] = limit
        headers[f"x-ratelimit-remaining-{bound}"] = remaining
        headers[f"x-ratelimit-reset-{bound}"] = duration(allotment.reset_s)
    return headers


def _refusal(
    grant: Grant, quota: Quota, num_tokens: int, windows: Sequence[Window], now_s: float
) -> ApiError:
    bound = grant.refused
    assert bound is not None
    limit, used, requested = _figures(grant, quota, num_tokens, windows)
    headers = _headers(grant, windows, now_s)
    if math.isinf(grant.retry_after_s):
        message = (
            f"Request too large for {_BOUNDS[bound]}: Limit {limit}, "
            f"Requested {requested}. It can never fit; make it smaller."
        )
        return _limited(message, None, headers | _NO_RETRY)
    message = f"Rate limit reached on {_BOUNDS[bound]}: Limit {limit}, Used {used}, Requested {requested}. "
    window = next((window for window in windows if bound.endswith(f"-{window.name}")), None)
    if window is None:
        message += f"Please try again in {duration(grant.retry_after_s)}."
        return _limited(message, grant.retry_after_s, headers)
    message += f"The {window.name} ends at {utc(window.ends_s)}, in {duration(math.ceil(window.left_s))}."
    # A client's own retries come within seconds: they are of no use here.
    return _limited(message, None, headers | _NO_RETRY | {"retry-after": str(math.ceil(window.left_s))})


def _figures(
    grant: Grant, quota: Quota, num_tokens: int, windows: Sequence[Window]
) -> tuple[int | None, int | None, int]:
    """Returns the limit that is reached, its used part, and the requested amount."""
    assert grant.refused is not None
    if grant.refused == "streams":
        return quota.max_streams, quota.max_streams, 1
    allotment = allotments(grant, windows)[grant.refused]
    requested = num_tokens if grant.refused.startswith("tokens") else 1
    return allotment.limit, allotment.limit - allotment.remaining, requested


def utc(seconds: float) -> str:
    """Writes a time in seconds since 1970 as RFC 3339 does."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _limited(message: str, retry_after_s: float | None, headers: Mapping[str, str]) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        message,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
        extra_headers=headers,
    )
