"""The users against a real server, as locust runs them: headless over workers, and from its web page."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode

LOCUSTFILE = Path(__file__).parents[2] / "loadtests" / "locustfile.py"
KINDS = {"background", "batcher", "chatter", "completer", "leaver", "resumer", "slowreader"}


def locust(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), *arguments]


def test_users_and_reports_part_by_part() -> None:
    """In a process of its own, whose sockets locust leaves alone."""
    parts = Path(__file__).with_name("locust_parts.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(parts)],
        env={**os.environ, "LOCUST_SKIP_MONKEY_PATCH": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


def test_every_user_over_two_workers(live_server: str, tmp_path: Path) -> None:
    command = locust(
        *("--headless", "--processes", "2", "--host", live_server, "--users", "16", "--spawn-rate", "16"),
        *("--rate", "5", "--run-time", "3s", "--stop-timeout", "30", "--report", str(tmp_path)),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert {kind.split(",")[0] for kind in found["kinds"]} == KINDS
    assert found["failed"] == 0, found["errors"]
    assert found["cancelled"] > 0
    assert all(kind["done"] or name.startswith("leaver") for name, kind in found["kinds"].items())
    assert "promises kept" in done.stdout


def test_a_run_from_the_web_page(live_server: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    page = f"http://127.0.0.1:{port}"
    command = locust(
        "--host", live_server, "--web-host", "127.0.0.1", "--web-port", port, "--report", str(tmp_path)
    )
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "load_shape" in _first_page(page, process)
            form = {"user_count": 4, "spawn_rate": 4, "run_time": "2s", "rate": "5", "load_shape": "steps"}
            assert json.loads(_get(f"{page}/swarm", form))["success"]
            assert process.stderr is not None
            assert any("Shape test stopping" in line for line in process.stderr)
            while not (tmp_path / "report.html").exists():
                assert process.poll() is None
                _get(f"{page}/stats/requests")
        finally:
            process.terminate()
    assert json.loads((tmp_path / "report.json").read_text())["completed"] > 0


def _first_page(page: str, process: subprocess.Popen[str]) -> str:
    """The page as soon as somebody listens."""
    while process.poll() is None:
        try:
            return _get(page)
        except URLError:
            pass
    raise AssertionError("locust ended")


def _get(url: str, form: dict[str, object] | None = None) -> str:
    data = None if form is None else urlencode(form).encode()
    with urllib.request.urlopen(url, data, timeout=30) as reply:
        return str(reply.read().decode())
