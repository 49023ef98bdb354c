"""The choice of a replica: soonest first token, longest hit among equals, reserved at once, refused if all are late."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.priority.lanes import Lane
from penstock.priority.routing.router import (
    LEASE_S,
    LONG_PROMPT,
    STALE_S,
    OutOfStep,
    Placement,
    RouteQuery,
    Router,
)
from penstock.priority.routing.state import Change, LaneWork, Load, Role, StateError
from penstock.priority.verdict import Refusal
from tests.few import examples
from tests.priority.routing.messages import ask, chain, change, load, snapshot

SYSTEM = chain("system", 64)


def router_of(states: Mapping[str, Load], blocks: Mapping[str, Sequence[bytes]] | None = None) -> Router:
    router = Router()
    for name, state in states.items():
        router.on_snapshot(snapshot(name, state, blocks=(blocks or {}).get(name, ())), 0.0)
    return router


def chosen(router: Router, request: RouteQuery, now: float = 0.0, excluded: Iterable[str] = ()) -> Placement:
    found = router.choose(request, now, excluded)
    assert isinstance(found, Placement), found
    return found


def refused(router: Router, request: RouteQuery, now: float = 0.0) -> Refusal:
    found = router.choose(request, now)
    assert isinstance(found, Refusal), found
    return found


# Where to


def test_the_replica_that_holds_the_prefix_is_chosen() -> None:
    router = router_of({"a": load(), "b": load(), "c": load()}, {"b": SYSTEM[:40]})
    found = chosen(router, ask(SYSTEM))
    assert (found.replica, found.num_cached) == ("b", 640)


def test_the_longest_hit_is_chosen_of_several() -> None:
    blocks = {"a": SYSTEM[:20], "b": SYSTEM[:60], "c": SYSTEM[:40]}
    router = router_of(dict.fromkeys("abc", load()), blocks)
    assert chosen(router, ask(SYSTEM)).replica == "b"
    router.on_change("b", change("b", 1, removed=SYSTEM[30:60]), 0.0)
    assert chosen(router, ask(SYSTEM, tenant="other"), excluded=["b"]).replica == "c"


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    router = router_of({"a": load()}, {"a": SYSTEM})
    assert chosen(router, ask(SYSTEM, num_prompt=1_024)).num_cached == 1_023


def test_a_hot_prefix_spreads_once_its_home_is_later_than_a_cold_prefill() -> None:
    """1,024 tokens take 29 ms in a cold replica; at home that much has to wait in the queue for it to be worth it."""
    router = router_of({"home": load(queued=500), "cold": load()}, {"home": SYSTEM})
    assert chosen(router, ask(SYSTEM)).replica == "home"
    router = router_of({"home": load(queued=2_000), "cold": load()}, {"home": SYSTEM})
    assert chosen(router, ask(SYSTEM)).replica == "cold"


def test_without_any_hit_replicas_take_turns() -> None:
    router = router_of(dict.fromkeys("abc", load()))
    order = []
    for number in range(9):
        found = chosen(router, ask(chain(f"prompt {number}", 4)))
        router.note_done(found.ticket)
        order.append(found.replica)
    assert order == ["a", "b", "c"] * 3


def test_a_busy_lane_does_not_keep_more_urgent_requests_away() -> None:
    """Batch work that waits at a counts for batch, and hardly for what goes before it."""
    flooded = load({Lane.BATCH: LaneWork(queued={"a": 50_000}, num_waiting=20)})
    router = router_of({"a": flooded, "b": load(queued=4_000)})
    assert chosen(router, ask(num_prompt=100, lane=Lane.BATCH)).replica == "b"
    assert chosen(router, ask(num_prompt=100)).replica == "a"


def test_a_full_kv_pool_is_waited_for() -> None:
    router = router_of({"a": load(num_free_kv=50, num_running=10), "b": load(queued=1_500)})
    assert chosen(router, ask(num_prompt=1_000)).replica == "b"


def test_those_excluded_draining_silent_or_gone_are_passed_over() -> None:
    router = router_of(dict.fromkeys("abc", load()), {"a": SYSTEM})
    assert chosen(router, ask(SYSTEM), excluded=["a"]).replica == "b"
    router.on_change("a", change("a", 1, load(is_draining=True)), 0.5)
    router.on_change("b", change("b", 1), 0.5)
    assert chosen(router, ask(SYSTEM), STALE_S + 0.1).replica == "b"  # c has said nothing for too long
    router.on_change("c", change("c", 1), STALE_S + 0.1)
    router.on_gone("b")
    assert chosen(router, ask(SYSTEM), STALE_S + 0.1).replica == "c"
    router.on_gone("c")
    assert refused(router, ask(SYSTEM), STALE_S + 0.1).reason == "no_replica"


# Together with a source


BUSY = load({Lane.INTERACTIVE: LaneWork(num_running=1, num_prefill_left=10_000)}, pull_rate=1e6)
FAST = load(pull_rate=1e6)


def test_a_prefix_is_taken_from_its_busy_home_where_that_is_sooner() -> None:
    router = router_of({"home": BUSY, "cold": FAST}, {"home": SYSTEM[:60], "cold": SYSTEM[:10]})
    found = chosen(router, ask(SYSTEM))
    assert (found.replica, found.source) == ("cold", "home")
    assert (found.num_cached, found.num_pulled) == (160, 800)
    alone = chosen(router_of({"cold": load()}, {"cold": SYSTEM[:10]}), ask(SYSTEM))
    assert found.forecast_s < alone.forecast_s


@pytest.mark.parametrize("pull_rate", [0.0, 1e3])
def test_nothing_is_taken_that_is_computed_sooner(pull_rate: float) -> None:
    """At 1,000 tokens a second a prefix of 1,024 takes a second, and 29 ms in a cold replica."""
    states = {"home": BUSY, "cold": load(pull_rate=pull_rate)}
    found = chosen(router_of(states, {"home": SYSTEM}), ask(SYSTEM))
    assert (found.replica, found.source, found.num_pulled) == ("cold", None, 0)


def test_who_holds_the_prefix_is_chosen_as_long_as_it_is_as_soon() -> None:
    router = router_of({"home": FAST, "cold": FAST}, {"home": SYSTEM})
    found = chosen(router, ask(SYSTEM))
    assert (found.replica, found.source) == ("home", None)


def test_blocks_that_are_only_expected_are_taken_from_nobody() -> None:
    router = router_of({"home": FAST, "cold": FAST})
    home = chosen(router, ask(SYSTEM)).replica
    router.on_change(home, change(home, 1, BUSY), 0.0)
    assert chosen(router, ask(SYSTEM, tenant="b")).source is None
    router.on_change(home, change(home, 2, BUSY, stored=SYSTEM), 0.0)
    assert chosen(router, ask(SYSTEM, tenant="c"), excluded=[home]).source is None
    other = chosen(router_of({"h": BUSY, "c": FAST}, {"h": SYSTEM}), ask(SYSTEM))
    assert other.source == "h"


def test_the_least_busy_of_those_that_hold_it_is_the_source() -> None:
    running = {num: LaneWork(num_running=1, num_prefill_left=num) for num in (10_000, 20_000)}
    states = {
        "busier": load({Lane.INTERACTIVE: running[20_000]}),
        "busy": load({Lane.INTERACTIVE: running[10_000]}),
    }
    states["cold"] = FAST
    found = chosen(router_of(states, {"busier": SYSTEM, "busy": SYSTEM}), ask(SYSTEM))
    assert (found.replica, found.source) == ("cold", "busy")


# By role


LONG = ask(chain("long", 100))


def roles_of(**roles: Role) -> Router:
    router = Router()
    for name, role in roles.items():
        router.on_snapshot(snapshot(name, FAST, role=role), 0.0)
    return router


def computed(router: Router, request: RouteQuery) -> str | None:
    """The replica that computes the prompt for another one."""
    found = router.choose_prefill(request, 0.0)
    return None if found is None else found.replica


def test_a_long_prompt_is_computed_by_one_and_goes_on_at_another() -> None:
    router = roles_of(p=Role.PREFILL, d=Role.DECODE)
    first = router.choose_prefill(LONG, 0.0)
    assert first is not None
    assert (first.replica, first.num_cached, router.num_reserved) == ("p", 0, 1)
    router.note_done(first.ticket)
    found = chosen(router, replace(LONG, source="p"))
    assert (found.replica, found.source) == ("d", "p")
    assert found.num_pulled == LONG.num_prompt - 1


def test_a_short_prompt_or_one_that_is_there_is_computed_where_it_goes_on() -> None:
    router = roles_of(p=Role.PREFILL, d=Role.DECODE)
    assert computed(router, ask(num_prompt=LONG_PROMPT)) is None
    assert computed(router, ask(num_prompt=LONG_PROMPT + 1)) == "p"
    router.on_change("d", change("d", 1, stored=LONG.hashes[:90]), 0.0)
    assert computed(router, LONG) is None
    assert chosen(router, LONG).replica == "d"


@pytest.mark.parametrize(
    "roles", [{"a": Role.PREFILL, "b": Role.PREFILL}, {"a": Role.DECODE}, {"a": Role.BOTH, "b": Role.DECODE}]
)
def test_where_a_role_is_missing_the_others_serve_all_of_a_request(roles: dict[str, Role]) -> None:
    router = roles_of(**roles)
    assert computed(router, LONG) is None
    assert chosen(router, LONG).replica in roles


def test_a_replica_for_both_takes_the_place_of_either() -> None:
    router = roles_of(p=Role.PREFILL, b=Role.BOTH)
    assert computed(router, LONG) == "p"
    assert chosen(router, LONG).replica == "b"
    router.on_gone("p")
    assert computed(router, LONG) is None
    assert chosen(router, LONG).replica == "b"


def test_nobody_waits_for_a_replica_of_prompts_that_would_be_late() -> None:
    router = roles_of(p=Role.PREFILL, d=Role.DECODE)
    router.on_change("p", change("p", 1, load(queued=500_000)), 0.0)
    assert computed(router, LONG) is None


def test_a_source_that_is_gone_is_no_source() -> None:
    router = roles_of(p=Role.PREFILL, d=Role.DECODE)
    router.on_gone("p")
    assert chosen(router, replace(LONG, source="p")).source is None


# Reserved


def test_a_burst_does_not_herd() -> None:
    """Nobody pushes anything between these: each sees what was sent before it."""
    router = router_of(dict.fromkeys("abcd", load()))
    counts = dict.fromkeys("abcd", 0)
    for number in range(40):
        counts[chosen(router, ask(chain(f"{number}", 60), tenant=f"tenant {number}")).replica] += 1
    assert set(counts.values()) == {10}


def test_what_was_sent_is_expected_to_be_held_there() -> None:
    router = router_of(dict.fromkeys("abc", load()))
    first = chosen(router, ask(SYSTEM))
    second = chosen(router, ask(SYSTEM))
    assert (second.replica, second.num_cached) == (first.replica, 1_024)
    for found in (first, second):
        router.note_done(found.ticket)
    assert chosen(router, ask(SYSTEM)).num_cached == 0


def test_a_reservation_lasts_until_the_replica_counts_it() -> None:
    router = router_of({"a": load()})
    idle_s = chosen(router, ask(num_prompt=10_000)).forecast_s
    assert chosen(router, ask(num_prompt=10_000)).forecast_s > 1.9 * idle_s
    router.on_change("a", change("a", 1, load(), counted=[1, 2]), 0.0)
    assert chosen(router, ask(num_prompt=10_000)).forecast_s == pytest.approx(idle_s)


@pytest.mark.parametrize("ending", ["done", "gone", "expired"])
def test_a_reservation_is_released_whatever_becomes_of_it(ending: str) -> None:
    router = router_of({"a": load()})
    found = chosen(router, ask(SYSTEM))
    if ending == "done":
        router.note_done(found.ticket)
        router.note_done(found.ticket)
    elif ending == "gone":
        router.on_gone("a")
        router.on_snapshot(snapshot("a"), 0.0)
    later = LEASE_S + 1.0
    router.on_change("a", change("a", 1), later)
    again = chosen(router, ask(SYSTEM), later)
    assert (again.num_cached, again.forecast_s) == (0, found.forecast_s)
    assert router.num_reserved == 1


# Refused


def test_what_would_be_late_everywhere_is_refused_with_the_least_retry_after() -> None:
    """At 32,000 tokens a second, 100,000 tokens before it are 3 s; the promise is 1 s."""
    router = router_of({"a": load(queued=400_000), "b": load(queued=100_000)})
    refusal = refused(router, ask(num_prompt=20_000))
    assert refusal.reason == "promise_out_of_reach"
    assert refused(router, ask(num_prompt=100)).retry_after_s == pytest.approx(2.3, abs=0.5)
    assert chosen(router, ask(num_prompt=100, lane=Lane.STANDARD)).replica == "b"
    assert router.num_reserved == 1


def test_a_stream_that_names_no_lane_goes_where_the_interactive_promise_is_kept() -> None:
    router = router_of({"a": load(queued=400_000), "b": load()})
    stream = ask(num_prompt=100, lane=Lane.STANDARD, tried=Lane.INTERACTIVE)
    choice = chosen(router, stream)
    assert (choice.replica, router.replicas["b"].open[choice.ticket].lane) == ("b", Lane.INTERACTIVE)
    choice = chosen(router, stream, excluded=["b"])
    assert (choice.replica, router.replicas["a"].open[choice.ticket].lane) == ("a", Lane.STANDARD)


def test_a_promise_for_one_request_takes_the_place_of_its_lane_s() -> None:
    router = router_of({"a": load(queued=100_000)})
    assert chosen(router, ask(num_prompt=100, ttft_s=5.0)).replica == "a"
    assert (
        refused(router, ask(num_prompt=100, lane=Lane.STANDARD, ttft_s=0.001)).reason
        == "promise_out_of_reach"
    )


def test_what_waited_before_counts_against_the_promise() -> None:
    router = router_of({"a": load()})
    assert chosen(router, ask(num_prompt=100, waited_s=0.9)).replica == "a"
    assert refused(router, ask(num_prompt=100, waited_s=1.1)).reason == "promise_out_of_reach"


def test_a_replica_that_has_measured_nothing_refuses_nobody() -> None:
    router = router_of({"a": load(queued=400_000, coefficients=(0.0, 0.0, 0.0, 0.0))})
    assert chosen(router, ask(num_prompt=5_000)).replica == "a"


# The stream


@pytest.mark.parametrize(
    "wrong",
    [change("a", 2), change("a", 0), Change(epoch="another", number=1)],
    ids=["gap", "again", "epoch"],
)
def test_a_change_out_of_step_makes_a_replica_unknown(wrong: Change) -> None:
    router = router_of({"a": load()})
    with pytest.raises(OutOfStep, match="replica a does not follow"):
        router.on_change("a", wrong, 0.0)
    assert refused(router, ask(SYSTEM)).reason == "no_replica"
    router.on_snapshot(snapshot("a"), 0.0)
    assert chosen(router, ask(SYSTEM)).replica == "a"


def test_replicas_of_another_model_are_not_taken() -> None:
    router = router_of({"a": load()})
    with pytest.raises(StateError, match="model is 'demo' at replica a and 'other' at b"):
        router.on_snapshot(snapshot("b", model="other"), 0.0)
    assert list(router.replicas) == ["a"]


# Whatever happens

NAMES = "abcd"
actions = st.lists(
    st.one_of(
        st.tuples(st.just("choose"), st.integers(0, 3), st.integers(0, 30), st.sampled_from(Lane)),
        st.tuples(st.just("push"), st.sampled_from(NAMES), st.integers(0, 3_000), st.integers(0, 20)),
        st.tuples(st.just("count"), st.sampled_from(NAMES), st.just(0), st.just(0)),
        st.tuples(st.just("done"), st.integers(1, 30), st.just(0), st.just(0)),
        st.tuples(st.just("gone"), st.sampled_from(NAMES), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.floats(0.01, 5.0), st.just(0), st.just(0)),
    ),
    max_size=40,
)


class Script:
    """Runs what may happen to a router, with replicas that push in step."""

    def __init__(self) -> None:
        self.router = Router()
        self.now = 0.0
        self.numbers: dict[str, int] = {}
        self.sent: dict[str, list[int]] = {name: [] for name in NAMES}
        self.found: list[Placement | str] = []
        for name in NAMES:
            self._appear(name)

    def run(self, steps: list[tuple[Any, ...]]) -> None:
        for kind, one, two, three in steps:
            getattr(self, f"_{kind}")(one, two, three)

    def _choose(self, number: int, length: int, lane: Lane) -> None:
        found = self.router.choose(ask(chain(f"{number}", length), lane=lane), self.now)
        self.found.append(found if isinstance(found, Placement) else found.reason)
        if isinstance(found, Placement):
            self.sent[found.replica].append(found.ticket)

    def _push(self, name: str, queued: int, length: int) -> None:
        self.numbers[name] += 1
        pushed = change(name, self.numbers[name], load(queued=queued), stored=chain("0", length))
        self.router.on_change(name, pushed, self.now)

    def _count(self, name: str, *_: object) -> None:
        self.numbers[name] += 1
        pushed = change(name, self.numbers[name], load(), counted=self.sent[name])
        self.router.on_change(name, pushed, self.now)

    def _done(self, ticket: int, *_: object) -> None:
        self.router.note_done(ticket)

    def _gone(self, name: str, *_: object) -> None:
        self.router.on_gone(name)
        self._appear(name)

    def _wait(self, seconds: float, *_: object) -> None:
        self.now += seconds

    def _appear(self, name: str) -> None:
        self.numbers[name] = 0
        self.router.on_snapshot(snapshot(name), self.now)


@given(steps=actions)
@settings(max_examples=examples(120), phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_no_reservation_is_left_when_all_is_over(steps: list[tuple[Any, ...]]) -> None:
    """Nor anything of it in the loads: every replica's forecast is that of one that nobody ever asked."""
    script = Script()
    script.run(steps)
    router = script.router
    for tickets in script.sent.values():
        for ticket in tickets:
            router.note_done(ticket)
    assert router.num_reserved == 0
    for name in NAMES:
        replica = router.replicas[name]
        fresh = Router()
        fresh.on_snapshot(snapshot(name, replica.load), 0.0)
        assert not replica.open
        for lane in Lane:
            expected = fresh.replicas[name].forecast_s(lane, "a", 100, 100)
            assert replica.forecast_s(lane, "a", 100, 100) == expected
    assert not router.index._expected


@given(steps=actions)
@settings(max_examples=examples(60), phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_the_same_calls_give_the_same_choices(steps: list[tuple[Any, ...]]) -> None:
    one, other = Script(), Script()
    one.run(steps)
    other.run(steps)
    assert one.found == other.found


@given(
    queued=st.integers(0, 20_000),
    hit=st.integers(1, 60),
    length=st.integers(1, 60),
    num_replicas=st.integers(2, 40),
    home=st.integers(0, 39),
)
@settings(max_examples=examples(80), deadline=None)
def test_a_hit_never_loses_to_an_equal_replica_without_it(
    queued: int, hit: int, length: int, num_replicas: int, home: int
) -> None:
    name = f"replica {home % num_replicas}"
    states = {f"replica {i}": load(queued=queued) for i in range(num_replicas)}
    router = router_of(states, {name: SYSTEM[:hit]})
    found = router.choose(ask(SYSTEM[:length], lane=Lane.STANDARD), 0.0)
    assert isinstance(found, Placement)
    assert (found.replica, found.num_cached) == (name, 16 * min(hit, length))


def test_a_slot_is_used_again_once_it_is_swept() -> None:
    """Replicas that come and go leave no blocks behind, and the sets of replicas stay small."""
    router = router_of({"a": load(), "b": load()}, {"a": SYSTEM})
    number = 0
    for name in ("c", "d", "e"):
        router.on_gone("a" if name == "c" else chr(ord(name) - 1))
        for _ in range(2 * router.index.num_parts):
            number += 1
            router.on_change("b", change("b", number), 0.0)
        router.on_snapshot(snapshot(name, blocks=chain(name, 3)), 0.0)
        assert router.replicas[name].slot == 0
        assert router.index.num_blocks == 3
    assert chosen(router, ask(SYSTEM)).num_cached == 0
