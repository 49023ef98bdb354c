"""A conversation over ten turns and a restart: each turn computes only what is new."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import openai
from openai.types.responses import Response

from app.bench.server_process import ServerProcess
from loadtests.forked import ForkedServer
from tests.redis_server import RedisServer

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
                model="penstock-demo",
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


def test_ten_turns_and_one_after_a_restart_find_what_was_before() -> None:
    conversation = Conversation()
    with RedisServer() as redis:
        arguments = ["--redis-url", redis.url, "--replica", "the-one"]
        with ForkedServer(arguments) as server:
            shares = [conversation.go_on(server) for _ in range(NUM_TURNS)]
            assert min(shares[1:]) >= MIN_SHARE, shares
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        with ForkedServer(arguments) as server:
            server.wait_line(" prefixes again, ")
            assert conversation.go_on(server) >= MIN_SHARE
