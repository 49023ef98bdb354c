"""Files: what clients upload for batches and what comes of those, kept in parts that a store takes easily."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from gateway.http.errors import ApiError, invalid, unavailable
from gateway.store.interface import Key, Store, StoreUnavailable
from gateway.store.records import Records

KIND, _PART_KIND = "file", "file_part"
KEPT_S = 3 * 24 * 3600.0
"""Since it was made."""
MAX_FILES = 100
"""Of one tenant, those that its batches made included."""
MAX_BYTES = 32 * 1024 * 1024
"""Of all of a tenant's files together."""
PART_BYTES = 256 * 1024
MAX_NAME_CHARS = 256

FILE_ID = re.compile(r"file-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One record; the content is in its parts."""

    id: str
    purpose: str
    filename: str
    created_at: int
    num_bytes: int
    num_parts: int

    def as_json(self) -> dict[str, Any]:
        """OpenAI's object."""
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


_FILES = Records(KIND, File, KEPT_S, lambda file: len(file.filename))


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


class Files:
    """Those of one store. What asks it raises 503 while it does not answer, unless it says otherwise."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._adding = asyncio.Lock()

    async def add(self, tenant: str, filename: str, purpose: str, content: bytes) -> File:
        """
        Raises:
            ApiError: 400, if the tenant has no room for it.
        """
        parts = [content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES)]
        file = File(
            id=new_file_id(),
            purpose=purpose,
            filename=filename[:MAX_NAME_CHARS],
            created_at=int(time.time()),
            num_bytes=len(content),
            num_parts=len(parts),
        )
        async with self._adding:
            with answering_unavailable():
                self._check_room(await self.all(tenant), len(content))
                for number, part in enumerate(parts):
                    await self.put_part(tenant, file.id, number, part)
                await self.enter(tenant, file)
        return file

    def _check_room(self, files: list[File], num_bytes: int) -> None:
        if len(files) >= MAX_FILES:
            raise invalid(f"You have {MAX_FILES} files; delete some first.", "file", "too_many_files")
        if sum(file.num_bytes for file in files) + num_bytes > MAX_BYTES:
            message = f"Your files may have at most {MAX_BYTES} bytes together; delete some first."
            raise invalid(message, "file", "storage_full")

    async def find(self, tenant: str, file_id: str, param: str | None = "id") -> File:
        """
        Raises:
            ApiError: 404, if the tenant has none of this id.
        """
        with answering_unavailable():
            known = FILE_ID.fullmatch(file_id) is not None
            file = await _FILES.get(self._store, tenant, file_id, keep=False) if known else None
        if file is None:
            raise _no_file(file_id, param)
        return file

    async def all(self, tenant: str) -> list[File]:
        """The oldest first."""
        with answering_unavailable():
            newest_first = await self._store.list(KIND, tenant, 2 * MAX_FILES)
            read = (_FILES.get(self._store, tenant, id, keep=False) for id in reversed(newest_first))
            return [file for file in await asyncio.gather(*read) if file is not None]

    async def delete(self, tenant: str, file: File) -> None:
        with answering_unavailable():
            await self._store.delete(Key(KIND, tenant, file.id))
            for number in range(file.num_parts):
                await self._store.delete(_part(tenant, file.id, number))

    async def content(self, tenant: str, file: File) -> AsyncIterator[bytes]:
        """
        Raises:
            ApiError: 410, if a part was forgotten: a store in memory does that when it is full.
        """
        for number in range(file.num_parts):
            with answering_unavailable():
                part = await self.part(tenant, file.id, number)
            if part is None:
                message = f"The content of '{file.id}' is no longer kept."
                raise invalid(message, "id", "file_expired", HTTPStatus.GONE)
            yield part

    # For those who write a file bit by bit; these raise StoreUnavailable

    async def part(self, tenant: str, file_id: str, number: int) -> bytes | None:
        return await self._store.get(_part(tenant, file_id, number))

    async def put_part(self, tenant: str, file_id: str, number: int, content: bytes) -> None:
        await self._store.put(_part(tenant, file_id, number), content, KEPT_S)

    async def enter(self, tenant: str, file: File) -> None:
        """From now on it can be found; its parts are there."""
        await _FILES.put(self._store, tenant, file.id, file)


@contextlib.contextmanager
def answering_unavailable() -> Iterator[None]:
    try:
        yield
    except StoreUnavailable:
        raise unavailable("Files and batches cannot be read now.", "store_unavailable") from None


def _no_file(file_id: str, param: str | None) -> ApiError:
    message = (
        f"No such File object: {file_id}." if FILE_ID.fullmatch(file_id) else "There is no file of that id."
    )
    return invalid(message, param, "not_found", HTTPStatus.NOT_FOUND)


def _part(tenant: str, file_id: str, number: int) -> Key:
    return Key(_PART_KIND, tenant, f"{file_id}.{number}")
