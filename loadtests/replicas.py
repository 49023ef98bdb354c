"""Sessions of several turns over replicas behind a switch: `python -m loadtests.replicas`.

All sessions begin with the same instructions. They are run against one server, then against several behind a switch
that chooses by forecast, and behind one that chooses at random. Told are the prompt tokens that were found in a
cache, and the time to the first token at the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import httpx

from app.bench.server_process import ServerProcess
from app.listen import bind, url
from app.loop import Server, uvicorn_config
from app.settings import Settings
from app.switch import make_switch
from cluster.members import parse_address
from cluster.switch import Switch
from priority.routing.router import RandomRouter, Router

_INSTRUCTIONS = "You tell stories about knights, foxes and old trees, kindly and in short sentences. " * 8
_SAID = "He rode on, and the fox {} went with him as far as the old tree. "
_MAX_TOKENS = 24
_SERVED_AS = "sessions"
_WARM_S = 20.0


@dataclass
class Tally:
    """What all turns of one run came to."""

    num_prompt: int = 0
    num_cached: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    def __str__(self) -> str:
        p50, p75 = (
            1000 * q for q in (statistics.median(self.ttfts_s), statistics.quantiles(self.ttfts_s)[-1])
        )
        return (
            f"{len(self.ttfts_s)} turns, {self.num_failed} failed: {self.num_cached / self.num_prompt:.1%} of "
            f"{self.num_prompt} prompt tokens cached, TTFT P50 {p50:.1f} ms, P75 {p75:.1f} ms"
        )


@dataclass(frozen=True)
class Load:
    """What is asked, and under which name the model is served."""

    num_sessions: int
    num_turns: int
    num_sentences: int = 0
    """That a turn says before it asks."""
    served_as: str = _SERVED_AS


async def session(http: httpx.AsyncClient, number: int, load: Load, salt: str, tally: Tally) -> None:
    """One conversation; `salt` keeps what earlier runs cached out of it."""
    messages = [{"role": "system", "content": _INSTRUCTIONS}]
    for turn in range(load.num_turns):
        said = "".join(_SAID.format(f"{number}.{turn}.{i}") for i in range(load.num_sentences))
        messages.append({"role": "user", "content": f"{said}Tell me about knight {number}, part {turn}."})
        body = {
            "model": load.served_as,
            "messages": messages,
            "max_tokens": _MAX_TOKENS,
            "stream": True,
            "ignore_eos": True,
            "cache_salt": salt,
            "stream_options": {"include_usage": True},
        }
        began_s, first_s, text = time.perf_counter(), 0.0, ""
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                tally.num_failed += 1
                return
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                first_s = first_s or (time.perf_counter() if text else 0.0)
                if (usage := event.get("usage")) is not None:
                    tally.num_prompt += usage["prompt_tokens"]
                    tally.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        tally.ttfts_s.append(first_s - began_s)
        messages.append({"role": "assistant", "content": text})


async def run(base_url: str, load: Load) -> Tally:
    tally, salt = Tally(), secrets.token_hex(4)
    async with httpx.AsyncClient(base_url=base_url, timeout=120) as http:
        limit = asyncio.Semaphore(4)

        async def one(number: int) -> None:
            async with limit:
                await session(http, number, load, salt, tally)

        await asyncio.gather(*map(one, range(load.num_sessions)))
    return tally


async def behind(switch: Switch, urls: Sequence[str], load: Load) -> Tally:
    with bind("127.0.0.1", 0) as listener:
        server = Server(uvicorn_config(switch.app(), lifespan="off"))
        async with switch.running([parse_address(each) for each in urls]):
            task = asyncio.create_task(server.serve(sockets=[listener]))
            async with asyncio.timeout(_WARM_S):
                while len(switch.members.known) < len(urls):
                    await asyncio.sleep(0.05)
            try:
                return await run(url(listener), load)
            finally:
                server.should_exit = True
                await task


async def compare(urls: Sequence[str], secret: str, model: str | None, load: Load) -> None:
    given = {"cluster_secret": secret, "model": model, "served_model_name": load.served_as}
    settings = Settings.load({name: value for name, value in given.items() if value is not None})
    for each in urls:
        await run(each, replace(load, num_sessions=2, num_turns=2))
    print(f"one server: {await run(urls[0], load)}", flush=True)
    for name, router in (("by forecast", Router()), ("at random", RandomRouter())):
        switch = make_switch(settings, None, is_open=False, router=router)
        print(f"{len(urls)} replicas, {name}: {await behind(switch, urls, load)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--sentences", type=int, default=0, help="that a turn says before it asks, 20 tokens each"
    )
    parser.add_argument("--model", help="a checkpoint; by default the demo model")
    options = parser.parse_args()
    secret = secrets.token_hex(16)
    load = Load(options.sessions, options.turns, options.sentences)
    common = ["--threads", "1", "--cluster-secret", secret, "--served-model-name", load.served_as]
    common += ["--model", options.model] if options.model else []
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(options.replicas):  # one after another: each takes all cores to start
            server = ServerProcess([*common, "--replica", f"r{number}"])
            stack.callback(server.stop)
            server.wait_ready()
            servers.append(server)
        asyncio.run(compare([server.url for server in servers], secret, options.model, load))


if __name__ == "__main__":
    main()
