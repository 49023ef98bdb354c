"""The settings of a model in a program, and what differs there from a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from penstock.app.errors import suggestion
from penstock.app.settings import EngineSettings
from penstock.priority.lanes import DEFAULT_POLICIES


def offline_settings(model: str | os.PathLike[str] | None, given: Mapping[str, object]) -> EngineSettings:
    """Lanes that nobody set promise nothing and hold nothing back: what counts here is when all is done."""
    known = EngineSettings.model_fields.keys()
    for name in given.keys() - known:
        raise TypeError(f"an LLM has no setting {name!r}{suggestion(name, known)}")
    settings = EngineSettings.load(given if model is None else {"model": os.fspath(model), **given})
    lanes = {
        f"lane_{lane.label}": replace(policy, ttft_s=inf, tpot_s=inf, kv_share=1.0)
        for lane, policy in settings.lanes.items()
        if policy == DEFAULT_POLICIES[lane]
    }
    return settings.model_copy(update=lanes)
