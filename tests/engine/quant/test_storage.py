"""The description of a stored tensor decides what is accepted."""

from __future__ import annotations

import pytest

from penstock.engine.quant.storage import Shape, StoredTensor


@pytest.mark.parametrize(
    ("wanted", "loose", "found", "fits"),
    [
        ((8, 1), False, (8, 1), True),
        ((8, 1), False, (8,), False),
        ((8, 1), True, (8,), True),
        ((1,), True, (), True),
        ((1, 1), True, (2,), False),
        ((8, 1), True, (1, 8), True),
        ((8, 2), True, (2, 8), False),
        ((8, 2), True, (16,), False),
        ((None,), False, (77,), True),
        ((None,), False, (77, 1), False),
        ((None, 4), False, (9, 4), True),
        ((None, 4), False, (9, 5), False),
    ],
)
def test_shapes_that_fit(wanted: Shape, loose: bool, found: tuple[int, ...], fits: bool) -> None:
    assert StoredTensor("weight", wanted, loose=loose).fits(found) == fits


def test_a_shape_for_an_operator() -> None:
    assert StoredTensor("weight", (None, 16)).shape_text == "[any, 16]"
