"""Why a request is not let in, and when it is worth coming back."""

from __future__ import annotations

RETRY_S = (1.0, 60.0)
"""The least and the most seconds that anybody is told to wait."""


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
