"""How much `make test` tries of what has many cases; `make test-all` tries all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings


def examples(number: int) -> int:
    """The number of examples for a property that is to have `number` of them in `make test-all`."""
    assert settings.default is not None
    return max(min(number, 5), number * settings.default.max_examples // 100)


def leave_combinations(items: Iterable[pytest.Item]) -> None:
    """Marks those combinations of parameters as long whose values all have been in an earlier one.

    Every value of every parameter stays in a test that is marked `combinations`.
    """
    seen: set[tuple[str, str, int]] = set()
    for item in items:
        mark = item.get_closest_marker("combinations")
        if mark is None or item.get_closest_marker("long") or not hasattr(item, "callspec"):
            continue
        test = item.nodeid.partition("[")[0]
        values = {(test, name, id(value)) for name, value in item.callspec.params.items()}
        if values <= seen:
            item.add_marker(pytest.mark.long(*mark.args))
        seen |= values
