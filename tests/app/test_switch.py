"""The file that names a switch's replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.app.errors import OperatorError
from penstock.app.switch import ReplicasFile
from penstock.cluster.upstream import Address


def test_replicas_are_those_named_and_those_of_the_file(tmp_path: Path) -> None:
    assert ReplicasFile(["a:1"], None).read() == [Address("a", 1)]
    path = tmp_path / "replicas"
    path.write_text("# ours\n\n b:2 \nc:3\n")
    assert ReplicasFile(["a:1"], path).read() == [Address("a", 1), Address("b", 2), Address("c", 3)]


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file or directory"), (b"\xff", "not UTF-8")])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "replicas"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OperatorError) as caught:
        ReplicasFile([], path).read()
    assert str(caught.value) == f"--replicas-file {path}: {reason}"


def test_a_file_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "replicas"
    path.write_text("a:1\n")
    contents = ["a:1\n", "nonsense\n", "b:2\n"]
    slept: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real_sleep(0)
        if contents:
            path.write_text(contents.pop(0))

    class Members:
        async def set(self, addresses: list[Address]) -> None:
            assert addresses == [Address("b", 2)]
            raise asyncio.CancelledError

    members: Any = Members()
    file = ReplicasFile([], path)
    file.read()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(file.watch(members))
    assert slept == [0.25] * 3
    (warning,) = caplog.messages
    assert warning.endswith("; the replicas that were read before stay")


def test_without_a_file_there_is_nothing_to_watch() -> None:
    members: Any = None
    asyncio.run(ReplicasFile(["a:1"], None).watch(members))
