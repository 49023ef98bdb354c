"""`make soak`: every kind of client and every kind of trouble, for as long as is wanted, on one server.

Clients talk, complete, poll, leave, dawdle, lose their connection and send nonsense all the time. Meanwhile there are
storms of disconnects, Redis stops, is slow and is gone, the server is told to end and is killed with -9, and starts
again on the same port. What must hold, or the exit status is 1:

- no request fails but those that were cut by a server that went down, and resumable ones not even then;
- nonsense gets a 4xx (or a 503: without Redis nobody can say that an id is unknown);
- when the clients are gone, nothing runs, waits or streams, every KV block is free, and connections are closed;
- in the quiet second half memory, replies and records that are kept apart, grows by no more than a twentieth.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.bench.redis_process import RedisProcess, SlowLine
from loadtests.behaviours import Body, complete, dawdle, leave, long_prompt, poll, question, respond, resume
from loadtests.exchange import Server, failed
from penstock.app.bench.server_process import ServerFailed, ServerProcess
from penstock.app.errors import OperatorError
from penstock.app.reader import TimedAnswer, request_bytes
from penstock.app.remote import sums_of
from penstock.app.tables import table

MODEL = "penstock-demo"
_STORM = 60
_GONE_S = 60.0
"""A server that was killed is back before this."""
_GROWTH = 1.05
_NEW_MIB = 24
"""Caches may take so much beside."""
_KV_MEMORY = "64MiB"
"""So little that all of it is soon in use: memory counts from when it is first written."""
_IDLE = (
    "penstock_streams",
    "penstock_running_sequences",
    "penstock_waiting_sequences",
    "penstock_queued_requests",
)

NONSENSE: Sequence[tuple[str, str, object]] = (
    ("POST", "/v1/chat/completions", {"model": MODEL}),
    ("POST", "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": 7}]}),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": -1}),
    ("POST", "/v1/completions", {"model": "another", "prompt": "x"}),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "x" * 200_000}),
    ("POST", "/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": "resp_gone"}),
    ("POST", "/v1/responses", [[[[[[[]]]]]]]),
    ("GET", "/v1/responses/resp_gone", None),
    ("DELETE", "/nothing", None),
)


class ServerUnderTest:
    """The server under test; it may go down and come back on the same port."""

    def __init__(self, redis_url: str) -> None:
        self._arguments = ["--redis-url", redis_url, "--kv-memory", _KV_MEMORY]
        self.process = ServerProcess(self._arguments)
        self.process.wait_ready()
        self.server = Server(self.process.url)
        self._arguments += ["--port", str(self.process.port)]
        self._down: list[tuple[float, float]] = []

    def restart(self, number: signal.Signals) -> None:
        """Ends the server with that signal and starts it again."""
        began_s = time.perf_counter()
        self._down.append((began_s, float("inf")))
        self.process.signal(number)
        self.process.wait()
        self.process = ServerProcess(self._arguments)
        self.process.wait_ready()
        self._down[-1] = (began_s, time.perf_counter())

    def wait_written(self) -> None:
        """Until Redis knows all that it was not told while it was away: what it never heard of, no kill can spare."""
        end_s = time.perf_counter() + 30.0
        while time.perf_counter() < end_s:
            found = self.metrics()
            if found["penstock_store_up"] and not found["penstock_store_unwritten"]:
                return
            time.sleep(0.05)

    def was_down(self, began_s: float, ended_s: float) -> bool:
        """Whether the server was away at some time between the two."""
        return any(began_s <= until_s and ended_s >= from_s for from_s, until_s in self._down)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=30) as reply:
            return sums_of(reply.read().decode())

    @property
    def memory_mib(self) -> float:
        """Without what has bounds of its own: replies that can be followed again, and records while Redis is gone."""
        lines = Path(f"/proc/{self.process.process.pid}/status").read_text(encoding="ascii").splitlines()
        resident_kib = next(float(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
        found = self.metrics()
        return (
            resident_kib / 1024 - (found["penstock_store_bytes"] + found["penstock_recording_bytes"]) / 2**20
        )

    @property
    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.process.pid}/fd").iterdir()))


class Clients:
    """Threads that send one request after another until they are stopped, and what became of these."""

    def __init__(self, target: ServerUnderTest, number: int) -> None:
        self.endings: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []
        self._target = target
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(number)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        source = random.Random(seed)
        while not self._stopped.wait(source.uniform(0.0, 0.1)):
            name = source.choice(list(BEHAVIOURS))
            began_s = time.perf_counter()
            try:
                answer = BEHAVIOURS[name](self._target.server, source)
            except (OSError, ValueError) as error:
                answer = failed(began_s, error)
            self._note(name, answer, began_s)

    def _note(self, name: str, answer: TimedAnswer, began_s: float) -> None:
        ending = self._ending(name, answer, began_s)
        with self._lock:
            self.endings[name, ending] += 1
            if ending == "failed":
                self.failures.append(f"{name}: HTTP {answer.status}, {answer.error}")

    def _ending(self, name: str, answer: TimedAnswer, began_s: float) -> str:
        is_cut = self._target.was_down(began_s, time.perf_counter())
        if name == "resume" and answer.error and answer.last_event >= 0:
            return "failed"  # a client that has its id and an event goes on, in the next process if it must
        if answer.was_refused:
            return "refused"
        if (400 <= answer.status < 500) if name == "nonsense" else not answer.error:
            return "done"
        return "cut" if is_cut else "left" if name == "leave" else "failed"


def _body(**fields: object) -> Body:
    return {"model": MODEL, "stream": True, **fields}


def _chat(**fields: object) -> Body:
    return _body(messages=[{"role": "user", "content": question()}], **fields)


def _talk(server: Server, source: random.Random) -> TimedAnswer:
    """Two turns, the second upon the first."""
    body = _body(input=question(), max_output_tokens=source.randint(8, 48), service_tier="priority")
    first = respond(server, body)
    return first if first.error else respond(server, body | {"previous_response_id": first.id})


def _nonsense(server: Server, source: random.Random) -> TimedAnswer:
    return server.answer(*source.choice(NONSENSE))


BEHAVIOURS: dict[str, Callable[[Server, random.Random], TimedAnswer]] = {
    "talk": _talk,
    "complete": lambda server, _: complete(
        server, _body(prompt=long_prompt(), max_tokens=96, service_tier="flex")
    ),
    "poll": lambda server, _: poll(server, _body(input=question(), max_output_tokens=32)),
    "leave": lambda server, source: leave(
        server, _chat(max_tokens=400, ignore_eos=True), source.uniform(0.0, 0.5)
    ),
    "dawdle": lambda server, _: dawdle(server, _chat(max_tokens=64)),
    "resume": lambda server, source: resume(
        server, _body(input=question(), max_output_tokens=64), source.randint(1, 8_000), _GONE_S
    ),
    "nonsense": _nonsense,
}


def storm(target: ServerUnderTest) -> None:
    """Many connections at once that ask for long answers and hang up."""
    host, port = target.process.host, target.process.port
    request = request_bytes("POST", "/v1/chat/completions", f"{host}:{port}", _chat(max_tokens=1_000))
    connections = [socket.create_connection((host, port), 30) for _ in range(_STORM)]
    for connection in connections:
        connection.sendall(request)
    for connection in connections:
        connection.close()


Act = Callable[[], None]


def troubles(target: ServerUnderTest, redis: RedisProcess, line: SlowLine) -> Iterator[tuple[str, Act, Act]]:
    """Each trouble: its name, how it begins, how it ends."""

    def nothing() -> None: ...

    def slow(delay_s: float) -> Act:
        return lambda: setattr(line, "delay_s", delay_s)

    yield "a storm of disconnects", lambda: storm(target), nothing
    yield "Redis stopped", redis.pause, redis.resume
    yield "Redis slow", slow(0.3), slow(0.0)
    yield "Redis well", target.wait_written, nothing
    yield "kill -9 and a new start", lambda: target.restart(signal.SIGKILL), nothing
    yield "SIGTERM and a new start", lambda: target.restart(signal.SIGTERM), nothing
    yield "another storm", lambda: storm(target), nothing
    yield "Redis gone", redis.kill, nothing


def soak(seconds: float, num_clients: int) -> list[str]:
    """Runs it all; what did not hold."""
    with RedisProcess() as redis, SlowLine(redis.url) as line, _server_under_test(line.url) as target:
        files = target.num_files
        with Clients(target, num_clients) as clients:
            for name, begin, end in troubles(target, redis, line):
                _say(name)
                begin()
                time.sleep(seconds / 14)
                end()
            _say("quiet")
            time.sleep(seconds / 8)
            memory_mib = target.memory_mib
            time.sleep(seconds * 3 / 8)
            grown_mib = target.memory_mib
        _print(clients.endings)
        print(f"memory: {memory_mib:.0f} MiB, after the quiet {grown_mib:.0f} MiB")
        wrong = [f"failed: {failure}" for failure in clients.failures]
        if grown_mib > memory_mib * _GROWTH + _NEW_MIB:
            wrong.append(f"memory grew from {memory_mib:.0f} to {grown_mib:.0f} MiB")
        return wrong + _not_idle(target, files)


def _not_idle(target: ServerUnderTest, files: int) -> list[str]:
    """Waits until all is as if nobody had ever been there; returns what is not when patience ends."""
    end_s = time.perf_counter() + 30.0
    while True:
        found = target.metrics()
        wrong = [f"{name} is {found[name]:g}" for name in _IDLE if found[name]]
        if found["penstock_kv_free_blocks"] != found["penstock_kv_blocks"]:
            wrong.append(
                f"{found['penstock_kv_free_blocks']:g} of {found['penstock_kv_blocks']:g} KV blocks are free"
            )
        if found["penstock_pool_violations"]:
            wrong.append("the KV pool had to start afresh")
        if target.num_files > files + 8:
            wrong.append(f"{target.num_files} open files, {files} at the start")
        if not wrong or time.perf_counter() > end_s:
            return wrong
        time.sleep(0.2)


@contextmanager
def _server_under_test(redis_url: str) -> Iterator[ServerUnderTest]:
    target = ServerUnderTest(redis_url)
    try:
        yield target
    finally:
        target.process.kill()


def _print(endings: Counter[tuple[str, str]]) -> None:
    kinds = ("done", "refused", "left", "cut", "failed")
    rows = [[name, *(str(endings[name, kind]) for kind in kinds)] for name in BEHAVIOURS]
    print("\n" + table(["clients", *kinds], rows), flush=True)


def _say(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.soak", description="Every client, every trouble."
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="for how long, about (600)")
    parser.add_argument("--clients", type=int, default=16, help="at a time (16)")
    options = parser.parse_args(arguments)
    try:
        wrong = soak(options.seconds, options.clients)
    except (ServerFailed, OperatorError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    for line in wrong[:20]:
        print(line)
    print("all held" if not wrong else f"{len(wrong)} things did not hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
