"""`loadtests/gpu/run`: what runs, for how long, and where the report goes."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loadtests.gpu.figures import say
from loadtests.gpu.packages import ROOT, PackagesMissing, check_packages, needed, prepare
from loadtests.gpu.parts import PARTS, Outcome, Part, run_part
from penstock.app.arguments import listed, one_of, positive

REPORTS = ROOT / "loadtests" / "reports"
LIMIT_S = 570.0
"""The limit of the whole run, which may be given ten minutes and no more."""

EXIT_FAILED, EXIT_CANNOT = 1, 2


def main(arguments: Sequence[str]) -> int:
    """Runs the parts; the exit status: 1 if a test or a part failed, 2 if nothing can be measured here."""
    started_s = time.monotonic()
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-", dir=options.scratch) as scratch:
        try:
            prepare(Path(scratch) / "packages", say)
            check_device(options.dry_run)
            return _Run(options, Path(scratch), started_s + options.limit).run()
        except (PackagesMissing, NoDevice) as error:
            print(f"gpu: {error}", file=sys.stderr)
            return EXIT_CANNOT


class NoDevice(RuntimeError):
    """There is no GPU to measure."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadtests/gpu/run",
        description="Measures this server on the GPU of this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer sizes and shorter runs, in about three minutes"
    )
    parser.add_argument(
        "--only",
        type=listed(one_of([part.name for part in PARTS])),
        metavar="PART,PART",
        help=f"of {','.join(part.name for part in PARTS)}; all by default",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="tiny sizes, on the CPU: does the command itself work? No report",
    )
    parser.add_argument(
        "--limit", type=positive, default=LIMIT_S, metavar="SECONDS", help=f"of the whole run ({LIMIT_S:g})"
    )
    parser.add_argument("--reports", type=Path, default=REPORTS, metavar="DIR", help="where the report goes")
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="room for 19 GB of checkpoints; the system's temporary folder",
    )
    return parser


def check_device(dry_run: bool) -> None:
    import torch

    if dry_run:
        return
    if not torch.cuda.is_available():
        raise NoDevice(
            f"torch {torch.__version__} sees no CUDA device, nothing to measure; --dry-run works without"
        )
    check_packages(needed("gpu"))


class _Run:
    """The parts, one after another; the report is written after each, so that what is cut short is not lost."""

    def __init__(self, options: argparse.Namespace, scratch: Path, deadline_s: float) -> None:
        self.options = options
        self.scratch = scratch
        self.deadline_s = deadline_s
        self.outcomes: list[Outcome] = []
        self.mode = "dry" if options.dry_run else "quick" if options.quick else "full"
        self.date = time.strftime("%Y-%m-%d")

    def run(self) -> int:
        from loadtests.gpu.report import as_markdown

        names = ["environment", *(self.options.only or [part.name for part in PARTS[1:]])]
        parts = sorted(
            (part for part in PARTS if part.name in names), key=lambda part: names.index(part.name)
        )
        if self.options.dry_run:  # it measures nothing: each part may take as long as the whole
            parts = [replace(part, bound_s=self.options.limit) for part in parts if part.is_for_dry_runs]
        for number, part in enumerate(parts, 1):
            left_s = self.deadline_s - time.monotonic()
            say(f"[{number}/{len(parts)}] {part.name}, at most {min(part.bound_s, left_s):.0f} s")
            self.outcomes.append(run_part(part, self._command(part), left_s))
            self._save()
        print(as_markdown(self._title(), self.outcomes, with_goals=not self.options.dry_run))
        for outcome in self.outcomes:
            if outcome.failure:
                say(f"{outcome.name} failed: {outcome.failure}")
        return EXIT_FAILED if any(outcome.failure for outcome in self.outcomes) else 0

    def _command(self, part: Part) -> list[str]:
        module = f"loadtests.gpu.{part.module}"
        common = ["--mode", self.mode, "--scratch", str(self.scratch)]
        return [module, *part.arguments, *common]

    def _save(self) -> None:
        if self.options.dry_run:
            return
        from loadtests.gpu.report import file_stem, write

        path = write(self.options.reports, file_stem(self._device(), self.date), self._title(), self.outcomes)
        say(f"written: {path}")

    def _title(self) -> str:
        what = {"full": "", "quick": ", quick run", "dry": ", dry run on a CPU: no figure means anything"}
        return f"Penstock on {self._device()}, {self.date}{what[self.mode]}"

    def _device(self) -> str:
        found = (outcome.facts["device"] for outcome in self.outcomes if "device" in outcome.facts)
        return next(found, "an unknown device")
