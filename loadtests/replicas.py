"""Sessions of several turns over replicas behind a switch: `python -m loadtests.replicas`.

All sessions begin with the same instructions. They are run against one server, then against several behind a switch
that chooses by forecast, and behind one that chooses at random. Told are the prompt tokens that were found in a
cache, and the time to the first token at the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from penstock.app.bench.client import exchange
from penstock.app.bench.server_process import ServerProcess
from penstock.app.bench.statistics import summarise
from penstock.app.listen import bind, port_of
from penstock.app.loop import Server, uvicorn_config
from penstock.app.reader import TimedAnswer, read_answer
from penstock.app.settings import Settings
from penstock.app.switch import make_switch
from penstock.cluster.members import parse_address
from penstock.cluster.switch import Switch
from penstock.priority.routing.router import RandomRouter, Router

_INSTRUCTIONS = "You tell stories about knights, foxes and old trees, kindly and in short sentences. " * 8
_SAID = "He rode on, and the fox {} went with him as far as the old tree. "
_MAX_TOKENS = 24
_AT_ONCE = 4
_SERVED_AS = "sessions"
_WARM_S = 20.0


@dataclass(frozen=True)
class Load:
    """The sessions, and the name under which the model is served."""

    num_sessions: int
    num_turns: int
    num_sentences: int = 0
    """Sentences that a turn says before it asks."""
    served_as: str = _SERVED_AS


async def session(base_url: str, number: int, load: Load, salt: str) -> list[TimedAnswer]:
    """One conversation, until a turn fails; `salt` keeps what earlier runs cached out of it."""
    address = urlsplit(base_url)
    messages = [{"role": "system", "content": _INSTRUCTIONS}]
    answers: list[TimedAnswer] = []
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
        recording = await exchange(address.hostname or "", address.port or 80, "/v1/chat/completions", body)
        answers.append(read_answer(recording))
        if answers[-1].error:
            break
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


async def run(base_url: str, load: Load) -> str:
    """All sessions, a few at a time, and what they came to."""
    salt, limit = secrets.token_hex(4), asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> list[TimedAnswer]:
        async with limit:
            return await session(base_url, number, load, salt)

    sessions = await asyncio.gather(*map(one, range(load.num_sessions)))
    found = summarise([answer for answers in sessions for answer in answers], _AT_ONCE)
    return (
        f"{found.requests} turns, {found.failed} failed: {found.cached_tokens / max(1, found.prompt_tokens):.1%} of "
        f"{found.prompt_tokens} prompt tokens cached, "
        f"TTFT P50 {found.ttft_p50_ms:.1f} ms, P99 {found.ttft_p99_ms:.1f} ms"
    )


async def behind(switch: Switch, urls: Sequence[str], load: Load) -> str:
    with bind("127.0.0.1", 0) as listener:
        server = Server(uvicorn_config(switch.app(), lifespan="off"))
        async with switch.running([parse_address(each) for each in urls]):
            task = asyncio.create_task(server.serve(sockets=[listener]))
            async with asyncio.timeout(_WARM_S):
                while len(switch.members.live) < len(urls):
                    await asyncio.sleep(0.05)
            try:
                return await run(f"http://127.0.0.1:{port_of(listener)}", load)
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
