"""The chat page: the files of one directory, read once, served under a policy that lets nothing foreign in."""

from __future__ import annotations

import gzip
import mimetypes
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

SECURITY_HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' data:",
            "font-src 'self'",
            "manifest-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types penstock-math",
        )
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

_GREETING = "Ollama is running"
"""The text by which Ollama's clients know that there is a server. Browsers that load a page accept text/html."""
_PACKED = (".js", ".css", ".html", ".svg", ".json")
# Python's table knows these by whatever the system says; modules are refused under a wrong type.
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class _PageFile:
    body: bytes
    packed: bytes | None
    """The gzipped body, for clients that accept it; None if the file is compressed already."""
    media_type: str
    etag: str


class Page:
    """The files as they were at the start; a path is looked up, never opened."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): _read(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink() and path.suffix not in (".py", ".pyc")
        }

    async def index(self, request: Request) -> Response:
        accepted = request.headers.get("accept", "text/html")
        if "text/html" not in accepted:
            return Response(_GREETING, headers={"vary": "accept"}, media_type="text/plain")
        return self._serve(request, "index.html")

    async def file(self, request: Request) -> Response:
        return self._serve(request, request.path_params["path"])

    def _serve(self, request: Request, path: str) -> Response:
        file = self._files.get(path)
        if file is None:
            raise HTTPException(404)
        headers = {**SECURITY_HEADERS, "etag": file.etag, "cache-control": "no-cache"}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if file.packed is not None:
            headers["vary"] = "accept-encoding"
            if "gzip" in request.headers.get("accept-encoding", ""):
                headers["content-encoding"] = "gzip"
                return Response(file.packed, headers=headers, media_type=file.media_type)
        return Response(file.body, headers=headers, media_type=file.media_type)


def _read(path: Path) -> _PageFile:
    body = path.read_bytes()
    guessed = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    packed = gzip.compress(body, mtime=0) if path.suffix in _PACKED else None
    return _PageFile(body, packed, _TYPES.get(path.suffix, guessed), f'W/"{sha256(body).hexdigest()[:32]}"')
