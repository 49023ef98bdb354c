"""The command line as a user runs it."""

from __future__ import annotations

import os
import subprocess

from loadtests import forked

TIMEOUT_S = 300
"""The CPU kernels may have to be compiled."""


def penstock(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `penstock` with these environment variables beside those of the tests.

    It is a process of its own, forked from one that has imported torch already.
    """
    return forked.run(arguments, {**os.environ, **variables}, TIMEOUT_S)
