"""Settings: what cannot be meant is refused, and the refusal names the field."""

from __future__ import annotations

from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy, Tenant

FIELDS = (
    "ttft_s",
    "tpot_s",
    "weight",
    "max_requests",
    "max_tokens",
    "max_bytes",
    "ttl_s",
    "ageing_s",
    "tenant_share",
    "kv_share",
)


def policy(**fields: float) -> LanePolicy:
    return LanePolicy(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", FIELDS)
@given(value=st.sampled_from([0, -1, -0.5, -inf, nan]))
def test_what_is_not_positive_is_refused_by_name(field: str, value: float) -> None:
    """A zero promise, a negative weight, a share of nothing."""
    with pytest.raises(ValueError, match=rf"^{field} must be greater than 0"):
        policy(**{field: value})


@pytest.mark.parametrize("field", ["tenant_share", "kv_share"])
@pytest.mark.parametrize("value", [1.0001, 2, inf])
def test_a_share_of_more_than_all_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be at most 1"):
        policy(**{field: value})


def test_waiting_for_ever_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^ttl_s must be finite"):
        policy(ttl_s=inf)


@pytest.mark.parametrize(
    ("field", "most"),
    [("ttft_s", inf), ("tpot_s", inf), ("ageing_s", inf), ("tenant_share", 1.0), ("kv_share", 1.0)],
)
def test_a_lane_may_promise_nothing_and_have_all(field: str, most: float) -> None:
    assert getattr(policy(**{field: most}), field) == most


@given(weight=st.integers(max_value=0))
def test_a_tenant_without_weight_is_refused_by_name(weight: int) -> None:
    with pytest.raises(ValueError, match=r"^weight must be greater than 0"):
        Tenant(name="t", weight=weight)


@given(default=st.sampled_from(Lane), top=st.sampled_from(Lane))
def test_a_tenant_starts_no_higher_than_it_may_go(default: Lane, top: Lane) -> None:
    if default >= top:
        assert Tenant(name="t", default_lane=default, top_lane=top).default_lane is default
    else:
        with pytest.raises(ValueError, match=rf"default_lane {default.label} is above top_lane {top.label}"):
            Tenant(name="t", default_lane=default, top_lane=top)


def test_lanes_are_in_order_of_urgency_and_so_is_what_they_get() -> None:
    urgent, standard, batch = (DEFAULT_POLICIES[lane] for lane in Lane)
    assert [lane.label for lane in sorted(Lane)] == ["interactive", "standard", "batch"]
    assert urgent.ttft_s < standard.ttft_s < batch.ttft_s == inf
    assert urgent.tpot_s < standard.tpot_s < batch.tpot_s == inf
    assert urgent.weight > standard.weight > batch.weight
    assert urgent.kv_share > standard.kv_share > batch.kv_share
    assert urgent.ttl_s < standard.ttl_s < batch.ttl_s
    assert isfinite(standard.ageing_s)
    assert isfinite(batch.ageing_s)
