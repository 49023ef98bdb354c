"""A conversation over ten turns and a restart: each turn computes only what is new, as does a short prompt."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from openai.types.responses import Response

from loadtests.forked import ForkedServer
from penstock.app.bench.server_process import ServerProcess
from penstock.app.checkpoint import DEMO_MODEL
from tests.engine.families import STATES
from tests.redis_server import RedisServer

MODEL = "penstock-demo"
NUM_TURNS = 10
MIN_SHARE = 0.9
BEGINNING = (
    " ".join(f"Once the knight number {number} rode through the dark forest." for number in range(80))
    + " Tell me a story about one of them."
)
FOLLOW_UPS = ("Tell me more.", "And then?", "Who was with him?")


@dataclass
class Conversation:
    """One that grows by `previous_response_id`."""

    last: Response | None = None
    num_turns: int = 0

    def go_on(self, server: ServerProcess) -> float:
        """One more turn; the share of its prompt that was found in the cache."""
        text = BEGINNING if self.last is None else FOLLOW_UPS[self.num_turns % len(FOLLOW_UPS)]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            response = api.responses.create(
                model=MODEL,
                input=text,
                max_output_tokens=32,
                previous_response_id=self.last.id if self.last else openai.omit,
            )
        assert response.status in ("completed", "incomplete")
        assert response.output_text
        assert response.usage is not None
        self.last = response
        self.num_turns += 1
        return response.usage.input_tokens_details.cached_tokens / response.usage.input_tokens


def cached_share(server: ServerProcess, prompt: Sequence[int]) -> float:
    """Completes a prompt of tokens; the share of it that was found in the cache."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        made = api.completions.create(model=MODEL, prompt=list(prompt), max_tokens=8)
    assert made.usage is not None
    assert made.usage.prompt_tokens_details is not None
    return (made.usage.prompt_tokens_details.cached_tokens or 0) / made.usage.prompt_tokens


@pytest.fixture(params=[None, "Qwen 3.5"], ids=lambda family: family or "demo")
def arguments(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Of a server of the demo model, or of a random one whose layers have states, with the demo model's tokens."""
    own = ["--replica", "the-one", "--served-model-name", MODEL]
    if request.param is None:
        return own
    sizes = {"vocab_size": 3_072, "max_position_embeddings": 4_096, "bos_token_id": 256, "eos_token_id": 257}
    folder = STATES[request.param].make(tmp_path, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    return [*own, "--model", str(folder)]


def test_ten_turns_and_one_after_a_restart_find_what_was_before(arguments: list[str]) -> None:
    conversation = Conversation()
    prompt = random.Random(0).choices(range(300, 3_000), k=100)
    with RedisServer() as redis:
        arguments = [*arguments, "--redis-url", redis.url]
        with ForkedServer(arguments) as server:
            shares = [conversation.go_on(server) for _ in range(NUM_TURNS)]
            assert min(shares[1:]) >= MIN_SHARE, shares
            asked = [cached_share(server, prompt) for _ in range(3)]
            assert asked[0] == 0
            assert min(asked[1:]) >= MIN_SHARE, asked
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        with ForkedServer(arguments) as server:
            server.wait_line(" prefixes again, ")
            assert conversation.go_on(server) >= MIN_SHARE
            assert cached_share(server, prompt) >= MIN_SHARE
