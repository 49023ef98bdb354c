"""Reservations that switches made for the requests that they sent, and which of them were let in.

A switch counts what it sent on top of what this replica says of itself, until that includes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from penstock.gateway.http.correlation import CORRELATION
from penstock.priority.routing.state import MAX_TICKETS


class Tickets:
    """Every method is for the event loop."""

    def __init__(self) -> None:
        self._let_in: dict[str, list[int]] = {}
        """By switch, those that it was not told of yet."""

    @contextlib.contextmanager
    def listening(self, switch: str) -> Iterator[list[int]]:
        """The tickets of this switch that are let in while this is entered; who tells it of them clears the list."""
        mine = self._let_in[switch] = []
        try:
            yield mine
        finally:
            if self._let_in.get(switch) is mine:
                del self._let_in[switch]

    def note_let_in(self) -> None:
        """The request that the running task answers is in the queue."""
        asked = CORRELATION.get()
        if asked is None or not asked.ticket:
            return
        switch, _, number = asked.ticket.rpartition("/")
        waiting = self._let_in.get(switch)
        if waiting is not None and number.isdigit() and len(number) < 16 and len(waiting) < MAX_TICKETS:
            waiting.append(int(number))
