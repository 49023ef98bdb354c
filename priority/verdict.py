"""The queue's two answers to a request that wants to be let in: a forecast, or a refusal."""

from __future__ import annotations

from dataclasses import dataclass

RETRY_S = (1.0, 60.0)
"""The least and the most seconds of a Retry-After."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """When the first token is expected, in seconds from now."""

    seconds: float
    """The time before which two in three first tokens come, as reported to clients."""
    late_s: float
    """The time that is compared with the promise: before it nine in ten come, times the lane's margin."""
    raw_s: float
    """The time without corrections learnt from earlier forecasts."""
    allowed_s: float
    """The time that the lane promises; infinite if it promises none."""


class Refusal(Exception):
    """A request that is not let in.

    Attributes:
        reason: machine-readable, e.g. "queue_full".
        retry_after_s: when it is worth coming back.
        tenant_limit: True if it is this tenant's own limit, False if it is the server's.
    """

    def __init__(
        self, reason: str, message: str, retry_after_s: float, *, tenant_limit: bool = False
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = min(max(retry_after_s, RETRY_S[0]), RETRY_S[1])
        self.tenant_limit = tenant_limit
