"""A folder of block files that several servers may share: who writes, how much there is, and what is deleted.

    FOLDER/penstock-kv            says that the folder is for blocks, and how many bytes all of them take
    FOLDER/<digest>/<hh>/<hash>-<table>.kv

Writers take turns: whoever holds the lock on `penstock-kv` may write and delete, and keeps the number in it. So the
bound holds at any moment, whoever writes. Readers take no lock: a file appears under its name when all of it is
written. Nothing is synced to the disk, because a file that was torn is found by its checksum.

A server that is killed while it writes leaves a file under a temporary name, and a number that is too large, never too
small; the next that looks over the folder puts both right.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.engine.tiers.block_file import Payload

MARKER = "penstock-kv"
SUFFIX = ".kv"
_TEMPORARY = ".tmp"
_FIRST_LINE = b"KV blocks of penstock servers, version 1\n"
_NUMBER = b"%020d\n"
_NUMBER_BYTES = 21


class FolderError(Exception):
    """The folder cannot be used; the text says why, for the operator."""


class BlockFolder:
    """The files of a folder, as far as this process knows them; for any thread."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Opens a folder, which is made if there is none, and looks over what is in it.

        Args:
            max_bytes: the most bytes of all files together, those of other servers and other models included.

        Raises:
            FolderError: it is not a folder for blocks, or cannot be written.
        """
        self.path, self.max_bytes = path, max_bytes
        self.num_bytes = 0
        """The bytes of all files when the number was read last."""
        self.files: OrderedDict[str, int] = OrderedDict()
        """Their sizes by their names below `path`; those that were used longest ago come first."""
        self._known = threading.Lock()
        """Guards `files`."""
        self._turn = threading.Lock()
        """Held together with the lock on the marker, which does not keep a process's own threads apart."""
        try:
            self._marker = _open_marker(path)
        except OSError as error:
            raise FolderError(f"{path}: {error.strerror}") from None
        try:
            self.look_over()
        except OSError as error:
            self.close()
            raise FolderError(f"{path}: {error.strerror}") from None

    def close(self) -> None:
        marker, self._marker = self._marker, -1
        if marker >= 0:
            os.close(marker)

    def overlook(self, name: str) -> None:
        """Lets a file that cannot be read at present not be counted on, until the folder is looked over again."""
        with self._known:
            self.files.pop(name, None)

    def look_over(self) -> None:
        """Brings all that is known up to date with the folder; deletes what a killed server left half written."""
        with self._exclusive():
            self._look_over()

    def look_over_if_changed(self) -> None:
        """Looks the folder over if others have written or deleted since."""
        with self._exclusive() as num_bytes:
            is_same = num_bytes == self.num_bytes
        if not is_same:
            self.look_over()

    def read(self, name: str) -> bytearray | None:
        """Returns the bytes of a file, and notes its use; None if it is gone.

        Raises:
            OSError: it cannot be read.
        """
        path = self.path / name
        try:
            with path.open("rb", buffering=0) as file:
                data = bytearray(os.fstat(file.fileno()).st_size)
                num_read = 0
                while num_read < len(data) and (more := file.readinto(memoryview(data)[num_read:])):
                    num_read += more
            with contextlib.suppress(OSError):
                os.utime(path)
        except FileNotFoundError:
            with self._known:
                self.files.pop(name, None)
            return None
        with self._known:
            self.files[name] = len(data)
            self.files.move_to_end(name)
        return data

    def write(self, name: str, *parts: Payload) -> bool:
        """Writes a file, after deleting as many of those that were used longest ago as have to go.

        Returns:
            False if it is there already, or larger than the folder may be.

        Raises:
            OSError: it cannot be written; what was written of it is deleted.
        """
        size, path = sum(len(part) for part in parts), self.path / name
        with self._exclusive() as num_bytes:
            self.num_bytes = num_bytes
            if path.exists():
                with self._known:
                    self.files[name] = size
                return False
            if not self._make_room(size):
                return False
            self._note_bytes(
                self.num_bytes + size
            )  # before it is there: who is killed leaves too much, not too little
            try:
                _write(path, parts)
            except OSError:
                self._note_bytes(self.num_bytes - size)
                raise
            with self._known:
                self.files[name] = size
                self.files.move_to_end(name)
            return True

    def delete(self, name: str) -> None:
        """Deletes a file if it is there."""
        with self._exclusive() as num_bytes:
            self.num_bytes = num_bytes
            self._delete(name)

    def _make_room(self, size: int) -> bool:
        """Deletes files until there is room for so many bytes; returns False if there never is."""
        has_looked = False
        while self.num_bytes + size > self.max_bytes:
            with self._known:
                oldest = next(iter(self.files), None)
            if oldest is not None and size <= self.max_bytes:
                self._delete(oldest)
            elif has_looked or size > self.max_bytes:
                return False
            else:
                has_looked = True
                self._look_over()
        return True

    def _look_over(self) -> None:
        found: list[tuple[int, str, int]] = []
        for entry in _files_below(self.path):
            if entry.name.endswith(_TEMPORARY):  # nobody writes it, since this thread has the turn
                os.unlink(entry.path)
            elif entry.name.endswith(SUFFIX):
                about = entry.stat()
                found.append((about.st_mtime_ns, os.path.relpath(entry.path, self.path), about.st_size))
        found.sort()
        with self._known:
            self.files = OrderedDict((name, size) for _, name, size in found)
        self._note_bytes(sum(size for _, _, size in found))

    def _delete(self, name: str) -> None:
        with self._known:
            self.files.pop(name, None)
        path = self.path / name
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return
        self._note_bytes(max(0, self.num_bytes - size))

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[int]:
        """Gives this thread its turn; yields the bytes of all files."""
        with self._turn:
            fcntl.flock(self._marker, fcntl.LOCK_EX)
            try:
                number = os.pread(self._marker, _NUMBER_BYTES, len(_FIRST_LINE))
                yield int(number) if number.strip().isdigit() else 0
            finally:
                fcntl.flock(self._marker, fcntl.LOCK_UN)

    def _note_bytes(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        os.pwrite(self._marker, _NUMBER % num_bytes, len(_FIRST_LINE))


def _open_marker(path: Path) -> int:
    """Opens the file that says that the folder is for blocks; it is made if the folder is empty.

    Raises:
        FolderError: the folder is somebody else's, or of another version.
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise FolderError(f"{path} is no folder")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (names := {*os.listdir(path)} - {"lost+found"}) and MARKER not in names:
        raise FolderError(f"{path} has other files in it; give an empty folder, or none, for KV blocks")
    marker = os.open(path / MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(marker, fcntl.LOCK_EX)  # who else starts at this moment waits until it is written
        first = os.pread(marker, len(_FIRST_LINE), 0)
        if not first:
            os.pwrite(marker, _FIRST_LINE + _NUMBER % 0, 0)
        elif first != _FIRST_LINE:
            raise FolderError(
                f"{path} has KV blocks of another version of penstock; delete it, or give another"
            )
        fcntl.flock(marker, fcntl.LOCK_UN)
    except BaseException:
        os.close(marker)
        raise
    return marker


def _files_below(path: Path) -> Iterator[os.DirEntry[str]]:
    """The files two folders below."""
    for digest in _folders(path):
        for part in _folders(digest):
            with os.scandir(part) as entries:
                yield from (entry for entry in entries if entry.is_file(follow_symlinks=False))


def _folders(path: str | Path) -> list[str]:
    with os.scandir(path) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _write(path: Path, parts: Iterable[Payload]) -> None:
    """Writes a file, which is there when all of it is written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for part in parts:
                file.write(part)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
