"""Which requests are sent."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Interactive:
    """Interactive requests beside a workload: one every `every_s`, whether or not the ones before are answered."""

    every_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Streams that start together; each sends `rounds` requests, one after another.

    A prompt is `shared_tokens` that all have in common and `prompt_tokens` of its own, all random.
    """

    name: str
    streams: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    rounds: int = 1
    seconds: float | None = None
    """If given, no stream begins a request after so long, and the rate is that of the tokens that came until then."""
    interactive: Interactive | None = None
    alone_s: float = 60.0
    """How long streams and interactive requests first run without each other."""
    service_tier: str = "flex"
    """The lane of the streams: of the batch lane nobody is refused."""

    @property
    def num_positions(self) -> int:
        """The positions that its longest sequence takes."""
        return self.shared_tokens + self.prompt_tokens + self.output_tokens

    def alone(self) -> tuple[Workload, Workload]:
        """The streams and the interactive requests, each without the other."""
        return (
            replace(self, interactive=None, seconds=self.alone_s),
            replace(self, streams=0, seconds=self.alone_s),
        )

    def bodies(self, model: str, token_ids: Sequence[int], seed: int) -> list[list[dict[str, object]]]:
        """`bodies[i]` are the requests of stream i."""
        prompts = self._prompts(token_ids, random.Random(seed))
        return [
            [
                completion(model, next(prompts), self.output_tokens, self.service_tier)
                for _ in range(self.rounds)
            ]
            for _ in range(self.streams)
        ]

    def interactive_bodies(
        self, model: str, token_ids: Sequence[int], seed: int
    ) -> list[list[dict[str, object]]]:
        """The interactive requests, each a stream of its own, in the order in which they come."""
        if self.interactive is None:
            return []
        source = random.Random(f"interactive {seed}")
        prompt_tokens, output_tokens = self.interactive.prompt_tokens, self.interactive.output_tokens
        return [
            [completion(model, source.choices(token_ids, k=prompt_tokens), output_tokens, "priority")]
            for _ in self.interactive_starts_s()
        ]

    def interactive_starts_s(self) -> list[float]:
        """When the interactive requests come, in seconds from the start of the streams."""
        if self.interactive is None or self.seconds is None:
            return []
        every_s = self.interactive.every_s
        return [i * every_s for i in range(int(self.seconds / every_s))]

    def _prompts(self, token_ids: Sequence[int], source: random.Random) -> Iterator[list[int]]:
        shared = source.choices(token_ids, k=self.shared_tokens)
        while True:
            yield shared + source.choices(token_ids, k=self.prompt_tokens)


def completion(
    model: str, prompt: list[int], output_tokens: int, service_tier: str = "flex"
) -> dict[str, object]:
    """A greedy completion of fixed length; of the batch lane, which refuses nobody, unless it says otherwise."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "service_tier": service_tier,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="W1", streams=1, prompt_tokens=128, output_tokens=128, rounds=3),
        Workload(name="W2", streams=16, prompt_tokens=256, output_tokens=128),
        Workload(name="W3", streams=16, prompt_tokens=32, shared_tokens=512, output_tokens=64),
        Workload(
            name="W4",
            streams=8,
            prompt_tokens=512,
            output_tokens=128,
            rounds=500,  # more than fit into the time
            seconds=300.0,
            interactive=Interactive(every_s=1.0, prompt_tokens=64, output_tokens=32),
        ),
        Workload(name="W5", streams=64, prompt_tokens=128, output_tokens=64),
        Workload(name="W6", streams=16, prompt_tokens=32, shared_tokens=100_000, output_tokens=64),
    )
}
USUAL = ("W1", "W2", "W3", "W4", "W5")
"""Those that fit into the positions of most models."""


_HEROES = (
    "knight", "dragon", "fox", "rabbit", "robot", "cat", "dog", "mouse", "owl", "bear", "hedgehog", "turtle", "pirate",
    "sailor", "baker", "gardener", "inventor", "fisher", "farmer", "princess", "witch", "mermaid", "wizard", "king",
)  # fmt: skip
_PLACES = (
    "in a forest", "in a castle", "in a small village", "on an island", "on a mountain", "in a city", "by the sea",
    "under the sea", "in a desert", "in a garden", "on a farm", "in a lighthouse",
)  # fmt: skip


def story_question(source: random.Random) -> str:
    """A request for one of the stories that the demo model tells."""
    return f"Tell me a story about a {source.choice(_HEROES)} {source.choice(_PLACES)}."
