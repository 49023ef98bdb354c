"""The urgency of a request: what its `service_tier`, its headers and its API key say of its lane and promise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from math import inf, isfinite
from typing import NamedTuple

from penstock.gateway.errors import ApiError, invalid
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy, Tenant, Urgency

TTFT_HEADER, TPOT_HEADER = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
"""llm-d's headers for the time to the first token and per token that one request asks for, in milliseconds."""
_MILLISECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

_LANES = {
    "default": Lane.STANDARD,
    "flex": Lane.BATCH,
    "scale": Lane.INTERACTIVE,
    "priority": Lane.INTERACTIVE,
    "fast": Lane.INTERACTIVE,
    "ultrafast": Lane.INTERACTIVE,
}
_TIERS = {Lane.BATCH: "flex", Lane.INTERACTIVE: "priority", Lane.STANDARD: "default"}


class Slo(NamedTuple):
    """The promises that a request asks for in its headers; None for those of its lane."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_SLO = Slo()


def slo_of(headers: Mapping[str, str]) -> Slo:
    """Raises 400 if a header is not a positive number."""
    return Slo(_seconds(headers, TTFT_HEADER), _seconds(headers, TPOT_HEADER))


def urgency_of(
    service_tier: str | None,
    tenant: Tenant,
    *,
    streams: bool = False,
    slo: Slo = NO_SLO,
    policies: Mapping[Lane, LanePolicy] = DEFAULT_POLICIES,
) -> Urgency:
    """Returns the urgency of a request.

    The lane is that of its tier; or else the least urgent one whose promises are at most those that its headers ask
    for; or else that of the key. A stream whose lane is left to the server tries the interactive lane first.

    Raises:
        ApiError: 403, if its tier is above what the tenant's key allows; 400, if its headers are.
    """
    lane = _LANES.get(service_tier or "auto")
    if lane is not None and lane < tenant.top_lane:
        message = (
            f"Your API key does not allow the service_tier '{service_tier}'. "
            f"The most urgent one that it may name is '{tier_of(tenant.top_lane)}'."
        )
        raise invalid(message, "service_tier", "service_tier_not_allowed", HTTPStatus.FORBIDDEN)
    if slo != NO_SLO:
        return _with_slo(lane, tenant, slo, policies)
    lane = tenant.default_lane if lane is None else lane
    if lane is not None:
        return Urgency(lane)
    can_try = streams and tenant.top_lane is Lane.INTERACTIVE
    return Urgency(tenant.sure_lane, Lane.INTERACTIVE if can_try else None)


def tier_of(lane: Lane) -> str:
    """Returns the tier that a reply names for its lane."""
    return _TIERS[lane]


def _with_slo(lane: Lane | None, tenant: Tenant, slo: Slo, policies: Mapping[Lane, LanePolicy]) -> Urgency:
    """Within the interactive lane a request may ask for an earlier first token than the lane promises."""
    top, (ttft_s, tpot_s) = tenant.top_lane, (inf if seconds is None else seconds for seconds in slo)
    if top is not Lane.INTERACTIVE and ttft_s < policies[top].ttft_s:
        raise _beyond(TTFT_HEADER, policies[top].ttft_s)
    if lane is None:
        able = (one for one in Lane if policies[one].ttft_s <= ttft_s and policies[one].tpot_s <= tpot_s)
        lane = max(able, default=top)
        lane = max(lane, top)
    if tpot_s < policies[lane].tpot_s:
        raise _beyond(TPOT_HEADER, policies[lane].tpot_s)
    return Urgency(lane, ttft_s=slo.ttft_s)


def _beyond(header: str, shortest_s: float) -> ApiError:
    shortest = f"{1000 * shortest_s:g} ms or more" if isfinite(shortest_s) else "no such promise"
    return invalid(f"The header '{header}' asks for too much: your request may ask for {shortest}.", header)


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    if not _MILLISECONDS.fullmatch(text) or not float(text):
        raise invalid(f"The header '{name}' must be a positive number of milliseconds.", name)
    return float(text) / 1000
