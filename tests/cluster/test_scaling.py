"""How many replicas are wanted."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.scaling import MOST_AT_ONCE, TARGET, policy, wanted_replicas


def replica(
    kv: float = 0.0, promise: float = 0.0, kept: float = 1.0, missed: float = 0.0
) -> dict[str, float]:
    return {"kv": kv, "promise": promise, "kept": kept, "missed": missed}


@pytest.mark.parametrize(
    ("figures", "wanted"),
    [
        pytest.param([], 1, id="nobody yet"),
        pytest.param([replica()], 1, id="the last one stays"),
        pytest.param([replica(), replica()], 1, id="idle"),
        pytest.param([replica(kv=TARGET)] * 3, 3, id="at the target"),
        pytest.param([replica(kv=0.9)] * 3, 4, id="little KV is left"),
        pytest.param([replica(promise=1.0)] * 3, 5, id="forecasts take all that is promised"),
        pytest.param([replica(kv=0.9), replica(kv=0.5)], 2, id="the mean counts"),
        pytest.param([replica(kv=0.5)] * 3, 3, id="two of three would be too full"),
        pytest.param([replica(kv=0.4)] * 3, 2, id="two of three are enough"),
        pytest.param([replica(kept=2, missed=1)] * 2, 3, id="a third of the promises is missed"),
        pytest.param([replica(kept=0, missed=1)] * 2, 4, id="all are missed"),
        pytest.param([replica(kept=1, missed=99)] * 2, 4, id="not more than twice as many at once"),
        pytest.param([replica(kv=TARGET, kept=1000, missed=1)] * 2, 2, id="one miss in a thousand"),
    ],
)
def test_wanted(figures: list[dict[str, float]], wanted: int) -> None:
    assert wanted_replicas(figures) == wanted


@given(
    st.lists(
        st.builds(
            replica,
            kv=st.floats(0, 1),
            promise=st.floats(0, 3),
            kept=st.floats(0, 1000),
            missed=st.floats(0, 1000),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_one_less_or_at_most_twice_as_many(figures: list[dict[str, float]]) -> None:
    num = len(figures)
    assert max(1, num - 1) <= wanted_replicas(figures) <= math.ceil(num * MOST_AT_ONCE)


def context(**more: Any) -> Any:
    """A `ray.serve.config.AutoscalingContext` as far as it is read."""
    return SimpleNamespace(**{"running_replicas": ["a", "b"], "target_num_replicas": 5, **more})


def test_serve_is_told_by_its_own_names() -> None:
    ctx = context(aggregated_metrics={"kv": {"a": 0.9, "b": 0.9}, "kept": {"a": 1.0, "b": 1.0}})
    assert policy(ctx) == (3, {})


@pytest.mark.parametrize("metrics", [None, {}, {"kv": {"a": 0.9}}])
def test_nothing_changes_before_all_have_said_how_they_do(metrics: Any) -> None:
    assert policy(context(aggregated_metrics=metrics)) == (5, {})
