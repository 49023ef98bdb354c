"""The metrics of a switch."""

from __future__ import annotations

from penstock.gateway.instruments import Exposition

_CHOICE_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)


class SwitchMetrics:
    """The metrics of one switch."""

    def __init__(self) -> None:
        self.page = page = Exposition("penstock_switch_")
        count, counts, gauge = page.counter, page.counters, page.gauge
        self.requests = counts("requests", "Requests sent to a replica.", ["replica"])
        self.retries = count("retries", "Requests sent again, to another replica.")
        self.refused = counts("refused", "Requests refused by the switch, by reason.", ["reason"])
        self.mended = count("mended", "Streams that another replica continued.")
        self.broken = count("broken", "Replies that ended with an error because a replica died.")
        self.slow_readers = count("slow_readers", "Clients cut off because they did not read.")
        self.cached_tokens = count("cached_tokens", "Prompt tokens forecast to be cached there.")
        self.pulled_tokens = count("pulled_tokens", "Prompt tokens to take from another replica.")
        self.computed_elsewhere = count(
            "computed_elsewhere", "Prompts that a replica with --role prefill computed."
        )
        self.early_tokens = count(
            "early_tokens",
            "Prompt tokens whose KV a replica was told to take from one that still computed the prompt.",
        )
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens read.")
        self.streams = gauge("streams", "Requests in progress.")
        self.replicas = gauge("replicas", "Replicas whose state is known.")
        self.choice_seconds = page.histogram(
            "choice_seconds", "Time to read a request and choose its replica.", _CHOICE_BUCKETS_S
        )

    def render(self) -> bytes:
        return self.page.render()
