"""The soak test in its short form: every client and every trouble once, on a real server and a real Redis."""

from __future__ import annotations

import pytest

from loadtests.soak import soak


@pytest.mark.long("soak")
def test_nothing_fails_and_nothing_is_left() -> None:
    assert soak(seconds=8, num_clients=4) == []
