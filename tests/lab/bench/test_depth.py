"""The figures of k drafts in every step, and their table."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from lab.bench.depth import LENGTHS, Depth, DepthBench, Job
from lab.bench.depth_plot import draw_depths
from lab.bench.report import _print_depths
from penstock.app.checkpoint import DEMO_DRAFT, DEMO_MODEL
from penstock.engine.kernels.cpu.native import NativeUnavailable, load_library
from penstock.engine.planning.timings import DraftCount


def test_acceptance_is_of_the_drafts_after_right_ones() -> None:
    depth = Depth(streams=1, length=2, temperature=0.0)
    depth.conclude(DraftCount([8, 8], [4, 1]))
    assert depth.acceptance == [0.5, 0.25]
    assert depth.rate == pytest.approx(5 / 12)
    assert depth.expected == pytest.approx((1 - depth.rate**3) / (1 - depth.rate))


def test_gain_is_in_tokens_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    plain, drafted = Depth(2, 0, 0.0, 10, 20, 1.0, []), Depth(2, 1, 0.0, 10, 30, 1.2, [0.5], 0.5, 1.5)
    _print_depths([asdict(plain), asdict(drafted)])
    assert capsys.readouterr().out.split()[-8:] == ["2,", "0,", "1", "0.50", "1.50", "1.50", "120.00", "1.25"]


def test_the_picture(tmp_path: Path) -> None:
    rows = [
        asdict(Depth(streams, length, temperature, 10, 10 * streams * (1 + length), 1.0, [], 0.5, 1.5))
        for temperature in (0.0, 0.8)
        for streams in (1, 8)
        for length in LENGTHS
    ]
    draw_depths(tmp_path / "drafts.png", rows)
    found = image.imread(tmp_path / "drafts.png")
    assert found.shape[:2] == (640, 1280)
    assert len(np.unique(found.reshape(-1, found.shape[2]), axis=0)) > 50, "something is drawn"


def test_every_step_has_as_many_drafts() -> None:
    try:
        load_library(lambda _: None)
    except NativeUnavailable:
        pytest.skip("drafts are verified by the native kernels, and there is no compiler for them")
    job = Job(str(DEMO_MODEL), str(DEMO_DRAFT), None, 1, streams=[2], num_tokens=16, rounds=1)
    found = DepthBench(job).measure()
    assert [depth.length for depth in found] == [*LENGTHS, *LENGTHS]
    for depth in found:
        assert depth.num_steps > 0
        assert depth.acceptance is not None
        assert len(depth.acceptance) == depth.length
        assert 2 * depth.num_steps <= depth.num_tokens <= 2 * depth.num_steps * (1 + depth.length)
    assert any(depth.rate > 0.3 for depth in found)
