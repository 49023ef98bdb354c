"""The systemd unit: systemd finds nothing wrong, and the service can read what it is given."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.app.settings import Settings
from tests.deploy.files import DEPLOY

UNIT = (DEPLOY / "penstock.service").read_text()


def values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that there is."""
    path = tmp_path / "penstock.service"
    path.write_text(UNIT.replace("/opt/penstock/bin/penstock", sys.executable))
    return path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("check", ["verify", "security --offline=true --threshold=20"])
def test_systemd_finds_nothing_wrong(unit: Path, check: str) -> None:
    done = subprocess.run(
        ["systemd-analyze", *check.split(), unit], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert unit.name not in done.stderr  # of other units there may be warnings


def test_the_service_reads_copies_of_private_files() -> None:
    """A dynamic user cannot read what root keeps to itself."""
    assert values("DynamicUser") == ["yes"]
    loaded = {value.partition(":")[0] for value in values("LoadCredential")}
    (command,) = values("ExecStart")
    assert {f"%d/{name}" for name in loaded} == set(re.findall(r"%d/\S+", command))
    assert "/etc" not in command
    named = {name.replace("-", "_") for name in re.findall(r" --(\S+)", command)}
    assert named <= Settings.model_fields.keys()


def test_streams_have_their_drain_time_before_the_process_is_killed() -> None:
    (stop_s,) = values("TimeoutStopSec")
    assert float(stop_s) > Settings.model_fields["drain_timeout"].default
