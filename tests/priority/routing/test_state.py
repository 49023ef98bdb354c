"""Messages of replicas survive the wire, and a malformed one is refused by the name of its field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from penstock.gateway.endpoints.state import state_line
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.routing.state import (
    MAX_TENANTS,
    OTHERS,
    Change,
    LaneWork,
    Snapshot,
    StateError,
    parse_change,
    parse_snapshot,
    with_largest,
)
from tests.priority.routing.messages import chain, change, load, snapshot

BUSY = replace(
    load(
        {
            Lane.STANDARD: LaneWork(
                queued={"a": 5, "b": 7},
                num_waiting=3,
                num_running=2,
                num_prefill_left=9,
                is_lively=True,
                factor=1.25,
            )
        },
        num_running=4,
        num_free_kv=1_000,
    ),
    context_each=12.5,
    step_s=0.02,
    is_draining=True,
)
SNAPSHOT = snapshot("a", BUSY, blocks=chain("x", 3))
CHANGE = change("a", 7, BUSY, stored=chain("y", 2), removed=chain("x", 1), counted=[5])
BATCH = str(Lane.BATCH.value)
Wire = dict[str, Any]


def sent(message: Snapshot | Change) -> Wire:
    """Returns the message as it comes out at the other end, before it is read."""
    received: Wire = orjson.loads(state_line(message))
    return received


def test_what_is_sent_is_what_is_received() -> None:
    assert parse_snapshot(sent(SNAPSHOT)) == SNAPSHOT
    assert parse_change(sent(CHANGE)) == CHANGE
    alive = change("a", 8, stored=[], removed=[], counted=[])
    assert parse_change(sent(alive)) == alive


def test_a_lane_that_the_other_side_does_not_have_is_idle_and_one_that_is_not_known_here_is_named() -> None:
    batch = str(Lane.BATCH.value)
    message = sent(SNAPSHOT)
    del message["load"]["lanes"][batch], message["policies"][batch]
    read = parse_snapshot(message)
    assert (read.load.lanes[Lane.BATCH], read.policies[Lane.BATCH]) == (LaneWork(), LanePolicy())
    message["load"]["lanes"]["3"] = message["load"]["lanes"]["0"]
    with pytest.raises(StateError, match=r"snapshot\.load\.lanes\.3 is no lane here"):
        parse_snapshot(message)


WRONG_QUEUES: list[object] = [[], {"t": -1}, {"t" * 300: 1}, {str(i): 1 for i in range(MAX_TENANTS + 2)}]


def put(*path: str, value: object) -> Callable[[Wire], object]:
    def edit(message: Wire) -> None:
        for name in path[:-1]:
            message = message[name]
        message[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda m: m.pop("epoch"), "snapshot.epoch is missing"),
        (put("extra", value=1), "snapshot.extra is unknown"),
        (put("replica", value=""), "snapshot.replica must be a text of 1 to 256 characters"),
        (put("block_size", value=0), "snapshot.block_size must be a whole number of at least 1"),
        (put("num_kv_tokens", value=2.0), "snapshot.num_kv_tokens must be a whole number"),
        (put("max_num_seqs", value=True), "snapshot.max_num_seqs must be a whole number"),
        (put("blocks", value="ab"), "snapshot.blocks must be up to"),
        *(
            (put("blocks", value=[wrong]), "snapshot.blocks must be up to")
            for wrong in ("ab", "zz" * 16, " " * 32, 7)
        ),
        (put("policies", value={"batch": {}}), "snapshot.policies.batch is no lane here"),
        (lambda m: m["policies"][BATCH].pop("ageing_s"), "snapshot.policies.batch.ageing_s is missing"),
        (
            put("policies", BATCH, "ttft_s", value=0),
            "snapshot.policies.batch: ttft_s must be greater than 0",
        ),
        (
            put("policies", BATCH, "weight", value="1"),
            "snapshot.policies.batch.weight must be a whole number",
        ),
        (put("load", value=None), "snapshot.load must be an object"),
        (put("load", "step_s", value=-1), "snapshot.load.step_s must be a number of at least 0"),
        (put("load", "is_draining", value=1), "snapshot.load.is_draining must be true or false"),
        (
            put("load", "coefficients", value=[1, 2, 3]),
            "snapshot.load.coefficients must be a list of 5 numbers",
        ),
        (
            put("load", "coefficients", value=[1, 2, 3, None]),
            "snapshot.load.coefficients must be a list of 5 numbers",
        ),
        (
            put("load", "held", "num_kv", value=2**60),
            "snapshot.load.held.num_kv must be a whole number",
        ),
        *(
            (
                put("load", "lanes", BATCH, "queued", value=queued),
                "snapshot.load.lanes.batch.queued must be an object of whole numbers by at most 65 names",
            )
            for queued in WRONG_QUEUES
        ),
    ],
)
def test_a_malformed_message_is_refused_by_field(edit: Callable[[Wire], object], complaint: str) -> None:
    message = sent(SNAPSHOT)
    edit(message)
    with pytest.raises(StateError) as raised:
        parse_snapshot(message)
    assert str(raised.value).startswith(complaint)


@pytest.mark.parametrize("counted", [[-1], [1.5], ["1"], [True], 7, {}])
def test_tickets_are_whole_numbers(counted: object) -> None:
    message = sent(CHANGE) | {"counted": counted}
    with pytest.raises(StateError, match=r"change\.counted must be"):
        parse_change(message)


@pytest.mark.parametrize("message", [None, [], "x", 1, {}])
def test_what_is_no_message_is_refused(message: object) -> None:
    for parse in (parse_snapshot, parse_change):
        with pytest.raises(StateError):
            parse(message)


def test_numbers_that_json_can_hold_and_arithmetic_cannot_are_refused() -> None:
    message = sent(SNAPSHOT)
    put("load", "step_s", value=float("nan"))(message)
    with pytest.raises(StateError, match=r"snapshot\.load\.step_s"):
        parse_snapshot(message)


def test_of_many_tenants_the_largest_are_told_apart() -> None:
    queued = {f"tenant {i}": i for i in range(1, 101)}
    kept = with_largest(queued)
    assert len(kept) == MAX_TENANTS + 1
    assert sum(kept.values()) == sum(queued.values())
    assert min(tokens for tenant, tokens in kept.items() if tenant != OTHERS) == 37
    assert with_largest({"a": 1}) == {"a": 1}
