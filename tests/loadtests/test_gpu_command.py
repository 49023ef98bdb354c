"""The command itself: what it starts, for how long, and what it reports, on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loadtests.gpu import command
from loadtests.gpu.packages import ROOT
from loadtests.gpu.parts import PARTS, Outcome, Part

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
        "'everything' is none of environment, tests, kernels, llama-8b, qwen3-0.6b, quantized, boundaries, experts, "
        "states, drafts, llama-8b-int4, llama-8b-fp8, llama-8b-ranks, kernel-tests" in done.stderr
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
        "routing, 4 rows",
        "experts, 16 bits, 4 rows",
        "experts, mxfp4, 1 rows",
        "llama-8b-int4: TPOT, batch 1",
        "llama-8b: TPOT, batch 3, no drafts",
        "llama-8b: TPOT, batch 3, 4 drafts, 80% right",
        "llama-8b: TPOT, batch 3, 4 drafts of a draft model, 80% right",
        "llama-8b: TPOT, batch 3, 4 drafts of an EAGLE-3 head, 80% right",
        "qwen3.5-8b: TPOT, batch 3, 4 drafts of its own layer, 80% right",
        "attention decode, KV int8, batch 1, context 32",
        "rotate_and_write, KV int8, 16 rows",
        "attention decode, latents, batch 1, context 32",
        "attention prefill, latents, 32 tokens",
    )
    for name in names:
        assert f"| {name} |" in done.stdout, done.stdout + done.stderr
    assert "dry run on a CPU" in done.stdout
    assert "## Goals" not in done.stdout
    assert "the rest of" not in done.stdout, done.stdout
    assert not reports.exists()
    assert list(scratch.iterdir()) == []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Part, list[str], float]]:
    """The parts that are started, of which kernels fail, on a card that is not there."""
    found: list[tuple[Part, list[str], float]] = []

    def start(part: Part, command: list[str], left_s: float) -> Outcome:
        found.append((part, command, left_s))
        facts = {"device": "A Card"} if part.name == "environment" else {}
        return Outcome(part.name, facts=facts, failure="it broke" if part.name == "kernels" else None)

    monkeypatch.setattr(command, "run_part", start)
    monkeypatch.setattr(command, "prepare", lambda *_: None)
    monkeypatch.setattr(command, "check_device", lambda _: None)
    times_s = iter(range(0, 100_000, 10))
    monkeypatch.setattr(
        command, "time", SimpleNamespace(monotonic=lambda: next(times_s), strftime=lambda _: "2026-01-02")
    )
    return found


@pytest.mark.parametrize(
    ("flags", "mode", "names"),
    [
        (["--quick"], "quick", [part.name for part in PARTS]),
        ([], "full", [part.name for part in PARTS]),
        (["--only", "drafts,kernels"], "full", ["environment", "drafts", "kernels"]),
    ],
)
def test_parts_are_started_in_the_order_that_is_asked_for_and_reported(
    flags: list[str],
    mode: str,
    names: list[str],
    started: list[tuple[Part, list[str], float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main([*flags, "--reports", str(tmp_path / "reports")]) == 1
    assert [part.name for part, _, _ in started] == names
    assert [left_s for *_, left_s in started] == [570 - 10 * number for number in range(1, len(names) + 1)]
    for part, line, _ in started:
        assert line[:-1] == [f"loadtests.gpu.{part.module}", *part.arguments, "--mode", mode, "--scratch"]
        assert Path(line[-1]).name.startswith("penstock-gpu-")
        assert not Path(line[-1]).exists()
    report = tmp_path / "reports" / "a-card-2026-01-02.md"
    title = f"# Penstock on A Card, 2026-01-02{', quick run' if mode == 'quick' else ''}"
    printed = capsys.readouterr()
    assert printed.out == report.read_text() + "\n"
    assert printed.out.startswith(f"{title}\n\n| machine |")
    bounds = [min(part.bound_s, left_s) for part, _, left_s in started]
    begun = [
        f"[{i}/{len(names)}] {name}, at most {s:.0f} s"
        for i, (name, s) in enumerate(zip(names, bounds, strict=True), 1)
    ]
    assert [line.rpartition("  ")[2] for line in printed.err.splitlines()] == [
        *(line for one in begun for line in (one, f"written: {report}")), "kernels failed: it broke"
    ]  # fmt: skip
