"""Engine: the step thread, its inbox and its outbox."""

from __future__ import annotations

from enum import StrEnum


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"
