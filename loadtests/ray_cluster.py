"""A cluster on Ray through its whole life, with clients all the time: `python -m loadtests.ray_cluster`.

`penstock cluster` deploys three replicas of the demo model and two switches on a Ray of this machine, beside a Redis.
Sessions of several turns are run on one replica and through both switches. While clients ask through the switches, a
replica is killed with -9 under resumable streams, the number of replicas is changed, one is drained, and all are
replaced one after the other. It fails if any request does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from os import kill
from urllib.parse import urlsplit

import httpx

from lab.bench.redis_process import RedisProcess
from loadtests import replicas as sessions
from loadtests.local_ray import LocalRay
from penstock.app.bench.client import exchange
from penstock.app.listen import bind, port_of
from penstock.app.reader import TimedBytes, read_answer

COMMAND_S = 300.0
_ANSWER_S = 120.0
_MODEL = "penstock-demo"
_SESSIONS = sessions.Load(num_sessions=12, num_turns=4, served_as=_MODEL)
_LINE = re.compile(r"  (http://\S+)  (\S+)  pid (\d+) on (\S+)  (.*)")


@dataclass(frozen=True)
class Process:
    """A line of `penstock cluster status`."""

    url: str
    name: str
    pid: int
    doing: str


@dataclass
class Status:
    """The output of `penstock cluster status`."""

    text: str
    switches: list[Process] = field(default_factory=list)
    replicas: list[Process] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> Status:
        status = cls(text)
        of = status.switches
        for line in text.splitlines():
            if line.startswith("penstock-replicas:"):
                of = status.replicas
            if found := _LINE.fullmatch(line):
                of.append(Process(found[1], found[2], int(found[3]), found[5]))
        return status


class Cluster:
    """`penstock cluster` as its operator types it."""

    def __init__(self, ray: LocalRay) -> None:
        self._ray = ray

    async def run(self, *arguments: str) -> str:
        """Returns the command's output; raises RuntimeError with its message if it fails."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "penstock", "cluster", arguments[0], "--address", self._ray.address, *arguments[1:]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._ray.environment,
        )
        try:
            async with asyncio.timeout(COMMAND_S):
                output, errors = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(arguments)}: {output.decode()}{errors.decode()}")
        return output.decode()

    async def status(self) -> Status:
        try:
            return Status.parse(await self.run("status"))
        except RuntimeError as error:  # while a replica is replaced, not all is well
            return Status.parse(str(error))

    async def until_replaced(self, switch: str, name: str, num: int) -> Status:
        """Returns when there are `num` replicas without that one, which is known to be gone."""
        async with asyncio.timeout(COMMAND_S), httpx.AsyncClient(base_url=switch) as http:
            while True:
                # The switch is cheaper to ask than Ray.
                if f"penstock_switch_replicas {num}.0" in (await http.get("/metrics")).text:
                    status = await self.status()
                    if name not in {one.name for one in status.replicas}:
                        return status
                await asyncio.sleep(0.2)


@dataclass
class Tally:
    """Requests as their clients saw them."""

    num_answered: int = 0
    failures: list[str] = field(default_factory=list)


async def ask(
    url: str, words: str, max_tokens: int = 8, on_first: Callable[[], None] = lambda: None, **more: object
) -> str:
    """The text of a resumable stream; RuntimeError if it is not whole."""
    address, has_begun = urlsplit(url), False
    body = {
        "model": _MODEL,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"resumable": True, "include_usage": True},
        **more,
    }

    def watch(recording: TimedBytes) -> None:
        nonlocal has_begun
        if not has_begun and read_answer(recording).text:
            has_begun = True
            on_first()

    async with asyncio.timeout(_ANSWER_S):
        host, port = address.hostname or "", address.port or 80
        answer = read_answer(await exchange(host, port, "/v1/chat/completions", body, watch=watch))
    if answer.error or answer.num_output_tokens != max_tokens:
        raise RuntimeError(answer.error or f"it ended after {answer.num_output_tokens} tokens")
    return answer.text


@contextlib.asynccontextmanager
async def light_load(urls: Sequence[str], pause_s: float = 0.2) -> AsyncIterator[Tally]:
    """One request after the other, at every switch in turn, as long as this is entered."""
    tally, is_over, began_s = Tally(), False, time.perf_counter()

    async def go_on() -> None:
        for number, url in enumerate(cycle(urls), 1):
            if is_over:
                return
            try:
                await ask(url, f"Tell me about fox {number}.")
                tally.num_answered += 1
            except (OSError, RuntimeError) as error:  # a timeout is an OSError
                tally.failures.append(
                    f"{time.perf_counter() - began_s:.1f} s: {type(error).__name__}: {error}"
                )
            await asyncio.sleep(pause_s)

    task = asyncio.create_task(go_on())
    try:
        yield tally
    finally:
        is_over = True
        await task


async def killed_under_streams(
    victim: Process, urls: Sequence[str], num_streams: int, max_tokens: int
) -> tuple[list[str], list[str]]:
    """The texts of resumable streams without, and with, a replica that is killed with -9 on the way."""

    async def all_of_them(on_begun: Callable[[], object]) -> list[str]:
        """`on_begun` is called when each has said something."""
        num_begun = 0

        def note_begun() -> None:
            nonlocal num_begun
            num_begun += 1
            if num_begun == num_streams:
                on_begun()

        async def one(seed: int) -> str:
            words = f"Tell me a long story about knight {seed}."
            url = urls[seed % len(urls)]
            return await ask(url, words, max_tokens, note_begun, seed=seed, temperature=1.0)

        return await asyncio.gather(*map(one, range(num_streams)))

    expected = await all_of_them(on_begun=lambda: None)
    return expected, await all_of_them(on_begun=lambda: kill(victim.pid, signal.SIGKILL))


async def life(cluster: Cluster, redis_url: str, port: int) -> list[str]:
    """All steps; the failures."""
    common = (
        *("--replicas", "3", "--switches", "2", "--port", str(port), "--threads", "1", "--cpus", "1"),
        *("--redis-url", redis_url, "--drain-timeout", "30", "--warm-up-tokens", "0"),
    )
    began_s = time.perf_counter()

    def tell(what: str) -> None:
        print(f"{time.perf_counter() - began_s:6.1f} s  {what}", flush=True)

    status = Status.parse(await cluster.run("deploy", *common))
    tell(f"deployed\n{status.text}")
    urls = [one.url for one in status.switches]
    failures = []
    alone = await sessions.run(status.replicas[0].url, _SESSIONS)
    tell(f"sessions on one replica: {alone}")
    for number, tally_of in enumerate(await asyncio.gather(*(sessions.run(url, _SESSIONS) for url in urls))):
        tell(f"through switch {number}, at once with the other: {tally_of}")
    tell("the load begins")
    async with light_load(urls) as tally:
        victim = status.replicas[0]
        expected, got = await killed_under_streams(victim, urls, 50, 64)
        num_same = sum(map(str.__eq__, expected, got))
        tell(f"killed {victim.name}: {num_same} of {len(got)} streams have the text of an undisturbed run")
        if num_same != len(got):
            failures.append("streams were broken")
        await cluster.until_replaced(urls[0], victim.name, 3)
        tell("Ray has replaced it")
        await cluster.run("scale", "2")
        tell("scaled to 2")
        leaving = (await cluster.status()).replicas[0].name
        await cluster.run("drain", leaving)
        await cluster.until_replaced(urls[0], leaving, 2)
        tell(f"drained {leaving}, and Ray has replaced it")
        old = {one.name for one in (await cluster.status()).replicas}
        rolled = await cluster.run("deploy", *common, "--replicas", "2", "--max-num-seqs", "64")
        new = {one.name for one in Status.parse(rolled).replicas}
        tell(f"rolled: {', '.join(sorted(old))} became {', '.join(sorted(new))}")
        if old & new:
            failures.append("not all replicas were replaced")
    tell(f"{tally.num_answered} requests beside that, {len(tally.failures)} failed")
    failures += tally.failures
    tell(await cluster.run("down"))
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, help="first port of the switches; by default, free ones")
    options = parser.parse_args()
    port = options.port
    if port is None:
        with bind("127.0.0.1", 0) as listener:
            port = port_of(listener)
    with RedisProcess() as redis, LocalRay(num_cpus=8) as ray:
        failures = asyncio.run(life(Cluster(ray), redis.url, port))
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
