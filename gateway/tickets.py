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


def ticket_of(secret: str, switch: str, number: int) -> str:
    """Returns a ticket of a switch, as its request's header has it."""
    name = f"{switch}/{number}"
    return f"{hmac.digest(secret.encode(), name.encode(), 'sha256').hex()[:_MARK_CHARS]}.{name}"


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
