"""The directory of a cluster: a small actor of Ray's that replicas and switches tell every second that they are there.

The directory holds nothing that is not told again, so a restarted one knows everything after a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

BEAT_S = 1.0
"""The interval at which replicas and switches say that they are there."""
GONE_S = 10.0
"""The silence after which a replica or a switch is taken to be gone."""
_NUM_FAILURES = 8


class ModelMismatch(Exception):
    """A replica serves something else than the others do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The state that a replica or a switch reports of itself."""

    kind: Literal["replica", "switch"]
    name: str
    url: str
    node: str
    """The address of its machine."""
    pid: int
    """The id of the process that serves."""
    identity: str = ""
    """The identity of the model that a replica serves."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """The plan that a replica was deployed with."""
    figures: Mapping[str, float] = field(default_factory=dict)
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatReply:
    """The answer to a report."""

    replicas: tuple[str, ...] = ()
    """The addresses of the replicas."""
    refused: float = 0.0
    """The replica's share of the requests a second that switches refused since all replicas were too busy."""
    drain: bool = False
    """The replica is to end when its streams have."""
    num_switches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All that the directory knows."""

    replicas: tuple[Report, ...]
    switches: tuple[Report, ...]
    failures: tuple[str, ...]
    """The last reasons why processes did not start, or ended."""


class Directory:
    """The state of one cluster."""

    def __init__(self, secret: str) -> None:
        """Replicas and switches know each other by `secret`."""
        self._secret = secret
        self._heard: dict[str, tuple[Report, float]] = {}
        self._to_drain: set[str] = set()
        self._failures: deque[str] = deque(maxlen=_NUM_FAILURES)

    def secret(self) -> str:
        return self._secret

    def beat(self, report: Report) -> BeatReply:
        """Takes a report; raises ModelMismatch for a replica that serves something else than those that are here."""
        self._forget_silent()
        if report.kind == "replica" and report.name not in self._heard:
            for other in self._of("replica"):
                if other.identity != report.identity:
                    raise ModelMismatch(
                        f"it serves {report.identity}, and {other.name} on {other.node} serves {other.identity}; "
                        "all of a cluster must have the same checkpoint and version of Penstock"
                    )
        self._heard[report.name] = report, monotonic()
        replicas = self._of("replica")
        if report.kind == "switch":
            return BeatReply(replicas=tuple(one.url for one in replicas))
        switches = self._of("switch")
        return BeatReply(
            refused=sum(one.figures.get("refused", 0.0) for one in switches) / len(replicas),
            drain=report.name in self._to_drain,
            num_switches=len(switches),
        )

    def leave(self, name: str) -> None:
        self._heard.pop(name, None)
        self._to_drain.discard(name)

    def drain(self, name: str) -> bool:
        """Asks a replica to end; False if there is none of this name."""
        self._forget_silent()
        is_there = any(one.name == name for one in self._of("replica"))
        if is_there:
            self._to_drain.add(name)
        return is_there

    def note_failure(self, line: str) -> None:
        self._failures.append(line)

    def forget_failures(self) -> None:
        self._failures.clear()

    def view(self) -> ClusterView:
        self._forget_silent()
        return ClusterView(
            replicas=tuple(self._of("replica")),
            switches=tuple(self._of("switch")),
            failures=tuple(self._failures),
        )

    def _of(self, kind: str) -> list[Report]:
        return [report for report, _ in self._heard.values() if report.kind == kind]

    def _forget_silent(self) -> None:
        now = monotonic()
        for name in [name for name, (_, heard_s) in self._heard.items() if now - heard_s > GONE_S]:
            self.leave(name)
