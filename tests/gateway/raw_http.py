"""A client that speaks HTTP/1.1 by hand, and a reader of event streams that owes nothing to the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 10
"""A test that has to wait for so long has failed."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class HttpConnection:
    """One connection; what is sent and read on it is the test's choice, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def hang_up(self) -> None:
        self._writer.transport.abort()

    async def answer(self, method: str = "GET") -> Answer:
        """The next whole answer, to a request of this method."""
        status, headers = await self.head()
        if method == "HEAD" or status in (100, 204, 304):
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, await self.chunked())
        return Answer(
            status, headers, await self._within(self._reader.readexactly(int(headers["content-length"])))
        )

    async def head(self) -> tuple[int, dict[str, str]]:
        block = await self._within(self._reader.readuntil(b"\r\n\r\n"))
        status_line, *lines = block.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        assert status_line.startswith("HTTP/1.1 ")
        pairs = [line.split(": ", 1) for line in lines]
        assert len({name for name, _ in pairs}) == len(pairs), f"a header came twice: {lines}"
        return int(status_line.split()[1]), {name.lower(): value for name, value in pairs}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The chunks of a chunked body, as they were cut, to the last."""
        while chunk := await self.chunk():
            yield chunk

    async def chunked(self) -> bytes:
        """All that is left of a chunked body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunk(self) -> bytes:
        """One of them; b"" is the end of the body."""
        size = int(await self._within(self._reader.readuntil(b"\r\n")), 16)
        data = await self._within(self._reader.readexactly(size + 2))
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def rest(self) -> bytes:
        """All that comes until the server hangs up."""
        return await self._within(self._reader.read())

    async def _within(self, reading: Any) -> bytes:
        data: bytes = await asyncio.wait_for(reading, PATIENCE_S)
        return data


@contextlib.asynccontextmanager
async def connect(url: str, *, narrow: bool = False) -> AsyncIterator[HttpConnection]:
    """A connection; a narrow one holds little, so that the server soon has to wait for its reader."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    if narrow:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
    reader, writer = await asyncio.open_connection(sock=connection, limit=2**14 if narrow else 2**22)
    try:
        yield HttpConnection(reader, writer)
    finally:
        writer.transport.abort()


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


def post(path: str, body: Any, *headers: str) -> bytes:
    content = json.dumps(body).encode()
    more = ("content-type: application/json", f"content-length: {len(content)}", *headers)
    return get(path, *more, method="POST") + content


@dataclass(frozen=True, slots=True)
class Event:
    data: str
    type: str = "message"
    id: str = ""


def read_events(stream: bytes) -> list[Event]:
    """Reads the events that an EventSource would dispatch, by the HTML standard; an unfinished event is none."""
    text = stream.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    *blocks, _ = text.split("\n\n")
    return [event for block in blocks if (event := _read_event(block)) is not None]


def _read_event(block: str) -> Event | None:
    data, kind, id = [], "message", ""
    for line in block.split("\n"):
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif name == "event":
            kind = value.removeprefix(" ")
        elif name == "id":
            id = value.removeprefix(" ")
    return Event("\n".join(data), kind, id) if data else None
