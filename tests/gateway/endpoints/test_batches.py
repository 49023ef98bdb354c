"""`/v1/files` and `/v1/batches` with OpenAI's own client: what a batch comes to, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.endpoints.files import UPLOAD_S
from penstock.gateway.errors import internal
from penstock.gateway.limits import Limits
from penstock.gateway.reply.generation import Generation
from penstock.gateway.service import ServiceOptions
from penstock.gateway.sessions.batches import batch as batches
from penstock.gateway.sessions.batches import files, run
from penstock.gateway.store.interface import Quota
from penstock.gateway.store.memory import MemoryStore
from penstock.priority.lanes import Tenant
from tests.gateway.endpoints.test_openai_client import connected
from tests.gateway.harness import MODEL, Gateway, chat_body, client, serving
from tests.gateway.in_memory_connection import BODY_S, InMemoryConnection
from tests.gateway.raw_http import PATIENCE_S, connect

pytestmark = pytest.mark.anyio

CHAT: Any = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WRITE_S", 0.01)


def line(custom_id: object, text: str = "Hi", url: str = CHAT, **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": chat_body(text, **fields)}


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def begun(api: openai.AsyncOpenAI, *lines: object, endpoint: Any = CHAT) -> Any:
    file = await api.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return await api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def ended(api: openai.AsyncOpenAI, batch_id: str, *statuses: str) -> Any:
    """The batch, once it has one of these statuses."""
    while (batch := await api.batches.retrieve(batch_id)).status not in statuses:
        assert batch.status in ("validating", "in_progress", "finalizing", "cancelling"), batch
        await asyncio.sleep(0.01)
    return batch


async def results(api: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """By custom_id; none is there twice."""
    assert file_id is not None
    content = (await api.files.content(file_id)).text
    lines = [json.loads(text) for text in content.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found


async def test_a_batch_from_upload_to_download() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        batch = await begun(api, line("a", "one"), line("b", "two", n=0), line("c", "three"))
        assert (batch.status, batch.endpoint, batch.completion_window) == ("validating", CHAT, "24h")
        for request in [await gateway.taken(), await gateway.taken()]:
            assert request.lane == 2, "they are in nobody's way"
            gateway.answer(request, "yes")
        batch = await ended(api, batch.id, "completed")
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
        assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        output, errors = await results(api, batch.output_file_id), await results(api, batch.error_file_id)
        assert output.keys() == {"a", "c"}
        answer = output["a"]["response"]
        assert (answer["status_code"], output["a"]["error"]) == (200, None)
        assert answer["request_id"].startswith("req_")
        assert answer["body"]["choices"][0]["message"]["content"] == "yes"
        assert answer["body"]["service_tier"] == "flex"
        assert errors["b"]["response"]["status_code"] == 400
        assert errors["b"]["response"]["body"]["error"]["param"] == "n"
        listed = [file async for file in await api.files.list()]
        assert [file.purpose for file in listed] == ["batch_output", "batch_output", "batch"]
        assert [one.id async for one in await api.batches.list()] == [batch.id]
        for file in listed:
            assert (await api.files.retrieve(file.id)).bytes == file.bytes > 0
            assert (await api.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError, match="No such File object"):
            await api.files.content(batch.output_file_id)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
async def test_the_other_endpoints(url: str, body: dict[str, Any]) -> None:
    gateway = Gateway()
    asked = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": MODEL, **body}}
    async with connected(gateway) as api:
        batch = await begun(api, asked, endpoint=url)
        request = await gateway.taken()
        gateway.finish(request, "yes", embedding=[0.5] if request.pooling else None)
        batch = await ended(api, batch.id, "completed")
        answer = (await results(api, batch.output_file_id))["a"]["response"]["body"]
    assert "yes" in json.dumps(answer) or answer["data"][0]["embedding"]


async def test_a_batch_that_is_cancelled_keeps_what_it_has() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        batch = await begun(api, line("a"), line("b"))
        first, second = await gateway.taken(), await gateway.taken()
        gateway.answer(first, "yes")
        assert (await api.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(api, batch.id, "cancelled")
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.total) == (1, 2)
        assert len(await results(api, batch.output_file_id)) == 1
        assert (await api.batches.cancel(batch.id)).status == "cancelled"
    assert gateway.engine.cancelled == [second.request_id]


@pytest.mark.parametrize(
    ("fault", "message", "reason"),
    [
        (
            RuntimeError("a bug"),
            "The server had an error while processing your request.",
            "RuntimeError: a bug",
        ),
        (internal("It broke."), "It broke.", "It broke."),
    ],
)
async def test_a_line_that_the_server_fails_over_is_in_the_log(
    fault: Exception,
    message: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway = Gateway()

    def fail(_: Generation) -> None:
        raise fault

    monkeypatch.setattr(gateway.service.dispatch, "submit", fail)
    async with connected(gateway) as api:
        batch = await ended(api, (await begun(api, line("a"))).id, "completed")
        answer = (await results(api, batch.error_file_id))["a"]["response"]
    assert (answer["status_code"], answer["body"]["error"]["message"]) == (500, message)
    (record,) = [record for record in caplog.records if "failed" in record.getMessage()]
    assert record.getMessage() == f"POST {CHAT} failed: {reason} (x-request-id {answer['request_id']})"


async def test_a_line_waits_for_its_tenants_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_PAUSE_S", 0.01)
    key = digest_of("k")
    quota = Quota(max_streams=1)
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients={key: Client(Tenant(name="t"), quota)}))
    async with connected(gateway, api_key="k") as api:
        batch = await begun(api, line("a"), line("b"))
        gateway.answer(await gateway.taken(), "yes")
        gateway.answer(await gateway.taken(), "yes")  # it was refused until the first had ended
        batch = await ended(api, batch.id, "completed")
        assert len(await results(api, batch.output_file_id)) == 2


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        (b"", [("empty_file", None)]),
        (b"\n \n", [("empty_file", None)]),
        (b"{", [("invalid_json", 1)]),
        (b"[]", [("invalid_json", 1)]),
        (jsonl(line("a"), line("a")), [("duplicate_custom_id", 2)]),
        (jsonl(line("")), [("invalid_custom_id", 1)]),
        (jsonl(line([])), [("invalid_custom_id", 1)]),
        (jsonl(line("a" * 513)), [("invalid_custom_id", 1)]),
        (jsonl({**line("a"), "method": "GET"}), [("invalid_method", 1)]),
        (jsonl(line("a"), line("b", url="/v1/models")), [("invalid_url", 2)]),
        (jsonl({**line("a"), "body": []}), [("invalid_body", 1)]),
        (jsonl(line("a", stream=True)), [("invalid_body", 1)]),
        (jsonl(line("a", background=True)), [("invalid_body", 1)]),
        (jsonl(*(line(str(i)) for i in range(4))), [("too_many_lines", None)]),
        (b"{\n" * 60, [("invalid_json", i) for i in range(1, 51)]),
    ],
)
def test_an_input_that_is_wrong_fails_before_any_line_is_run(
    content: bytes, errors: list[tuple[str, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_LINES", 3)
    check = batches.InputCheck(CHAT, Limits())
    for text in content.split(b"\n"):
        check.read([text])
    assert [(error.code, error.line) for error in check.errors] == errors
    assert all(error.message for error in check.errors)


async def test_a_batch_whose_input_is_wrong_says_where() -> None:
    async with connected(Gateway()) as api:
        batch = await begun(api, line("a"), line("a"))
        batch = await ended(api, batch.id, "failed")
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [("duplicate_custom_id", 2)]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


FORM = {"purpose": "batch"}
UPLOAD = {"file": ("in.jsonl", b"{}")}
UNKNOWN_FILE, UNKNOWN_BATCH = "file-" + 32 * "0", "batch_" + 32 * "0"

BATCH = {"input_file_id": UNKNOWN_FILE, "endpoint": CHAT, "completion_window": "24h"}


@pytest.mark.parametrize(
    ("call", "status", "param"),
    [
        (("POST", "/v1/files", {"data": FORM}), 415, None),
        (("POST", "/v1/files", {"json": {}}), 415, None),
        (("POST", "/v1/files", {"files": UPLOAD}), 400, "purpose"),
        (("POST", "/v1/files", {"files": UPLOAD, "data": {"purpose": "vision"}}), 400, "purpose"),
        (("POST", "/v1/files", {"files": {"purpose": (None, "batch")}}), 400, "file"),
        (("POST", "/v1/files", {"files": {"purpose": (None, "batch"), "file": (None, "x")}}), 400, "file"),
        (("POST", "/v1/files", {"files": UPLOAD, "data": {**FORM, "x": "y"}}), 400, "x"),
        (
            ("POST", "/v1/files", {"files": UPLOAD, "data": {**FORM, "expires_after[anchor]": "created_at"}}),
            400,
            "expires_after[anchor]",
        ),
        (("POST", "/v1/files", {"files": [*UPLOAD.items(), *UPLOAD.items()], "data": FORM}), 400, None),
        (("POST", "/v1/files", {"files": UPLOAD, "data": {**FORM, "x": "y" * 2000}}), 400, None),
        (("POST", "/v1/files", {"files": UPLOAD, "data": {str(i): "" for i in range(9)}}), 400, None),
        (
            ("POST", "/v1/files", {"files": UPLOAD, "data": FORM, "headers": {"origin": "http://e"}}),
            403,
            None,
        ),
        (
            ("POST", "/v1/files", {"content": b"x", "headers": {"content-type": "multipart/form-data"}}),
            400,
            None,
        ),
        (
            (
                "POST",
                "/v1/files",
                {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}},
            ),
            400,
            None,
        ),
        (
            (
                "POST",
                "/v1/files",
                {
                    "content": b"",
                    "headers": {"content-type": "multipart/form-data; boundary=b; charset=utf-7"},
                },
            ),
            400,
            None,
        ),
        (("GET", "/v1/files?limit=0", {}), 400, "limit"),
        (("GET", "/v1/files?after=x", {}), 400, "after"),
        (("GET", "/v1/files/x", {}), 404, "id"),
        (("GET", f"/v1/files/{UNKNOWN_FILE}", {}), 404, "id"),
        (("GET", f"/v1/files/{UNKNOWN_FILE}/content", {}), 404, "id"),
        (("DELETE", f"/v1/files/{UNKNOWN_FILE}", {}), 404, "id"),
        (("POST", "/v1/batches", {"json": {}}), 400, "input_file_id"),
        (("POST", "/v1/batches", {"json": {**BATCH, "endpoint": "/v1/models"}}), 400, "endpoint"),
        (("POST", "/v1/batches", {"json": {**BATCH, "completion_window": "1h"}}), 400, "completion_window"),
        (("POST", "/v1/batches", {"json": {**BATCH, "metadata": {"k" * 65: "v"}}}), 400, "metadata"),
        (("POST", "/v1/batches", {"json": BATCH}), 404, "input_file_id"),
        (("POST", "/v1/batches", {"json": {"output_expires_after": {}}}), 400, "output_expires_after"),
        (("GET", "/v1/batches/x", {}), 404, "id"),
        (("GET", f"/v1/batches/{UNKNOWN_BATCH}", {}), 404, "id"),
        (("POST", f"/v1/batches/{UNKNOWN_BATCH}/cancel", {}), 404, "id"),
        (("GET", "/v1/batches?limit=101", {}), 400, "limit"),
    ],
)
async def test_what_is_refused(call: tuple[str, str, dict[str, Any]], status: int, param: str | None) -> None:
    method, path, asked = call
    async with client(Gateway().app) as http:
        reply = await http.request(method, path, **asked)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("file_id", "message"),
    [("x", "There is no file of that id."), (UNKNOWN_FILE, f"No such File object: {UNKNOWN_FILE}.")],
)
async def test_a_file_that_is_not_there_is_named_if_its_id_could_be_one(file_id: str, message: str) -> None:
    async with client(Gateway().app) as http:
        assert (await http.get(f"/v1/files/{file_id}")).json()["error"]["message"] == message


async def test_a_batch_needs_an_input_of_the_tenants_own() -> None:
    clients = {digest_of(name): Tenant(name=name) for name in ("a", "b")}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=clients))
    async with connected(gateway, api_key="a") as api:
        file = await api.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
        other = api.with_options(api_key="b")
        with pytest.raises(openai.NotFoundError):
            await other.files.content(file.id)
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert not [one async for one in await other.files.list()]


async def test_what_a_tenant_may_keep_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 2)
    monkeypatch.setattr(files, "MAX_BYTES_IN_MEMORY", 100)
    async with connected(Gateway()) as api:
        with pytest.raises(openai.BadRequestError, match="at most 100 bytes"):
            await api.files.create(file=("a", bytes(101)), purpose="batch")
        for _ in range(2):
            await api.files.create(file=("a", bytes(50)), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="You have 2 files"):
            await api.files.create(file=("a", b""), purpose="batch")


async def test_a_tenants_batches_at_work_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_AT_WORK", 0)
    async with connected(Gateway()) as api:
        with pytest.raises(openai.RateLimitError, match="batches at work"):
            await begun(api, line("a"))


async def test_no_batch_begins_where_its_results_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    content = jsonl(line("a"))
    monkeypatch.setattr(files, "MAX_BYTES_IN_MEMORY", len(content))
    async with connected(Gateway()) as api:
        with pytest.raises(openai.BadRequestError, match="bytes together") as refused:
            await begun(api, line("a"))
        assert refused.value.param == "input_file_id"


async def test_a_large_file_comes_back_as_it_was() -> None:
    content = bytes(range(256)) * (files.PART_BYTES // 100)
    async with connected(Gateway()) as api:
        file = await api.files.create(file=("a.bin", content), purpose="batch")
        assert (file.bytes, file.filename) == (len(content), "a.bin")
        assert (await api.files.content(file.id)).content == content


async def test_a_file_may_be_larger_than_a_body() -> None:
    limits = Limits(max_body_bytes=1000, max_upload_bytes=100_000)
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=limits))
    async with connected(gateway) as api:
        content = jsonl(*(line(str(i)) for i in range(300)))
        assert 1000 < len(content) < 100_000
        file = await api.files.create(file=("in.jsonl", content), purpose="batch")
        assert (await api.files.content(file.id)).content == content
        with pytest.raises(openai.APIStatusError, match="It may have 100000 bytes") as refused:
            await api.files.create(file=("in.jsonl", bytes(100_000)), purpose="batch")
        assert refused.value.status_code == 413


FORM_HEAD = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
)


def upload_head(num_bytes: int) -> bytes:
    return (
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n"
        b"content-type: multipart/form-data; boundary=b\r\n\r\n" % num_bytes
    ) + FORM_HEAD


async def test_an_upload_is_stored_as_it_arrives_and_forgotten_if_its_client_goes_away() -> None:
    store = MemoryStore()
    gateway, records = Gateway(store=store), store.records
    async with (
        serving(gateway.app) as url,
        client(gateway.app) as http,
        connect(url) as connection,
    ):
        connection.send(upload_head(10 * files.PART_BYTES) + bytes(2 * files.PART_BYTES))
        while len(records) < 2:
            await asyncio.sleep(0.001)
        assert (await http.get("/v1/files")).json()["data"] == []
        connection.hang_up()
        while len(records):
            await asyncio.sleep(0.001)
        assert (await http.post("/v1/files", files=UPLOAD, data=FORM)).status_code == 200


async def test_uploads_under_way_take_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES_IN_MEMORY", 3 * files.PART_BYTES)
    store = MemoryStore()
    gateway = Gateway(store=store)
    async with (
        serving(gateway.app) as url,
        client(gateway.app) as http,
        connect(url) as connection,
    ):
        connection.send(upload_head(3 * files.PART_BYTES) + bytes(2 * files.PART_BYTES))
        while not len(store.records):
            await asyncio.sleep(0.001)
        sent = {"file": ("a", bytes(2 * files.PART_BYTES))}
        refused = await http.post("/v1/files", files=sent, data=FORM)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "storage_full")
        connection.hang_up()
        while (await http.post("/v1/files", files=sent, data=FORM)).status_code != 200:
            await asyncio.sleep(0.001)


async def test_an_upload_may_take_its_time() -> None:
    connection = InMemoryConnection(Gateway())
    end = b"\r\n--b--\r\n"
    await connection.send(upload_head(len(FORM_HEAD) + 2 + len(end)))
    for _ in range(2):
        connection.loop.pass_s(4 * BODY_S)
        await connection.send(b"x")
    await connection.send(end)
    async with asyncio.timeout(PATIENCE_S):
        while connection.status() is None:
            await asyncio.sleep(0)
    assert connection.status() == 200
    connection = InMemoryConnection(Gateway())
    await connection.send(upload_head(len(FORM_HEAD) + 1))
    connection.loop.pass_s(UPLOAD_S)
    assert connection.status() == 408
