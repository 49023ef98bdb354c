"""The table of what a watermark costs, of a few texts of the demo model."""

from __future__ import annotations

import pytest

from lab.watermark import table
from penstock.app.offline.llm import LLM

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_strong_watermark_is_found_and_costs_perplexity() -> None:
    with LLM(progress=False, max_num_seqs=8) as llm:
        _, _, plain, strong = table(llm, [0.0, 10.0], 0.5, 6)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (plain, strong)]
    assert [row[0] for row in cells] == ["0", "10"]
    perplexities = [float(row[2]) for row in cells]
    assert 1 < perplexities[0] < perplexities[1]
    scores = [float(row[-1].rpartition(" ")[2]) for row in cells]
    assert abs(scores[0]) < 4
    assert scores[1] > 6
