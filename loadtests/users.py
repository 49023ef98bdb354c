"""The users: a person who talks, programs that send whether or not they were answered, and those who do not behave.

A person (`Chatter`) is a closed loop: the next turn follows the last. All others are open: each user is a source with
requests at random times of its own (Poisson, --rate a second), each served in a greenlet of its own, and times count
from when a request was to be sent. A slow server meets the same load, and shows it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from math import isnan
from typing import ClassVar

import gevent
from gevent.pool import Group
from locust import User, between, task

from loadtests.behaviours import Body, complete, dawdle, leave, long_prompt, poll, question, respond, resume
from loadtests.exchange import Server, failed
from penstock.app.reader import TimedAnswer
from penstock.gateway.wire.lanes import tier_of
from penstock.priority.lanes import parse_lane

_ENOUGH_TURNS = 6


def read_tenants(text: str) -> dict[str, str]:
    """Key by name; one tenant without a key if the text is empty.

    Raises:
        ValueError: an entry is not NAME=KEY.
    """
    if not text:
        return {"default": ""}
    tenants = {}
    for entry in text.split(","):
        name, _, key = entry.partition("=")
        if not name or not key:
            raise ValueError("--tenants takes NAME=KEY,NAME=KEY")
        tenants[name] = key
    return tenants


def times_s(answer: TimedAnswer) -> Iterator[tuple[str, float]]:
    """The times of an answer that came whole, each with the name of its row in locust's tables."""
    if answer.token_times_s:
        yield "ttft", answer.ttft_s
    if not isnan(answer.tpot_s):
        yield "tpot", answer.tpot_s
    if gaps_s := answer.gaps_s:
        yield "longest itl", max(gaps_s)
    if answer.queue_s is not None:
        yield "queue", answer.queue_s
    yield "e2e", answer.ended_s - answer.started_s


class PenstockUser(User):
    """A user of one tenant and one lane, who reports what became of requests."""

    abstract = True
    lane: ClassVar[str] = "interactive"

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.tenant, key = random.choice(list(read_tenants(options.tenants).items()))
        self.server = Server(self.host or self.environment.host, key)
        self.model: str = options.model

    def body(self, **fields: object) -> Body:
        return {"model": self.model, "service_tier": tier_of(parse_lane(self.lane)), "stream": True, **fields}

    def chat(self, **fields: object) -> Body:
        return self.body(messages=[{"role": "user", "content": question()}], **fields)

    def report(self, due_s: float, ask: Callable[[], TimedAnswer], *, was_left: bool = False) -> TimedAnswer:
        """Asks, and tells locust the times of the answer, which count from `due_s`, when it was to be sent.

        Args:
            was_left: whether the user goes away on purpose.
        """
        sent_s = time.perf_counter()
        try:
            answer = ask()
        except (OSError, ValueError) as error:
            answer = failed(sent_s, error)
        answer.started_s = due_s
        self._fire("client late", answer, sent_s - due_s)
        whole_s = answer.ended_s - due_s
        if answer.was_refused:
            self._fire("refused", answer, whole_s)
        elif was_left:
            self._fire("left", answer, whole_s)
        elif answer.error:
            self._fire("e2e", answer, whole_s, RuntimeError(answer.error))
        else:
            for name, seconds in times_s(answer):
                self._fire(name, answer, seconds)
        return answer

    def _fire(self, what: str, answer: TimedAnswer, seconds: float, error: Exception | None = None) -> None:
        """A row for each kind of time, user, lane and tenant; the server's word on the lane goes before ours."""
        self.environment.events.request.fire(
            request_type=what,
            name=f"{type(self).__name__.lower()}, {answer.lane or self.lane}, {self.tenant}",
            response_time=1000 * seconds,
            response_length=answer.num_output_tokens,
            exception=error,
            context={},
        )


class Chatter(PenstockUser):
    """Somebody who talks: each turn follows the last by its id, with pauses to read; after some turns a new subject."""

    weight = 6
    wait_time = between(0.2, 1.5)

    def on_start(self) -> None:
        super().on_start()
        self.previous_id, self.num_turns = "", 0

    @task
    def say(self) -> None:
        body = self.body(input=question(), max_output_tokens=random.randint(16, 64))
        if self.previous_id:
            body["previous_response_id"] = self.previous_id
        due_s = time.perf_counter()
        answer = self.report(due_s, lambda: respond(self.server, body))
        self.num_turns += 1
        goes_on = not answer.error and self.num_turns < _ENOUGH_TURNS
        self.previous_id, self.num_turns = (answer.id, self.num_turns) if goes_on else ("", 0)


class Source(PenstockUser):
    """Requests at random times, whether or not the ones before are answered."""

    abstract = True

    def on_start(self) -> None:
        super().on_start()
        self.at_work = Group()
        self.due_s = time.perf_counter()
        gevent.sleep(self.wait_time())

    def on_stop(self) -> None:
        self.at_work.join()

    def wait_time(self) -> float:
        """Until the next request is due; the clock of arrivals runs on while this one is late."""
        self.due_s += random.expovariate(self.environment.parsed_options.rate)
        return max(0.0, self.due_s - time.perf_counter())

    @task
    def send(self) -> None:
        self.at_work.spawn(self.request, self.due_s)

    def request(self, due_s: float) -> None:
        raise NotImplementedError


class Completer(Source):
    """A program whose users wait: short completions."""

    weight = 3

    def request(self, due_s: float) -> None:
        body = self.body(prompt=question(), max_tokens=random.randint(16, 48))
        self.report(due_s, lambda: complete(self.server, body))


class Batcher(Source):
    """A program without haste: longer completions, all with the same beginning."""

    weight = 2
    lane = "batch"

    def request(self, due_s: float) -> None:
        body = self.body(prompt=long_prompt(), max_tokens=96)
        self.report(due_s, lambda: complete(self.server, body))


class Background(Source):
    """Leaves a question, and looks now and then whether the answer is there."""

    weight = 1
    lane = "standard"

    def request(self, due_s: float) -> None:
        body = self.body(input=question(), max_output_tokens=48)
        self.report(due_s, lambda: poll(self.server, body))


class Leaver(Source):
    """Goes away: before the first token, or in the middle of the answer."""

    weight = 1

    def request(self, due_s: float) -> None:
        body, after_s = self.chat(max_tokens=400, ignore_eos=True), random.uniform(0.0, 0.3)
        self.report(due_s, lambda: leave(self.server, body, after_s), was_left=True)


class SlowReader(Source):
    """Reads a little at a time, slower than the answer comes."""

    weight = 1
    lane = "standard"

    def request(self, due_s: float) -> None:
        body = self.chat(max_tokens=64)
        self.report(due_s, lambda: dawdle(self.server, body))


class Resumer(Source):
    """Loses the connection after some events, and goes on after the last one that it has."""

    weight = 1

    def request(self, due_s: float) -> None:
        body, after_bytes = self.body(input=question(), max_output_tokens=64), random.randint(1, 8_000)
        self.report(due_s, lambda: resume(self.server, body, after_bytes))
