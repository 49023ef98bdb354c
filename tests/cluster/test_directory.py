"""Who belongs to a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cluster import directory
from penstock.cluster.directory import GONE_S, Directory, ModelMismatch, Report
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(0.0)
    monkeypatch.setattr(directory, "monotonic", clock)
    return clock


def replica(name: str, identity: str = "demo 1") -> Report:
    return Report(
        kind="replica", name=name, url=f"http://{name}:1", node="10.0.0.1", pid=1, identity=identity
    )


def switch(refused: float = 0.0) -> Report:
    figures = {"refused": refused}
    return Report(kind="switch", name="s", url="http://s:1", node="10.0.0.1", pid=2, figures=figures)


def test_a_switch_is_told_where_replicas_listen() -> None:
    one = Directory("secret")
    assert one.beat(switch()).replicas == ()
    one.beat(replica("a"))
    one.beat(replica("b"))
    assert one.beat(switch()).replicas == ("http://a:1", "http://b:1")
    one.leave("a")
    assert one.beat(switch()).replicas == ("http://b:1",)


def test_who_is_silent_is_gone(clock: Clock) -> None:
    one = Directory("secret")
    one.beat(replica("a"))
    clock.now = GONE_S
    one.beat(replica("b"))
    clock.now = GONE_S + 1
    assert one.beat(switch()).replicas == ("http://b:1",)
    assert [each.name for each in one.view().replicas] == ["b"]


def test_another_model_is_refused_by_name(clock: Clock) -> None:
    one = Directory("secret")
    one.beat(replica("a", "llama 1"))
    with pytest.raises(
        ModelMismatch, match=r"it serves llama 2, and a on 10\.0\.0\.1 serves llama 1; all of a cluster"
    ):
        one.beat(replica("b", "llama 2"))
    assert [each.name for each in one.view().replicas] == ["a"]
    clock.now = 2 * GONE_S
    one.beat(replica("b", "llama 2"))
    assert [each.name for each in one.view().replicas] == ["b"]


def test_replicas_share_what_switches_refused() -> None:
    one = Directory("secret")
    one.beat(switch(refused=6.0))
    one.beat(replica("a"))
    assert one.beat(replica("a")).refused == 6.0
    assert one.beat(replica("b")).refused == 3.0


def test_one_replica_is_told_to_drain() -> None:
    one = Directory("secret")
    one.beat(replica("a"))
    one.beat(replica("b"))
    one.beat(switch())
    assert not one.drain("c")
    assert not one.drain("s")
    assert one.drain("a")
    assert one.beat(replica("a")).drain
    assert not one.beat(replica("b")).drain
    one.leave("a")
    assert not one.beat(replica("a")).drain


def test_the_last_failures_are_kept() -> None:
    one = Directory("secret")
    for number in range(20):
        one.note_failure(f"failure {number}")
    assert one.view().failures[-1] == "failure 19"
    assert len(one.view().failures) < 20
    one.forget_failures()
    assert one.view().failures == ()


def test_a_directory_that_was_restarted_knows_all_after_a_beat() -> None:
    first, second = Directory("secret"), Directory("secret")
    for one in (first, second):
        one.beat(replace(replica("a"), plan={"name": "penstock"}))
        one.beat(switch())
    assert first.view() == second.view()
