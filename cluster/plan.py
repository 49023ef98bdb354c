"""The plan of a cluster: checked once, whether it comes from the command line or from a Serve config file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

OWN_SETTINGS = frozenset(("replica", "role", "cluster_secret", "metrics_port", "grpc_port"))
"""Settings of a server that replicas cannot have in common."""
OF_SWITCH = frozenset(
    (
        "config",
        "model",
        "revision",
        "insecure",
        "served_model_name",
        "api_keys_file",
        "overload_status",
        "allowed_hosts",
        "forwarded_allow_ips",
        "drain_timeout",
        "log_level",
        "log_format",
        "access_log",
    )
)
"""Settings that a switch has a use for, beside where it listens."""
UNENCRYPTED = frozenset(("ssl_certfile", "ssl_keyfile"))
"""Settings that the processes of a cluster cannot have, since they ask each other by plain HTTP."""
_NOT_IN_SETTINGS = {
    **dict.fromkeys(OWN_SETTINGS, "replicas cannot have it in common"),
    **dict.fromkeys(UNENCRYPTED, "a cluster speaks plain HTTP; put a proxy with the certificate in front"),
    "host": "host stands outside the settings; it is that of the switches",
    "port": "port stands outside the settings; it is that of the switches",
}
DRAIN_S = 30.0
"""The default of Settings.drain_timeout."""
_MARGIN_S = 15.0
_NAME = r"^[a-z0-9][a-z0-9-]{0,31}$"


class PlanError(ValueError):
    """The plan is not possible; the message names the field."""


class ReplicaRange(BaseModel):
    """The number of replicas; more than `least` as the load wants them."""

    model_config = ConfigDict(frozen=True)

    least: int = Field(ge=1, le=1000)
    most: int = Field(ge=1, le=1000)

    @model_validator(mode="after")
    def _in_order(self) -> ReplicaRange:
        if self.most < self.least:
            raise ValueError(f"{self.most} is less than {self.least}")
        return self

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most

    def __str__(self) -> str:
        return str(self.least) if self.is_fixed else f"{self.least}-{self.most}"


def _parse_range(value: object) -> object:
    """Reads a size like `3` or `2-8`."""
    if isinstance(value, ReplicaRange | dict):
        return value
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", str(value))
    if match is None:
        raise ValueError("must be like 3, or 2-8 for as many as the load wants")
    return {"least": int(match[1]), "most": int(match[2] or match[1])}


def _to_text(value: object) -> object:
    """Turns a number or a boolean of a config file into a setting's text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


_Text = Annotated[str, BeforeValidator(_to_text)]


class Plan(BaseModel):
    """Everything that replicas and switches are started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="penstock", pattern=_NAME)
    """The cluster's name; its applications are NAME-replicas, NAME-switches, and NAME-prefill if it has any."""
    settings: dict[str, _Text] = {}
    """Settings of `penstock serve`, by name (max_model_len), for every replica."""
    replicas: Annotated[ReplicaRange, BeforeValidator(_parse_range)] = ReplicaRange(least=1, most=1)
    prefill_replicas: int = Field(default=0, ge=0, le=1000)
    """Replicas in addition that are for long prompts alone; the others are then for all other tokens."""
    cpus: float = Field(default=1, ge=0)
    """Cores that Ray sets aside for a replica."""
    gpus: float = Field(default=0, ge=0)
    listen: Literal["loopback", "node"] = "loopback"
    """The replicas can be reached on their own machine alone, or at its address."""
    replica_port: int = Field(default=0, ge=0, le=65535)
    """The first port that a replica tries; with 0, any that is free."""
    surge: bool = False
    """Whether new replicas start before those end that they replace."""
    switches: int | None = Field(default=None, ge=1, le=1000)
    """The number of switches; None for one on each machine."""
    host: str = "127.0.0.1"
    """The address that switches listen at."""
    port: int = Field(default=8000, ge=0, le=65535)
    """The first port that a switch tries; several on one machine take the next ones."""
    by_command: bool = False
    """Whether `penstock cluster deploy` deployed it; a config file is Serve's own to change."""

    @classmethod
    def parse(cls, values: object) -> Plan:
        """Raises PlanError."""
        try:
            plan = cls.model_validate(values)
        except ValidationError as error:
            details = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in details["loc"]) or "plan"
            raise PlanError(f"{where}: {details['msg'].removeprefix('Value error, ')}") from None
        plan._check_settings()
        return plan

    def _check_settings(self) -> None:
        for name in sorted(_NOT_IN_SETTINGS.keys() & self.settings.keys()):
            raise PlanError(f"settings.{name}: {_NOT_IN_SETTINGS[name]}")
        if self.settings.get("log_level", "info") not in ("debug", "info"):
            raise PlanError(
                "settings.log_level: must be info or debug, since where a replica listens is read there"
            )
        try:
            self.drain_s  # noqa: B018
        except ValueError:
            raise PlanError("settings.drain_timeout: must be a number of seconds") from None

    @property
    def drain_s(self) -> float:
        return float(self.settings.get("drain_timeout", DRAIN_S))

    @property
    def stop_s(self) -> float:
        """The longest that a process may take to end once it is told to."""
        return self.drain_s + _MARGIN_S

    def environment(self, only: Iterable[str] | None = None) -> dict[str, str]:
        """Returns the settings as variables, since flags could be seen by all users of the machine."""
        names = self.settings.keys() if only is None else self.settings.keys() & set(only)
        return {f"PENSTOCK_{name.upper()}": self.settings[name] for name in sorted(names)}

    def replica_version(self) -> str:
        """Returns a text that differs wherever running replicas have to be replaced."""
        return _digest(
            self.settings, self.cpus, self.gpus, self.listen, self.replica_port, self.prefill_replicas > 0
        )

    def switch_version(self) -> str:
        return _digest(self.environment(OF_SWITCH), self.host, self.port)

    @property
    def replicas_app(self) -> str:
        return f"{self.name}-replicas"

    @property
    def prefill_app(self) -> str:
        return f"{self.name}-prefill"

    @property
    def switches_app(self) -> str:
        return f"{self.name}-switches"

    @property
    def directory(self) -> str:
        """The name of the directory's actor."""
        return f"{self.name}-directory"


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([version("penstock"), *parts]).encode()).hexdigest()[:16]
