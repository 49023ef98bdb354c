"""Files that clients upload for batches and that batches write, kept in parts that a store takes easily.

No file is ever in memory as a whole: a part of it is, or one of its lines.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from penstock.gateway.errors import ApiError, answering_unavailable, existing, invalid, not_found
from penstock.gateway.store.interface import Durable, Key, Store, StoreUnavailable
from penstock.gateway.store.records import Records
from penstock.gateway.store.time_budget import retrying

KIND, _PART_KIND = "file", "file_part"
KEPT_S = 3 * 24 * 3600.0
"""A file is kept for so long after it was made."""
MAX_FILES = 100
"""A tenant may have so many files, those that its batches made included."""
MAX_BYTES = 256 * 1024 * 1024
"""A tenant's files may have so many bytes together."""
MAX_BYTES_IN_MEMORY = 32 * 1024 * 1024
"""A tenant's files may have so many bytes together where the store is this process's memory."""
PART_BYTES = 256 * 1024
MAX_NAME_CHARS = 256

FILE_ID = re.compile(r"file-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """The record of a file, whose content is in its parts."""

    id: str
    purpose: str
    filename: str
    created_at: int = field(default_factory=lambda: int(time.time()))
    num_bytes: int
    num_parts: int

    def as_json(self) -> dict[str, Any]:
        """The file as OpenAI's API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.created_at + int(KEPT_S),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


answering = partial(answering_unavailable, "Files and batches")
"""A store that does not answer is a 503 while this is entered."""
_FILES = Records(KIND, File, KEPT_S, lambda file: len(file.filename))


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


@dataclass(slots=True)
class Upload:
    """A file that arrives piece by piece and cannot be found yet."""

    files: Files
    tenant: str
    most_bytes: int
    """The tenant's room, less other uploads."""
    id: str = field(default_factory=new_file_id)
    num_bytes: int = 0
    num_parts: int = 0
    _tail: bytearray = field(default_factory=bytearray)

    async def write(self, data: bytes) -> None:
        """Takes more of the file; raises 400 if the tenant has no room for it, 503 while the store does not answer."""
        self.num_bytes += len(data)
        self.files.arriving[self.tenant] += len(data)
        if self.files.arriving[self.tenant] > self.most_bytes:
            raise self.files.full()
        self._tail += data
        while len(self._tail) >= PART_BYTES:
            await self._put(PART_BYTES)

    async def finish(self, filename: str, purpose: str) -> File:
        """The file, which can be found from now on."""
        if self._tail:
            await self._put(len(self._tail))
        file = File(
            id=self.id,
            purpose=purpose,
            filename=filename[:MAX_NAME_CHARS],
            num_bytes=self.num_bytes,
            num_parts=self.num_parts,
        )
        with answering():
            await self.files.enter(self.tenant, file)
        return file

    async def _put(self, num_bytes: int) -> None:
        part = bytes(self._tail[:num_bytes])
        with answering():
            await retrying(partial(self.files.write_part, self.tenant, self.id, self.num_parts, part))
        self.num_parts += 1
        del self._tail[:num_bytes]


class Files:
    """The files of one store. Methods raise 503 while the store does not answer, unless they say otherwise."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._written: Store | Durable = store.durable or store
        self._max_bytes = MAX_BYTES if store.durable is not None else MAX_BYTES_IN_MEMORY
        self.arriving: Counter[str] = Counter()
        """The bytes of uploads that are under way, by tenant."""

    @contextlib.asynccontextmanager
    async def uploading(self, tenant: str, expected_bytes: int = 0) -> AsyncIterator[Upload]:
        """An upload, of which nothing is left unless it is finished inside.

        Args:
            expected_bytes: how large it will be, about; a hopeless one is refused before it is read.

        Raises:
            ApiError: 400, if the tenant has no room for it.
        """
        upload = Upload(self, tenant, await self.room(tenant))
        if self.arriving[tenant] + expected_bytes > upload.most_bytes:
            raise self.full()
        try:
            yield upload
        except BaseException:
            with contextlib.suppress(StoreUnavailable):  # then they expire
                await self._delete_parts(tenant, upload.id, upload.num_parts)
            raise
        finally:
            self.arriving[tenant] -= upload.num_bytes
            self.arriving += Counter()  # without those that have none

    async def add(self, tenant: str, filename: str, purpose: str, content: bytes) -> File:
        """Adds a whole file; raises 400 if the tenant has no room for it."""
        async with self.uploading(tenant, len(content)) as upload:
            await upload.write(content)
            return await upload.finish(filename, purpose)

    async def room(self, tenant: str, param: str = "file") -> int:
        """The bytes that are left to a tenant; raises 400 if it has none left, or too many files."""
        files = await self.all(tenant)
        if len(files) >= MAX_FILES:
            raise invalid(f"You have {MAX_FILES} files; delete some first.", param, "too_many_files")
        left = self._max_bytes - sum(file.num_bytes for file in files)
        if left <= 0:
            raise self.full(param)
        return left

    def full(self, param: str = "file") -> ApiError:
        message = f"Your files may have at most {self._max_bytes} bytes together; delete some first."
        return invalid(message, param, "storage_full")

    async def find(self, tenant: str, file_id: str, param: str | None = "id") -> File:
        """The tenant's file of this id; raises 404 if there is none."""
        if not FILE_ID.fullmatch(file_id):
            raise not_found("There is no file of that id.", param)
        with answering():
            file = await _FILES.get(self._store, tenant, file_id, keep=False)
        return existing(file, f"No such File object: {file_id}.", param)

    async def all(self, tenant: str) -> list[File]:
        """All files of a tenant, the oldest first."""
        with answering():
            newest_first = await self._store.list(KIND, tenant, 2 * MAX_FILES)
            return await _FILES.some(self._store, tenant, reversed(newest_first))

    async def delete(self, tenant: str, file: File) -> None:
        with answering():
            await self._store.delete(Key(KIND, tenant, file.id))
            await self._delete_parts(tenant, file.id, file.num_parts)

    async def _delete_parts(self, tenant: str, file_id: str, num_parts: int) -> None:
        for number in range(num_parts):
            await self._store.delete(_part(tenant, file_id, number))

    async def content(self, tenant: str, file: File) -> AsyncIterator[bytes]:
        """The parts of a file.

        Raises:
            ApiError: 410, if a part was forgotten: a store in memory does that when it is full.
        """
        for number in range(file.num_parts):
            with answering():
                part = await retrying(partial(self.part, tenant, file.id, number))
            if part is None:
                message = f"The content of '{file.id}' is no longer kept."
                raise invalid(message, "id", "file_expired", HTTPStatus.GONE)
            yield part

    async def lines(self, tenant: str, file: File, most_bytes: int) -> AsyncIterator[list[bytes]]:
        """The lines of a file in lists, each those that end in one part of it.

        Raises:
            ApiError: 410 as `content` does; 400 for a line of more than `most_bytes`.
        """
        rest = b""
        async for part in self.content(tenant, file):
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > most_bytes or any(len(line) > most_bytes for line in lines):
                raise invalid(f"A line has more than {most_bytes} bytes.", None, "line_too_long")
            yield lines
        yield [rest]

    # For those who write a file bit by bit; these raise StoreUnavailable

    async def part(self, tenant: str, file_id: str, number: int) -> bytes | None:
        return await self._store.get(_part(tenant, file_id, number))

    async def put_part(self, tenant: str, file_id: str, number: int, content: bytes) -> None:
        await self._store.put(_part(tenant, file_id, number), content, KEPT_S)

    async def write_part(self, tenant: str, file_id: str, number: int, content: bytes) -> None:
        """Waits until the store has a part: more of them may come than would wait in memory."""
        await self._written.put(_part(tenant, file_id, number), content, KEPT_S)

    async def enter(self, tenant: str, file: File) -> None:
        """Lets a file be found whose parts are there."""
        await _FILES.put(self._store, tenant, file.id, file)


def _part(tenant: str, file_id: str, number: int) -> Key:
    return Key(_PART_KIND, tenant, f"{file_id}.{number}")
