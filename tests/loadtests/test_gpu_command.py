"""The command itself, as a real process on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loadtests.gpu.packages import ROOT

RUN = ROOT / "loadtests" / "gpu" / "run"


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUN), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stderr.startswith("gpu: torch ")
    assert "sees no CUDA device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_part_is_named() -> None:
    done = run("--only", "kernels,everything")
    assert done.returncode == 2
    assert (
        "'everything' is none of environment, tests, kernels, llama-8b, qwen3-0.6b, quantized, drafts, llama-8b-int4, "
        "llama-8b-fp8, llama-8b-ranks, kernel-tests" in done.stderr
    )


@pytest.mark.long("dry runs of the card's measurements")
def test_a_dry_run_goes_through_every_part_and_writes_no_report(tmp_path: Path) -> None:
    """From another folder, and with a scratch folder that is empty again when it is done."""
    reports, scratch = tmp_path / "reports", tmp_path / "scratch"
    scratch.mkdir()
    folders = ("--reports", str(reports), "--scratch", str(scratch))
    done = run("--dry-run", "--limit", "1200", *folders, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = (
        "tests/gpu: passed",
        "copy bandwidth",
        "llama-8b: prefill of 128 tokens",
        "qwen3-0.6b: 8 requests of 32 in, 8 out",
        "linear maps, int4, groups of 128 with zeros, 4 rows",
        "llama-8b-int4: TPOT, batch 1",
        "llama-8b: TPOT, batch 3, no drafts",
        "llama-8b: TPOT, batch 3, 4 drafts, 80% right",
        "llama-8b: TPOT, batch 3, 4 drafts of a draft model, 80% right",
        "attention decode, KV fp8, batch 1, context 32",
        "rotate_and_write, KV int8, 16 rows",
    )
    for name in names:
        assert f"| {name} |" in done.stdout, done.stdout + done.stderr
    assert "dry run on a CPU" in done.stdout
    assert "## Goals" not in done.stdout
    assert "the rest of" not in done.stdout, done.stdout
    assert not reports.exists()
    assert list(scratch.iterdir()) == []
