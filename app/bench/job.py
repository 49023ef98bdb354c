"""Measurements in processes of their own: `python -m penstock.app.bench.job MODULE` calls the module's function `measure`.

Its arguments come as JSON on stdin, and what it returns goes to stdout as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.app.errors import OperatorError

_PACKAGES = Path(__file__).parents[2]

Run = Callable[[str, object], Any]
"""Calls `measure` of a module, which is named as it is imported: the arguments as a mapping, and what it returns."""


def run_module(
    module: str, job: object, *, timeout_s: float | None = None, stderr: int | None = subprocess.PIPE
) -> Any:
    """Runs `measure` of a module in a process of its own.

    Raises:
        OperatorError: it failed; the message has the last line that it wrote to stderr.
        subprocess.TimeoutExpired: it took longer than `timeout_s`.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "penstock.app.bench.job", module],
        env=_own_packages_first(),
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode:
        raise OperatorError(
            f"{module} failed: {(done.stderr or '').strip().splitlines()[-1:] or ['no message']}"
        )
    return json.loads(done.stdout)


def _own_packages_first() -> dict[str, str]:
    """The variables of a process that imports this `app` (with -P, even if the working directory has another)."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(_PACKAGES), *([known] if known else [])])}


if __name__ == "__main__":
    json.dump(import_module(sys.argv[1]).measure(**json.load(sys.stdin)), sys.stdout, default=asdict)
