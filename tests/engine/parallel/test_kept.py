"""A part of long sequences is kept on ranks and on stages: they drop what one process drops."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.driver import Driver
from tests.engine.parallel.comparing import Pool
from tests.engine.test_kept_runs import LENGTHS, LLAMA, request


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 1), (1, 2)])
def test_several_processes_choose_the_tokens_of_one(
    pool: Pool, num_ranks: int, num_stages: int, tmp_path: Path
) -> None:
    """The pool has no room for the longest sequence."""
    folder, requests = LLAMA.make(tmp_path), [request(name) for name in LENGTHS]
    alone = Driver(folder, num_blocks=128, max_drafts=0)
    together = Driver(folder, num_blocks=14, kv_keep=64, followers=pool.of(num_ranks, num_stages))
    for driver in (alone, together):
        driver.run(*requests)
    for name in LENGTHS:
        assert together.tokens(name) == alone.tokens(name)
