"""The settings of a server that mean something in a program, and what differs there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from app.errors import suggestion
from app.settings import Settings, load_settings
from priority.lanes import DEFAULT_POLICIES

SERVER_ONLY = frozenset(
    {
        "served_model_name", "host", "port", "api_keys_file", "cors_origins", "allowed_hosts", "redis_url", "replica",
        "warm_up_tokens", "drain_timeout", "metrics_port", "metrics_compat", "otlp_endpoint", "log_level", "log_format",
        "access_log",
    }
)  # fmt: skip
"""Settings that mean nothing here."""


def offline_settings(model: str | os.PathLike[str] | None, given: Mapping[str, object]) -> Settings:
    """Lanes that nobody set promise nothing and hold nothing back: what counts here is when all is done."""
    known = Settings.model_fields.keys() - SERVER_ONLY
    for name in given.keys() - known:
        raise TypeError(f"an LLM has no setting {name!r}{suggestion(name, known)}")
    settings = load_settings(given if model is None else {"model": os.fspath(model), **given})
    lanes = {
        f"lane_{lane.label}": replace(policy, ttft_s=inf, tpot_s=inf, kv_share=1.0)
        for lane, policy in settings.lanes.items()
        if policy == DEFAULT_POLICIES[lane]
    }
    return settings.model_copy(update=lanes)
