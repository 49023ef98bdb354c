"""What a switch counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_NAME = "penstock_switch"


class Metrics:
    """The metrics of one switch."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            f"{_NAME}_requests", "Requests sent to a replica.", ["replica"], registry=self.registry
        )
        self.retries = Counter(
            f"{_NAME}_retries", "Requests that another replica was asked for.", registry=self.registry
        )
        self.refused = Counter(
            f"{_NAME}_refused", "Requests refused here, by reason.", ["reason"], registry=self.registry
        )
        self.mended = Counter(
            f"{_NAME}_mended", "Streams that another replica went on with.", registry=self.registry
        )
        self.broken = Counter(
            f"{_NAME}_broken",
            "Replies that ended with an error since a replica died.",
            registry=self.registry,
        )
        self.slow_readers = Counter(
            f"{_NAME}_slow_readers", "Clients cut off that did not read.", registry=self.registry
        )
        self.choice_seconds = Histogram(
            f"{_NAME}_choice_seconds",
            "Reading a request and choosing its replica.",
            buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1),
            registry=self.registry,
        )
        self.cached_tokens = Counter(
            f"{_NAME}_cached_tokens",
            "Prompt tokens forecast to be cached where they go.",
            registry=self.registry,
        )
        self.prompt_tokens = Counter(f"{_NAME}_prompt_tokens", "Prompt tokens read.", registry=self.registry)
        self.streams = Gauge(f"{_NAME}_streams", "Requests on their way now.", registry=self.registry)
        self.replicas = Gauge(f"{_NAME}_replicas", "Replicas whose state is known.", registry=self.registry)

    def render(self) -> bytes:
        return generate_latest(self.registry)
