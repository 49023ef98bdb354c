"""What tests of all packages share: a real server, and a real browser to look at it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from app.bench.server_process import ServerProcess

# Triton decides when it is first imported whether it interprets, and other libraries import it, too.
if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Here hypothesis looks for new examples at every run; in CI the same commit gives the same result, on any machine.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(scope="session")
def live_server() -> Iterator[str]:
    """The address of a server that serves the demo model; it must end well, too."""
    server = ServerProcess()
    server.wait_ready()
    yield server.url
    assert server.stop() == 0, server.log


@pytest.fixture(scope="session")
def chromium_path() -> str:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((path for name in names if (path := shutil.which(name))), None)
    assert path is not None, "the page tests need Chromium: make test installs it"
    return path
