"""The lanes: how urgent they are, what each promises, and how much may wait in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from math import inf, isfinite
from typing import NamedTuple


class Lane(IntEnum):
    """The smaller the number, the more urgent."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2

    @property
    def label(self) -> str:
        return self.name.lower()


def parse_lane(label: object) -> Lane:
    """Raises ValueError if there is no such lane."""
    for lane in Lane:
        if lane.label == label:
            return lane
    raise ValueError(f"there is no lane {label!r}; there are {', '.join(lane.label for lane in Lane)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePolicy:
    """The promises and bounds of a lane.

    Raises:
        ValueError: naming the field that is wrong.
    """

    ttft_s: float = inf
    """The promised seconds from a request's arrival to its first token; infinite if nothing is promised."""
    tpot_s: float = inf
    """The promised seconds between the tokens of a running stream."""
    weight: int = 1
    """The lane's share of the work among lanes that all have some."""
    max_requests: int = 1_024
    """Answers that may wait; each choice of a request counts."""
    max_tokens: int = 1_048_576
    """Uncached prompt tokens that may wait; a token of a long prompt counts as more."""
    max_bytes: int = 64 * 1024 * 1024
    """Memory that waiting prompts may take."""
    ttl_s: float = 300.0
    """The longest that a request may wait."""
    ageing_s: float = inf
    """A waiting tenant that was not served for this long goes before its turn, within a quarter of the work."""
    tenant_share: float = 0.5
    """The part of `max_requests` and `max_tokens` that one tenant may fill when there are several."""
    kv_share: float = 1.0
    """A request starts only while the pool is in use up to this share with it: the rest is held for urgent ones."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} must be greater than 0, not {value}")
        for name in ("tenant_share", "kv_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, not {getattr(self, name)}")
        if not isfinite(self.ttl_s):
            raise ValueError("ttl_s must be finite")


class Urgency(NamedTuple):
    """The lane that a request is let into, and its promise."""

    lane: Lane
    tried: Lane | None = None
    """A more urgent lane that takes it instead, if that lane's promise is forecast to be kept."""
    ttft_s: float | None = None
    """The seconds to its first token that are promised; None for those of its lane."""


DEFAULT_POLICIES: Mapping[Lane, LanePolicy] = {
    Lane.INTERACTIVE: LanePolicy(
        ttft_s=1.0, tpot_s=0.1, weight=16, max_requests=256, max_tokens=65_536, max_bytes=2**24, ttl_s=10.0
    ),
    Lane.STANDARD: LanePolicy(
        ttft_s=30.0, tpot_s=0.2, weight=4, ttl_s=60.0, ageing_s=30.0, kv_share=0.92
    ),
    Lane.BATCH: LanePolicy(
        weight=1, max_requests=4_096, max_tokens=8_388_608, max_bytes=2**28, ttl_s=3_600.0, ageing_s=120.0,
        kv_share=0.8,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A sender of requests, and its entitlements."""

    name: str
    weight: int = 1
    """The tenant's share of the work among the tenants of a lane that all have some."""
    default_lane: Lane | None = None
    """The lane of a request that names none; None to let the server choose."""
    top_lane: Lane = Lane.INTERACTIVE
    """The most urgent lane that its requests may have."""

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight must be greater than 0, not {self.weight}")
        if self.default_lane is not None and self.default_lane < self.top_lane:
            raise ValueError(
                f"default_lane {self.default_lane.label} is above top_lane {self.top_lane.label}"
            )

    @property
    def sure_lane(self) -> Lane:
        """The lane of a request that names none and is not streamed."""
        return max(Lane.STANDARD, self.top_lane) if self.default_lane is None else self.default_lane
