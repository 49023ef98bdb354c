"""A batch consists of its record, the lines of its input, and two files that its results are written to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import orjson

from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.limits import Limits, parse_object
from penstock.gateway.sessions.batches.files import KEPT_S, PART_BYTES, File, Files, new_file_id
from penstock.gateway.store.records import Records

WINDOW_S = 24 * 3600
"""A batch that is not done after so long ends as expired."""
MAX_LINES = 10_000
MAX_RESULT_BYTES = 16 * 1024 * 1024
"""The most bytes of one batch's results; with more it fails, and keeps those it has."""
MAX_ERRORS = 50
"""A failed batch names so many lines."""
MAX_CUSTOM_ID_CHARS = 512

Endpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"
]
BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
_ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass(frozen=True, slots=True)
class LineError:
    """A mistake in the input, and the number of its line, counted from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(slots=True, kw_only=True)
class Batch:
    """The record of a batch."""

    id: str
    endpoint: Endpoint
    input_file_id: str
    output_file_id: str = field(default_factory=new_file_id)
    error_file_id: str = field(default_factory=new_file_id)
    """Results are written to these files, which can be found once there are some and the batch has ended."""
    created_at: int = field(default_factory=lambda: int(time.time()))
    metadata: dict[str, str] | None = None
    status: BatchStatus = "validating"
    times: dict[str, int] = field(default_factory=dict)
    """The second since 1970 at which the batch came to each status."""
    errors: list[LineError] = field(default_factory=list)
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_expired: int = 0
    """The failed lines that no process got to in time."""
    num_begun: int = 0
    """The number of processes that worked on it and were not stopped in order: all but the last one have died."""

    @property
    def ended(self) -> bool:
        return self.status in _ENDED

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_S

    def become(self, status: BatchStatus) -> None:
        self.status = status
        self.times.setdefault(status, int(time.time()))

    def as_json(self) -> dict[str, Any]:
        """The batch as OpenAI's API shows it."""
        errors = [asdict(error) for error in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id if self.ended and self.num_completed else None,
            "error_file_id": self.error_file_id if self.ended and self.num_failed else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _TIMES},
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": self.metadata,
        }


BATCHES = Records("batch", Batch, KEPT_S, lambda batch: 128 * (1 + len(batch.errors)))


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


# The input


@dataclass(frozen=True, slots=True)
class Line:
    """A request of an input file, whose body is parsed again when its turn comes."""

    custom_id: str
    text: bytes

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = orjson.loads(self.text)["body"]
        return body


@dataclass(slots=True)
class InputCheck:
    """Collects the mistakes in an input file, whose lines are given one list after another."""

    endpoint: str
    limits: Limits
    _number: int = 0
    _ids: set[str] = field(default_factory=set)
    _errors: list[LineError] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return len(self._ids)

    @property
    def is_over(self) -> bool:
        """Returns whether further lines change nothing."""
        return len(self._ids) > MAX_LINES or len(self._errors) == MAX_ERRORS

    @property
    def errors(self) -> list[LineError]:
        """The mistakes so far; with any of them, no request is run."""
        if len(self._ids) > MAX_LINES:
            return [LineError("too_many_lines", f"A batch may have at most {MAX_LINES} lines.")]
        if not self._ids and not self._errors:
            return [LineError("empty_file", "The input file has no requests.")]
        return self._errors

    def read(self, lines: Iterable[bytes]) -> None:
        for text in lines:
            self._number += 1
            if self.is_over:
                return
            try:
                if text.strip():
                    self._ids.add(_read_line(text, self.endpoint, self.limits, self._ids))
            except ApiError as error:
                code = error.code or "invalid_line"
                self._errors.append(LineError(code, error.message, error.param, self._number))


def requests_in(lines: Iterable[bytes]) -> list[Line]:
    """The requests of lines that were checked."""
    return [Line(orjson.loads(text)["custom_id"], text) for text in lines if text.strip()]


def _read_line(text: bytes, endpoint: str, limits: Limits, earlier: Container[str]) -> str:
    """The `custom_id` of a line.

    Args:
        earlier: the `custom_id` of each line before.

    Raises:
        ApiError: it is no request, or none for this endpoint.
    """
    values = parse_object(text, limits)
    custom_id, body = values.get("custom_id"), values.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        raise invalid(message, "custom_id", "invalid_custom_id")
    if custom_id in earlier:
        message = f"{custom_id!r} is the custom_id of another line, too."
        raise invalid(message, "custom_id", "duplicate_custom_id")
    if values.get("method") != "POST":
        raise invalid("'method' must be 'POST'.", "method", "invalid_method")
    if values.get("url") != endpoint:
        raise invalid(f"'url' must be the batch's endpoint, '{endpoint}'.", "url", "invalid_url")
    if not isinstance(body, dict):
        raise invalid("'body' must be the JSON object of the request.", "body", "invalid_body")
    for name in ("stream", "background"):
        if body.get(name):
            raise invalid(f"'{name}' cannot be asked for in a batch.", f"body.{name}", "invalid_body")
    return custom_id


# Results


@dataclass(slots=True)
class Results:
    """A file of results that grows; the lines in it are done, whatever becomes of this process."""

    files: Files
    tenant: str
    file_id: str
    num_bytes: int = 0
    num_lines: int = 0
    _num_parts: int = 0
    """The number of parts that are complete."""
    _tail: bytes = b""
    _is_written: bool = True

    async def read(self) -> set[str]:
        """Goes on after the results of an earlier process, and returns the `custom_id` of each."""
        done: set[str] = set()
        while (part := await self.files.part(self.tenant, self.file_id, self._num_parts)) is not None:
            self._num_parts += 1
            self.num_bytes += len(part)
            done |= {orjson.loads(line)["custom_id"] for line in part.splitlines()}
        self.num_lines = len(done)
        return done

    def add(self, line: bytes) -> None:
        self._tail += line
        self._is_written = False
        self.num_bytes += len(line)
        self.num_lines += 1

    async def write(self) -> None:
        """Writes new results down; the last part grows until it is large."""
        if self._is_written:
            return
        tail = self._tail
        await self.files.put_part(self.tenant, self.file_id, self._num_parts, tail)
        self._is_written = len(tail) == len(self._tail)
        if self._is_written and len(tail) >= PART_BYTES:
            self._num_parts += 1
            self._tail = b""

    async def close(self, filename: str) -> None:
        """Makes a file of the results, if there are any."""
        await self.write()
        if not self.num_lines:
            return
        file = File(
            id=self.file_id,
            purpose="batch_output",
            filename=filename,
            num_bytes=self.num_bytes,
            num_parts=self._num_parts + bool(self._tail),
        )
        await self.files.enter(self.tenant, file)
