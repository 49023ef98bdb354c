"""Tickets: which of a switch's reservations it is told of as let in."""

from __future__ import annotations

from contextvars import copy_context

import pytest

from penstock.gateway.http.correlation import CORRELATION, Correlation
from penstock.gateway.tickets import Tickets, ticket_of

SECRET, LARGEST = "a secret", 10**15 - 1


@pytest.mark.parametrize(
    ("ticket", "told"),
    [
        (ticket_of(SECRET, "ab", 7), [7]),
        (ticket_of(SECRET, "ab", LARGEST), [LARGEST]),
        (ticket_of(SECRET, "ab", LARGEST + 1), []),
        (ticket_of(SECRET, "ab", 7).replace("7", "seven"), []),
        (ticket_of(SECRET, "another", 7), []),
        (ticket_of("another secret", "ab", 7), []),
        (ticket_of(SECRET, "ab", 7)[:-1] + "8", []),
        ("ab/7", []),
        ("é.ab/7", []),
        ("", []),
    ],
)
def test_a_switch_is_told_of_its_own_tickets_alone(ticket: str, told: list[int]) -> None:
    tickets, context = Tickets(), copy_context()
    context.run(CORRELATION.set, Correlation("r", "POST", "/", {}, ticket))
    with tickets.listening("ab", SECRET) as mine:
        context.run(tickets.note_let_in)
        assert mine == told
    context.run(tickets.note_let_in)  # nobody listens any more
    assert mine == told
