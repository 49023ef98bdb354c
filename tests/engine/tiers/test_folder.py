"""A folder of blocks that several servers share: its bound, its order, what is found in it, and what is refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from penstock.engine.tiers.block_file import BlockKey, digest_of
from penstock.engine.tiers.disk import DiskTier
from penstock.engine.tiers.folder import MARKER, SUFFIX, BlockFolder, FolderError
from penstock.engine.tiers.host import HostTier
from penstock.engine.tiers.tier import Tier

PAYLOAD = bytes(1_000)
FILE_BYTES = len(PAYLOAD) + 64
DIGEST = digest_of(["here"])


def key(number: int, table: int = 0) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"), table)


def name(number: int) -> str:
    return f"d/{number % 3}/{number}{SUFFIX}"


def num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob(f"*/*/*{SUFFIX}"))


def make_tiers(path: Path, num_blocks: int) -> list[Tier]:
    folder = BlockFolder(path, num_blocks * FILE_BYTES)
    return [HostTier(num_blocks * len(PAYLOAD)), DiskTier(folder, DIGEST)]


@pytest.mark.parametrize("which", [0, 1])
def test_what_was_used_longest_ago_makes_room(which: int, tmp_path: Path) -> None:
    tier = make_tiers(tmp_path, 3)[which]
    for number in range(3):
        tier.write(key(number), PAYLOAD)
    assert tier.read(key(0)) == PAYLOAD
    tier.write(key(3), PAYLOAD)
    assert [tier.has(key(number)) for number in range(4)] == [True, False, True, True]
    assert tier.read(key(1)) is None
    stats = tier.stats()
    assert (stats.num_blocks, stats.num_hits, stats.num_misses) == (3, 1, 1)
    assert stats.num_bytes <= stats.max_bytes
    assert (stats.bytes_written, stats.bytes_read) == (4 * len(PAYLOAD), len(PAYLOAD))


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_forgotten_is_gone(which: int, tmp_path: Path) -> None:
    tier = make_tiers(tmp_path, 3)[which]
    tier.write(key(1), PAYLOAD)
    tier.forget(key(1))
    tier.forget(key(2))
    assert not tier.has(key(1))
    assert tier.read(key(1)) is None
    assert tier.stats().num_bytes == 0


@pytest.mark.parametrize("which", [0, 1])
def test_a_block_that_is_larger_than_all_of_it_is_not_kept(which: int, tmp_path: Path) -> None:
    tier = make_tiers(tmp_path, 1)[which]
    tier.write(key(1), PAYLOAD)
    tier.write(key(2), bytes(2_000))
    assert tier.has(key(1))
    assert not tier.has(key(2))


def test_tables_have_blocks_of_their_own(tmp_path: Path) -> None:
    disk = make_tiers(tmp_path, 3)[1]
    disk.write(key(1, 0), PAYLOAD)
    disk.write(key(1, 1), bytes(range(200)) * 5)
    assert disk.read(key(1, 1)) == bytes(range(200)) * 5
    assert disk.read(key(1, 0)) == PAYLOAD


def test_another_that_opens_it_finds_the_files_in_order_of_use(tmp_path: Path) -> None:
    first = BlockFolder(tmp_path, 10_000)
    for number in range(4):
        first.write(name(number), PAYLOAD)
        os.utime(tmp_path / name(number), (number, number))
    first.read(name(1))
    second = BlockFolder(tmp_path, 10_000)
    assert list(second.files) == [name(number) for number in (0, 2, 3, 1)]
    assert second.num_bytes == 4_000


def test_it_is_bounded_while_many_write(tmp_path: Path) -> None:
    """Each has a folder object of its own, as servers have, and sees only what it wrote itself."""
    sizes, most = list[int](), 10 * len(PAYLOAD)
    folders = [BlockFolder(tmp_path, most) for _ in range(4)]

    def write(number: int) -> None:
        for i in range(40):
            folders[number].write(name(100 * number + i), PAYLOAD)
            with folders[number]._exclusive():
                sizes.append(num_bytes(tmp_path))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sizes) == 160
    assert max(sizes) == most
    again = BlockFolder(tmp_path, most)
    assert again.num_bytes == num_bytes(tmp_path) == most


def test_what_others_write_is_found_now_and_then(tmp_path: Path) -> None:
    one, other = (DiskTier(BlockFolder(tmp_path, 10_000), DIGEST) for _ in range(2))
    other.write(key(1), PAYLOAD)
    assert not one.has(key(1))
    one.look_over()
    assert one.has(key(1))
    assert one.read(key(1)) == PAYLOAD
    other.forget(key(1))
    one.look_over()
    assert not one.has(key(1))


def test_who_was_killed_while_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, 3_000)
    folder.write(name(1), PAYLOAD)
    folder._note_bytes(2_000)  # it has told of a file
    (tmp_path / f"{name(2)}.tmp").parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / f"{name(2)}.tmp").write_bytes(b"half")
    folder.close()
    again = BlockFolder(tmp_path, 3_000)
    assert again.num_bytes == 1_000
    assert list(again.files) == [name(1)]
    assert not list(tmp_path.glob("**/*.tmp"))


def test_a_write_that_fails_leaves_nothing_and_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    disk = DiskTier(BlockFolder(tmp_path, 10_000), DIGEST, lambda: now[0])
    disk.write(key(1), PAYLOAD)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", _full)
        disk.write(key(2), PAYLOAD)
    assert "No space left" in caplog.text
    assert num_bytes(tmp_path) == disk.stats().num_bytes == FILE_BYTES
    assert not list(tmp_path.glob("**/*.tmp"))
    disk.write(key(3), PAYLOAD)
    assert not disk.has(key(3)), "it writes again after a while"
    assert disk.read(key(1)) == PAYLOAD
    now[0] = 100.0
    disk.write(key(3), PAYLOAD)
    assert disk.has(key(3))
    assert disk.stats().num_failures == 1


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(FolderError, match="has other files in it"):
        BlockFolder(tmp_path, 1_000)
    with pytest.raises(FolderError, match="is no folder"):
        BlockFolder(tmp_path / "mine", 1_000)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_blocks_of_another_version_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("KV blocks of penstock servers, version 9\n")
    with pytest.raises(FolderError, match="another version"):
        BlockFolder(tmp_path, 1_000)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FolderError, match="Read-only file system"):
        BlockFolder(tmp_path, 1_000)
