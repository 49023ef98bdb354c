"""`/v1/files` has the files that clients upload for batches, and those that batches write."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from io import BytesIO
from typing import Annotated, Literal

from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from penstock.gateway.endpoints.intake import Endpoints, Intake, check_media_type
from penstock.gateway.endpoints.operation import ANY, BY_ID, ONCE, looks_up, serves
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.http.connections import BODY_WITHIN
from penstock.gateway.http.hosts import FORWARDED_HOST
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.limits import Limits
from penstock.gateway.service import Service
from penstock.gateway.sessions.batches.files import Files, Upload
from penstock.gateway.sessions.responses.objects import page
from penstock.gateway.sessions.responses.schemas import PageQuery, WholeNumber
from penstock.gateway.wire.strict import StrictBody, read, validated

UPLOAD_S = 600.0
"""An upload may take so long to arrive, once it is known whose it is."""
_MAX_FIELDS = 4
_MAX_FIELD_BYTES = 1024


class UploadForm(StrictBody):
    """The `multipart/form-data` of `POST /v1/files`."""

    NOT_SUPPORTED = frozenset({"expires_after[anchor]", "expires_after[seconds]"})

    file: bytes
    purpose: Literal["batch"]


class FilesQuery(PageQuery):
    """The query of a list of files."""

    limit: Annotated[WholeNumber, Field(ge=1, le=10_000)] = 10_000
    purpose: str | None = None


class FilesApi(Endpoints):
    """The files of one service."""

    def __init__(self, service: Service, intake: Intake, files: Files) -> None:
        super().__init__(service, intake)
        self._files = files

    @serves("POST /v1/files", ONCE, UploadForm, is_form=True, statuses=(403, 503))
    async def upload(self, http: HttpRequest) -> Response:
        """Upload the input of a batch."""
        tenant = self._intake.tenant(http)
        self._check_origin(http)
        check_media_type(http, "multipart/form-data")
        if "charset" in http.headers["content-type"].lower():
            raise invalid("The text of a form is UTF-8; it takes no charset.", None, "invalid_form")
        http.scope.get("extensions", {}).get(BODY_WITHIN, lambda _: None)(UPLOAD_S)
        about = int(http.headers.get("content-length", 0)) - _MAX_FIELDS * _MAX_FIELD_BYTES
        async with self._files.uploading(tenant, about) as upload:
            filename, form = await _read_form(http, upload, self._service.options.limits)
            file = await upload.finish(filename, form.purpose)
        return JsonResponse(file.as_json())

    def _check_origin(self, http: HttpRequest) -> None:
        """Any page may send a form to this machine without being asked; only those that may call it are heard.

        What a form says it was forwarded for is true: a page cannot give it headers of its own.
        """
        origin = http.headers.get("origin")
        if origin is None or origin in self._service.options.cors_origins:
            return
        hosts = (http.headers.get("host"), http.headers.get(FORWARDED_HOST))
        if origin.partition("://")[2] not in hosts:
            message = "Pages of this origin may not upload files."
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="origin_not_allowed")

    @looks_up("/v1/files", ANY, query=FilesQuery, statuses=(503,))
    async def list_files(self, http: HttpRequest) -> Response:
        """List the files that were uploaded or made by batches."""
        tenant = self._intake.tenant(http)
        query = validated(FilesQuery, http.query_params)
        files = [
            file.as_json() for file in await self._files.all(tenant) if query.purpose in (None, file.purpose)
        ]
        return JsonResponse(page(files, query))

    @looks_up("/v1/files/{file_id}", BY_ID)
    async def show(self, http: HttpRequest) -> Response:
        """Show a file."""
        tenant = self._intake.tenant(http)
        return JsonResponse((await self._files.find(tenant, http.path_params["file_id"])).as_json())

    @serves("DELETE /v1/files/{file_id}", BY_ID)
    async def delete(self, http: HttpRequest) -> Response:
        """Forget a file."""
        tenant = self._intake.tenant(http)
        file = await self._files.find(tenant, http.path_params["file_id"])
        await self._files.delete(tenant, file)
        return JsonResponse({"id": file.id, "object": "file", "deleted": True})

    @looks_up("/v1/files/{file_id}/content", BY_ID, answers=("application/octet-stream",), statuses=(410,))
    async def content(self, http: HttpRequest) -> Response:
        """Give the content of a file."""
        tenant = self._intake.tenant(http)
        file = await self._files.find(tenant, http.path_params["file_id"])
        parts = await begun(self._files.content(tenant, file))
        headers = {"content-length": str(file.num_bytes)}
        return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)


async def begun(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Returns the same parts once the first has arrived, so that an error before it can still set the status."""
    first = await anext(parts, b"")

    async def all_parts() -> AsyncIterator[bytes]:
        yield first
        async for part in parts:
            yield part

    return all_parts()


class _StoredFile(UploadFile):
    """The file in a form, which is written to the store as it arrives."""

    def __init__(self, upload: Upload, filename: str | None) -> None:
        super().__init__(BytesIO(), filename=filename)
        self._upload = upload

    async def write(self, data: bytes) -> None:
        await self._upload.write(data)


class _FormParser(MultiPartParser):
    """A parser of forms that keeps nothing of the file."""

    def __init__(self, http: HttpRequest, upload: Upload) -> None:
        bounds = {"max_files": 1, "max_fields": _MAX_FIELDS, "max_part_size": _MAX_FIELD_BYTES}
        super().__init__(http.headers, http.stream(), **bounds)
        self._upload = upload

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if (file := self._current_part.file) is not None:
            file.file.close()
            self._current_part.file = _StoredFile(self._upload, file.filename)


async def _read_form(http: HttpRequest, upload: Upload, limits: Limits) -> tuple[str, UploadForm]:
    """Reads the form, and returns the name of the uploaded file, and the form without its content.

    Raises:
        ApiError: 400 that names the field that is wrong.
    """
    try:
        form = await _FormParser(http, upload).parse()
    except MultiPartException as error:
        raise invalid(f"The form could not be read: {error.message}", None, "invalid_form") from None
    filename, values = "", dict[str, object](form)
    for name, value in form.items():
        if isinstance(value, UploadFile):
            filename, values[name] = value.filename or "upload.jsonl", b""
    return filename, read(UploadForm, values, limits)
