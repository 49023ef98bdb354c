"""Reservations that switches made for the requests that they sent, and which of them were let in.

A switch counts what it sent on top of what this replica says of itself, until that includes it. A ticket bears a mark
that only those can make who know the cluster's secret: clients may send a header of that name, too.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Iterator

from penstock.gateway.http.correlation import CORRELATION
from penstock.priority.routing.state import MAX_TICKETS

_MARK_CHARS = 16
_SOURCE_MARK_CHARS = 32


def ticket_of(secret: str, switch: str, number: int) -> str:
    """Returns a ticket of a switch, as its request's header has it."""
    name = f"{switch}/{number}"
    return f"{hmac.digest(secret.encode(), name.encode(), 'sha256').hex()[:_MARK_CHARS]}.{name}"


def source_of(secret: str, ticket: str, address: str) -> str:
    """Returns the header by which a switch names the replica that a request's KV is to be taken from."""
    mark = hmac.digest(secret.encode(), f"{ticket} {address}".encode(), "sha256").hex()[:_SOURCE_MARK_CHARS]
    return f"{mark}.{address}"


def source_asked(secret: str) -> str | None:
    """Returns the address that the running task's request is to take KV from; None if no switch said so.

    The secret is sent there: so nobody else may say where.
    """
    http = CORRELATION.get()
    if http is None or not http.source or not secret:
        return None
    address = http.source.partition(".")[2]
    right = source_of(secret, http.ticket, address)
    return address if hmac.compare_digest(http.source.encode(), right.encode()) else None


class Tickets:
    """Every method is for the event loop."""

    def __init__(self) -> None:
        self._let_in: dict[str, tuple[str, list[int]]] = {}
        """The secret of each switch's cluster, and its tickets that were not reported yet."""

    @contextlib.contextmanager
    def listening(self, switch: str, secret: str) -> Iterator[list[int]]:
        """Collects this switch's admitted tickets while it is entered; the caller reports and clears them."""
        mine: list[int] = []
        self._let_in[switch] = entry = secret, mine
        try:
            yield mine
        finally:
            if self._let_in.get(switch) is entry:
                del self._let_in[switch]

    def note_let_in(self) -> None:
        """The request that the running task answers is in the queue."""
        correlation = CORRELATION.get()
        if correlation is None or not correlation.ticket:
            return
        sender, _, number = correlation.ticket.rpartition("/")
        switch = sender.rpartition(".")[2]
        secret, waiting = self._let_in.get(switch, ("", None))
        if waiting is None or len(waiting) >= MAX_TICKETS or len(number) > 15 or not number.isdecimal():
            return
        right = ticket_of(secret, switch, int(number))
        if hmac.compare_digest(correlation.ticket.encode(), right.encode()):
            waiting.append(int(number))
