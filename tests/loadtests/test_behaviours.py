"""Clients that poll, leave, dawdle and come back: when they wait, what they send, and what they make of the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from loadtests import behaviours
from loadtests.behaviours import leave, poll, resume
from loadtests.exchange import Server
from penstock.app.reader import TimedAnswer, TimedBytes
from tests.loadtests.scripted import HEAD, REFUSED, ScriptedServer, chat, event, whole


class Clock:
    """A clock that moves when somebody sleeps."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(behaviours, "time", clock)
    return clock


@dataclass(frozen=True)
class Pieces(Server):
    """Hands out scripted pieces without a socket, each a second after the last."""

    replies: Sequence[Sequence[bytes]] = ()
    clock: Clock = field(default_factory=Clock)
    asked: list[tuple[str, str, Any, int]] = field(default_factory=list)

    def exchange(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        patience: Callable[[TimedBytes], bool] = lambda _: True,
        piece_bytes: int = 65_536,
    ) -> TimedBytes:
        self.asked.append((method, path, body, piece_bytes))
        recording = TimedBytes(self.clock.now_s)
        for piece in self.replies[min(len(self.asked), len(self.replies)) - 1]:
            self.clock.now_s += 1.0
            recording.note(piece)
            if not patience(recording):
                break
        return recording


def outcome(answer: TimedAnswer) -> tuple[str, int, int, str | None]:
    return answer.text, answer.last_event, answer.num_output_tokens, answer.error


def test_the_key_is_shown_and_an_answer_that_does_not_come_is_a_failure() -> None:
    with ScriptedServer(chat("a", "b")) as server:
        answer = Server(server.url, "k1").answer("POST", "/v1/x", {"a": 1})
        Server(server.url).answer("GET", "/v1/y")
    assert (answer.text, answer.error, answer.status) == ("ab", None, 200)
    assert server.asked == [("POST", "/v1/x", {"a": 1}), ("GET", "/v1/y", None)]
    assert server.keys == ["Bearer k1", None]
    gone = Server(server.url).answer("GET", "/")
    assert gone.error is not None
    assert gone.error.startswith("ConnectionRefusedError: ")
    assert 0 <= gone.ended_s - gone.started_s < 30


def test_who_polls_looks_five_times_a_second_until_the_answer_is_there(clock: Clock) -> None:
    queued, running = whole(id="r", status="queued"), whole(id="r", status="in_progress")
    done = whole(id="r", status="completed", usage={"input_tokens": 4, "output_tokens": 7})
    server = Pieces("", replies=[[queued], [running], [done]])
    answer = poll(server, {"input": "x", "stream": True})
    assert clock.slept == [0.2, 0.2]
    assert outcome(answer) == ("", -1, 7, None)
    assert [one[:3] for one in server.asked] == [
        ("POST", "/v1/responses", {"input": "x", "stream": False, "background": True}),
        *[("GET", "/v1/responses/r", None)] * 2,
    ]


@pytest.mark.parametrize(("after_s", "num_read"), [(0.5, 1), (1.0, 1), (1.5, 2), (9.0, 3)])
def test_who_leaves_does_so_after_his_time(clock: Clock, after_s: float, num_read: int) -> None:
    pieces = [HEAD, *[b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'] * 2]
    server = Pieces("", replies=[pieces], clock=clock)
    answer = leave(server, {"model": "m"}, after_s)
    assert outcome(answer) == ("a" * (num_read - 1), -1, 0, "the stream ended without [DONE]")
    body = {"model": "m", "stream_options": {"include_usage": True}}
    assert server.asked == [("POST", "/v1/chat/completions", body, 65_536)]


BEGIN = event(0, "in_progress", response={"id": "r"})
ONE, TWO = event(1, "output_text.delta", delta="One "), event(2, "output_text.delta", delta="two")
END = event(3, "completed", response={"id": "r", "usage": {"input_tokens": 5, "output_tokens": 2}})


def follow(after: int) -> tuple[str, str, None, int]:
    return ("GET", f"/v1/responses/r?stream=true&starting_after={after}", None, 65_536)


def test_a_connection_is_lost_after_so_many_bytes_and_the_answer_goes_on_after_the_last_event(
    clock: Clock,
) -> None:
    rest = [HEAD, TWO + END]
    server = Pieces("", replies=[[HEAD, BEGIN, ONE, TWO], rest], clock=clock)
    answer = resume(server, {"model": "m"}, len(HEAD + BEGIN + ONE))
    body = {"model": "m", "stream_options": {"resumable": True}}
    assert server.asked == [("POST", "/v1/responses", body, 65_536), follow(1)]
    assert outcome(answer) == ("two", 3, 2, None)
    assert answer.started_s == 100.0
    assert len(answer.token_times_s) == 2
    assert clock.slept == []


def test_nobody_loses_a_connection_before_the_id_is_there() -> None:
    server = Pieces("", replies=[[HEAD, BEGIN, ONE], [HEAD, ONE + TWO + END]])
    resume(server, {}, 1)
    assert server.asked[1:] == [follow(0)]


def test_an_answer_that_came_whole_is_not_asked_for_again() -> None:
    server = Pieces("", replies=[[HEAD + BEGIN + ONE + TWO + END]])
    assert outcome(resume(server, {}, 1)) == ("One two", 3, 2, None)
    assert len(server.asked) == 1


def test_without_an_id_nothing_can_go_on() -> None:
    server = Pieces("", replies=[[REFUSED]])
    assert resume(server, {}, 1, patience_s=60.0).was_refused
    assert len(server.asked) == 1


@pytest.mark.parametrize(("patience_s", "num_asked"), [(0.0, 1), (0.9, 1), (1.0, 2), (60.0, 3)])
def test_who_lost_the_server_tries_again_until_patience_ends(
    clock: Clock, patience_s: float, num_asked: int
) -> None:
    replies = [[HEAD, BEGIN], [REFUSED], [REFUSED], [HEAD + ONE + TWO + END]]
    server = Pieces("", replies=replies, clock=clock)
    answer = resume(server, {}, 1, *([patience_s] if patience_s else []))
    assert server.asked[1:] == [follow(0)] * num_asked
    assert clock.slept == [0.2] * (2 if num_asked == 3 else num_asked - 1)
    assert answer.error == (None if num_asked == 3 else "HTTP/1.1 503 Service Unavailable")


def test_a_server_that_comes_back_with_nothing_yet_is_asked_again(clock: Clock) -> None:
    replies = [[HEAD, BEGIN], [HEAD, ONE], [HEAD, TWO + END]]
    server = Pieces("", replies=replies, clock=clock)
    answer = resume(server, {}, 1, 60.0)
    assert server.asked[1:] == [follow(0), follow(1)]
    assert outcome(answer) == ("two", 3, 2, None)
    assert len(answer.token_times_s) == 2
