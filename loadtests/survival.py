"""kill -9 under streams that can be resumed: `python -m loadtests.survival`.

Clients ask for seeded replies, half of them chat completions, the others in turn responses in the background, text
completions, Anthropic's messages and Ollama's chats. The server is killed at a random moment and started again while
other processes keep the machine busy. When it is ready all clients come back at once, each with one request that is not
repeated: it counts as whole if its text is that of an undisturbed run, with no event lost and none told twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from lab.bench.redis_process import RedisProcess
from loadtests.forked import ForkedServer
from penstock.app.bench.server_process import ServerProcess

NUM_STREAMS = 50
MAX_TOKENS = 32
_ODD = ("/v1/responses", "/v1/completions", "/v1/messages", "/api/chat")
ARGUMENTS = ("--replica", "the-one", "--warm-up-tokens", "0")


@dataclass
class Follower:
    """A client that keeps its reply's id and the number of its last event, and what it was told."""

    seed: int
    max_tokens: int = MAX_TOKENS
    id: str = ""
    position: int = -1
    text: str = ""
    done: bool = False
    numbers: list[int] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The path: an even seed asks for a chat completion, odd ones for the other APIs in turn."""
        return _ODD[self.seed // 2 % len(_ODD)] if self.seed % 2 else "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        words = f"Tell me a story about knight number {self.seed}."
        messages = [{"role": "user", "content": words}]
        sampled = {"seed": self.seed, "temperature": 1.0}
        common = {"model": "penstock-demo", "stream": True}
        match self.path:
            case "/v1/messages":  # it has no seed
                return {**common, "messages": messages, "max_tokens": self.max_tokens, "temperature": 0.0}
            case "/api/chat":
                options = {**sampled, "num_predict": self.max_tokens}
                return {**common, "messages": messages, "options": options}
        common = {**common, **sampled, "ignore_eos": True}
        match self.path:
            case "/v1/responses":
                return {**common, "input": words, "max_output_tokens": self.max_tokens, "background": True}
            case "/v1/completions":
                return {**common, "prompt": words, "max_tokens": self.max_tokens}
        return {**common, "messages": messages, "max_tokens": self.max_tokens}

    def is_whole(self, text: str) -> bool:
        """Returns whether it received this text, every event once."""
        return self.done and self.text == text and self.numbers == list(range(len(self.numbers)))

    async def ask(self, http: httpx.AsyncClient, on_event: Callable[[], None] = lambda: None) -> None:
        headers = {"x-penstock-resumable": "true"}
        async with http.stream("POST", self.path, json=self.body(), headers=headers) as reply:
            await self._read(reply, on_event)

    async def go_on(self, http: httpx.AsyncClient, *, is_patient: bool = False) -> None:
        """Follows the reply again; one that `is_patient` as often as the server says that it cannot tell yet."""
        while True:
            path = f"{self.path}/{self.id}?stream=true&starting_after={self.position}"
            async with http.stream("GET", path) as reply:
                if not is_patient or reply.status_code != 503:
                    return await self._read(reply, lambda: None)
            await asyncio.sleep(int(reply.headers["retry-after-ms"]) / 1000)

    async def _read(self, reply: httpx.Response, on_event: Callable[[], None]) -> None:
        if reply.status_code != 200:
            raise AssertionError(f"HTTP {reply.status_code}: {(await reply.aread()).decode()}")
        number: int | None = None
        async for line in reply.aiter_lines():
            if line.startswith("id: "):
                number = int(line.removeprefix("id: "))
            elif line == "data: [DONE]":
                self.done = True
            elif line.startswith(("data: ", "{")):
                event = json.loads(line.removeprefix("data: "))
                number = event.get("sequence_number", number)
                if number is not None:  # or else it only keeps the connection alive
                    self._take(number, event)
                    on_event()
                number = None

    def _take(self, number: int, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        match self.path:
            case "/v1/responses":
                self.id = self.id or event["response"]["id"]
                self.text += event["delta"] if event["type"] == "response.output_text.delta" else ""
                self.done = event["type"] in ("response.completed", "response.incomplete")
            case "/v1/messages":
                self.id = self.id or event["message"]["id"]
                self.text += event.get("delta", {}).get("text", "")
                self.done = event["type"] == "message_stop"
            case "/api/chat":
                self.id = event["id"]
                self.text += event["message"]["content"]
                self.done = event["done"]
            case _:
                (choice,) = event["choices"]
                self.id = event["id"]
                self.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        self.numbers.append(number)
        self.position = number


class Interrupted:
    """Kills a server when so many clients know their ids, all by default, and have had `after` more events together."""

    def __init__(
        self,
        victim: Callable[[], ServerProcess],
        followers: list[Follower],
        after: int,
        may_kill: Callable[[list[Follower]], bool],
        num_known: int = NUM_STREAMS,
    ) -> None:
        self._victim = victim
        self._followers = followers
        self._left = after
        self._may_kill = may_kill
        self._num_known = num_known
        self.is_over = False

    def count(self) -> None:
        if self.is_over:
            return
        known = [follower for follower in self._followers if follower.id]
        if len(known) >= self._num_known:
            self._left -= 1
            if self._left < 0 and self._may_kill(known):
                self.is_over = True
                self._victim().process.kill()


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=NUM_STREAMS + 10))


async def undisturbed(url: str, followers: Sequence[Follower] = ()) -> list[str]:
    """The texts of all clients, or of these, by seed."""
    followers = followers or [Follower(seed) for seed in range(NUM_STREAMS)]
    async with client(url) as http:
        await asyncio.gather(*(follower.ask(http) for follower in followers))
    assert all(follower.done for follower in followers)
    return [follower.text for follower in followers]


async def asked_and_killed(
    server: ServerProcess,
    source: random.Random,
    may_kill: Callable[[list[Follower]], bool] = lambda _: True,
) -> list[Follower]:
    """All clients, after the server was killed at a random moment of their first three quarters."""
    followers = [Follower(seed) for seed in range(NUM_STREAMS)]
    after = source.randint(0, NUM_STREAMS * MAX_TOKENS * 3 // 4)
    interrupted = Interrupted(lambda: server, followers, after, may_kill)
    async with client(server.url) as http:
        asking = (follower.ask(http, interrupted.count) for follower in followers)
        results = await asyncio.gather(*asking, return_exceptions=True)
    assert all(result is None or isinstance(result, httpx.HTTPError) for result in results), results
    assert server.wait() != 0
    return followers


@contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """While this is entered, so many processes take all the time that they are given."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


async def come_back(
    url: str, followers: Sequence[Follower], *, is_patient: bool = False
) -> list[BaseException | None]:
    """Brings back all clients whose replies were cut at once, and returns each one's error or None."""
    async with client(url) as http:
        going_on = [
            follower.go_on(http, is_patient=is_patient) for follower in followers if not follower.done
        ]
        return await asyncio.gather(*going_on, return_exceptions=True)


async def trial(redis_url: str, num_rounds: int, num_busy: int) -> bool:
    """Runs the rounds, a line each, and returns whether every text was whole in every round."""
    arguments = ["--redis-url", redis_url, *ARGUMENTS]
    server: ServerProcess = ForkedServer(arguments)
    num_good = 0
    try:
        server.wait_ready()
        expected = await undisturbed(server.url)
        for number in range(num_rounds):
            followers = await asked_and_killed(server, random.Random(number))
            with busy(num_busy):
                start_s = time.monotonic()
                server = ForkedServer(arguments)
                server.wait_ready()
                ready_s = time.monotonic() - start_s
                results = await come_back(server.url, followers)
            num_whole = sum(f.is_whole(text) for f, text in zip(followers, expected, strict=True))
            print(
                f"round {number + 1}: {num_whole} of {NUM_STREAMS} whole, ready in {ready_s:.1f} s",
                flush=True,
            )
            for failure in filter(None, results):
                print(f"  {type(failure).__name__}: {failure}", flush=True)
            num_good += num_whole == NUM_STREAMS
    finally:
        server.stop()
    print(f"{num_good} of {num_rounds} rounds whole")
    return num_good == num_rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--busy", type=int, default=4, help="processes that keep the machine busy meanwhile")
    options = parser.parse_args()
    with RedisProcess() as redis:
        return 0 if asyncio.run(trial(redis.url, options.rounds, options.busy)) else 1


if __name__ == "__main__":
    sys.exit(main())
