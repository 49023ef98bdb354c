"""The command line as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys


def penstock(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `penstock` with these environment variables beside those of the tests."""
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,  # the CPU kernels may have to be compiled
        check=False,
        env={**os.environ, **variables},
    )
