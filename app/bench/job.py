"""Measurements in processes of their own.

`python -m penstock.app.bench.job MODULE` calls the module's function `measure`: its arguments come as JSON on stdin,
and its result goes to stdout as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any

from penstock.app.errors import OperatorError

ModuleRunner = Callable[[str, object], Any]
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
        [sys.executable, "-m", "penstock.app.bench.job", module],
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


if __name__ == "__main__":
    json.dump(import_module(sys.argv[1]).measure(**json.load(sys.stdin)), sys.stdout, default=asdict)
