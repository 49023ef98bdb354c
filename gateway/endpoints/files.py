"""`/v1/files`: what batches read, uploaded by clients, and what they write."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Literal

from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway.endpoints.intake import Intake, check_media_type, route
from gateway.http.errors import ApiError, invalid
from gateway.http.limits import Limits
from gateway.service import Service
from gateway.sessions.batches.files import Files
from gateway.sessions.responses.objects import page
from gateway.sessions.responses.schemas import PageQuery, WholeNumber
from gateway.wire.frames import Json
from gateway.wire.schemas import StrictBody, read, validated

_MAX_FIELDS = 4
_MAX_FIELD_BYTES = 1024


class UploadForm(StrictBody):
    """`POST /v1/files`, as `multipart/form-data`."""

    NOT_SUPPORTED = frozenset({"expires_after[anchor]", "expires_after[seconds]"})

    file: bytes
    purpose: Literal["batch"]


class FilesQuery(PageQuery):
    """Which of a tenant's files."""

    limit: Annotated[WholeNumber, Field(ge=1, le=10_000)] = 10_000
    purpose: str | None = None


class FilesApi:
    """The files of one service."""

    def __init__(self, service: Service, intake: Intake, files: Files) -> None:
        self._service = service
        self._intake = intake
        self._files = files

    def routes(self) -> list[Route]:
        return [
            route("/v1/files", GET=self.list_files, POST=self.upload),
            route("/v1/files/{file_id}", GET=self.show, DELETE=self.delete),
            route("/v1/files/{file_id}/content", GET=self.content),
        ]

    async def upload(self, http: HttpRequest) -> Response:
        tenant = self._tenant(http)
        self._check_origin(http)
        filename, form = await _read_form(http, self._service.options.limits)
        file = await self._files.add(tenant, filename, form.purpose, form.file)
        return Json(file.as_json())

    def _check_origin(self, http: HttpRequest) -> None:
        """Any page may send a form to this machine without being asked; only those that may call it are heard."""
        origin = http.headers.get("origin")
        if origin is None or origin in self._service.options.cors_origins:
            return
        if origin.partition("://")[2] != http.headers.get("host"):
            message = "Pages of this origin may not upload files."
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="origin_not_allowed")

    async def list_files(self, http: HttpRequest) -> Response:
        tenant = self._tenant(http)
        query = validated(FilesQuery, http.query_params)
        files = [
            file.as_json() for file in await self._files.all(tenant) if query.purpose in (None, file.purpose)
        ]
        return Json(page(files, query))

    async def show(self, http: HttpRequest) -> Response:
        tenant = self._tenant(http)
        return Json((await self._files.find(tenant, http.path_params["file_id"])).as_json())

    async def delete(self, http: HttpRequest) -> Response:
        tenant = self._tenant(http)
        file = await self._files.find(tenant, http.path_params["file_id"])
        await self._files.delete(tenant, file)
        return Json({"id": file.id, "object": "file", "deleted": True})

    async def content(self, http: HttpRequest) -> Response:
        tenant = self._tenant(http)
        file = await self._files.find(tenant, http.path_params["file_id"])
        parts = self._files.content(tenant, file)
        # That it is gone has to be said before anything else is.
        first = await anext(parts, b"")

        async def all_parts() -> AsyncIterator[bytes]:
            yield first
            async for part in parts:
                yield part

        headers = {"content-length": str(file.num_bytes)}
        return StreamingResponse(all_parts(), media_type="application/octet-stream", headers=headers)

    def _tenant(self, http: HttpRequest) -> str:
        return self._intake.client(http).tenant.name


async def _read_form(http: HttpRequest, limits: Limits) -> tuple[str, UploadForm]:
    """The name of the uploaded file, and the form.

    Raises:
        ApiError: 400 that names the field that is wrong; 415 for what is no form.
    """
    check_media_type(http, "multipart/form-data")
    if "charset" in http.headers["content-type"].lower():
        raise invalid("The text of a form is UTF-8; it takes no charset.", None, "invalid_form")
    parser = MultiPartParser(
        http.headers, http.stream(), max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise invalid(f"The form could not be read: {error.message}", None, "invalid_form") from None
    filename, values = "", dict[str, object](form)
    try:
        for name, value in form.items():
            if isinstance(value, UploadFile):
                filename, values[name] = value.filename or "upload.jsonl", await value.read()
    finally:
        await form.close()
    return filename, read(UploadForm, values, limits)
