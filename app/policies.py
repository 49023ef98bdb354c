"""The policies of lanes as an operator writes them."""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf, isfinite, isnan, nan
from typing import Any

from pydantic import BeforeValidator

from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy

_KEYS = {field.name.removesuffix("_s"): field.name for field in fields(LanePolicy)}


def read_policy(lane: Lane) -> BeforeValidator:
    """Reads `ttft=0.5,weight=8`, or a TOML table of the same keys; what it leaves out stays as it is by default."""

    def parse(value: object) -> object:
        if isinstance(value, LanePolicy):
            return value
        if isinstance(value, str):
            parts = [part.partition("=") for part in value.split(",") if part.strip()]
            value = {name.strip(): number.strip() for name, _, number in parts}
        if not isinstance(value, dict):
            raise ValueError("must be like ttft=0.5,weight=8")
        changes: dict[str, Any] = {_key(name): _value(name, number) for name, number in value.items()}
        try:
            return replace(DEFAULT_POLICIES[lane], **changes)
        except ValueError as error:
            attribute, _, fault = str(error).partition(" ")
            raise ValueError(f"{attribute.removesuffix('_s')} {fault}") from None

    return BeforeValidator(parse)


def policy_text(policy: LanePolicy) -> str:
    """A policy as `read_policy` reads it."""
    values = ((name, getattr(policy, attribute)) for name, attribute in _KEYS.items())
    return ",".join(f"{name}={'none' if number == inf else f'{number:.10g}'}" for name, number in values)


def _key(name: str) -> str:
    if name not in _KEYS:
        raise ValueError(f"keys are {', '.join(_KEYS)}")
    return _KEYS[name]


def _value(name: str, value: object) -> float:
    if value == "none":
        return inf
    try:
        number = float(value) if isinstance(value, str | int | float) else nan
    except ValueError:
        number = nan
    if isnan(number):
        raise ValueError(f"{name} must be a number or none")
    return int(number) if name == "weight" or (name.startswith("max_") and isfinite(number)) else number
