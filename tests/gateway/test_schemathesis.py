"""Nothing that `/openapi.json` leads schemathesis to, right or wrong, is a fault or answered otherwise than it says."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import requests
import schemathesis
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation.case import Case
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from penstock.engine.planning.request import FinishReason, Request
from penstock.gateway.endpoints.events import EventsApi
from tests.gateway.harness import MODEL, Gateway, chat_body, logprobs, serving
from tests.gateway.raw_http import PATIENCE_S

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@contextlib.contextmanager
def answering_at_once() -> Iterator[str]:
    """A server on a real port, whose engine says the same to all."""
    gateway = Gateway()

    def answer() -> None:
        while (request := gateway.queue.take(lambda _: True)) is not None:
            if request.branches:
                gateway.score(request)
                continue
            found = [logprobs((7, -0.5), (8, -1.0))] if request.sampling.num_logprobs is not None else []
            for index in range(request.n):
                first = _of_prompt(request) if index == 0 else {}
                gateway.bring(request, "a", index, logprobs=found, **first)
                gateway.finish(request, "b", index, FinishReason.STOP, logprobs=found)

    def wake() -> None:
        asyncio.get_running_loop().call_soon(answer)

    gateway.engine.on_wake = wake
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving(gateway.app)) as url:
        yield url


def _of_prompt(request: Request) -> dict[str, Any]:
    """Returns the fields of the first output that describe the prompt, as far as they were asked for."""
    is_scored = request.sampling.num_prompt_logprobs is not None
    return {
        "prompt_logprobs": [logprobs((7, -0.5))] * (len(request.prompt_token_ids) - 1) if is_scored else None,
        "embedding": None if request.pooling is None else [0.5, -1.0],
    }


async def _two_ticks(_: EventsApi) -> AsyncIterator[None]:
    yield
    yield


def _narrowed(document: dict[str, Any]) -> None:
    """Makes bodies name this model and have short lists, for the test's sake, and errors have no other members."""
    for schema in document["components"]["schemas"].values():
        is_asked = schema.get("additionalProperties") is False
        if is_asked:
            _shorten(schema)
            if "model" in schema["properties"]:
                schema["properties"]["model"] = {"const": MODEL}
        elif "error" in schema["properties"]:
            schema["additionalProperties"] = False


def _shorten(node: Any) -> None:
    if isinstance(node, dict) and node.get("type") == "array":
        node["maxItems"] = min(2, node.get("maxItems", 2))
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _shorten(item)


class _Known:
    """Ids of what there is, made anew when it is gone."""

    def __init__(self, url: str, session: requests.Session) -> None:
        self._url = url
        self._session = session

    def ids(self, path: str) -> dict[str, str]:
        if path.startswith("/v1/conversations/"):
            item = {"role": "user", "content": "Hi"}
            conversation = self._make("/v1/conversations", {"items": [item]})
            page = self._session.get(f"{self._url}/v1/conversations/{conversation}/items").json()
            return {"conversation_id": conversation, "item_id": page["last_id"]}
        if path.startswith("/v1/responses/"):
            return {"id": self._make("/v1/responses", {"model": MODEL, "input": "Hi", "background": True})}
        if path.startswith("/v1/files/"):
            return {"file_id": self._upload()}
        if path.startswith("/v1/batches/"):
            asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
            return {"batch_id": self._make("/v1/batches", {"input_file_id": self._upload(), **asked})}
        if path.startswith("/v1/messages/batches/"):
            requests = [{"custom_id": "a", "params": {"model": MODEL}}]
            return {"message_batch_id": self._make("/v1/messages/batches", {"requests": requests})}
        if path.startswith("/v1/chat/completions/"):
            body = chat_body(stream=True, store=True, stream_options={"resumable": True})
            with self._session.post(f"{self._url}/v1/chat/completions", json=body) as reply:
                return {"id": "chatcmpl-" + reply.text.partition("chatcmpl-")[2][:32]}
        return {"name": MODEL} if path.startswith("/v1/models/") else {}

    def _upload(self) -> str:
        file = {"file": ("in.jsonl", b"{}")}
        return self._id_of(
            lambda url: self._session.post(f"{url}/v1/files", data={"purpose": "batch"}, files=file)
        )

    def _make(self, path: str, body: dict[str, Any]) -> str:
        return self._id_of(lambda url: self._session.post(url + path, json=body))

    def _id_of(self, ask: Callable[[str], requests.Response]) -> str:
        """The id of what is made; files are forgotten when there are as many as there may be."""
        made = ask(self._url).json()
        if "id" not in made:
            for file in self._session.get(f"{self._url}/v1/files").json()["data"]:
                self._session.delete(f"{self._url}/v1/files/{file['id']}")
            made = ask(self._url).json()
        return str(made["id"])


@pytest.mark.parametrize(
    ("each", "total"),
    [(2, 75), pytest.param(70, 5000, marks=pytest.mark.long("5,000 requests by description"))],
)
def test_nothing_that_the_description_leads_to_is_a_fault(
    each: int, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`each` operation gets so many examples that are right, and as many that are wrong."""
    monkeypatch.setattr(EventsApi, "_ticks", _two_ticks)  # those streams have no end
    statuses: Counter[int] = Counter()
    with answering_at_once() as url, requests.Session() as session:
        document = session.get(f"{url}/openapi.json").json()
        _narrowed(document)
        schema = schemathesis.openapi.from_dict(document)
        schema.validate()
        known = _Known(url, session)
        for found in schema.get_all_operations():
            assert isinstance(found, Ok)
            operation = found.ok()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                ids = known.ids(operation.path) if mode is GenerationMode.POSITIVE else {}
                with contextlib.suppress(Unsatisfiable):  # there is nothing to be wrong
                    statuses += _statuses(
                        operation.as_strategy(generation_mode=mode), each, ids, url, session
                    )
    assert sum(statuses.values()) >= total
    assert statuses[200] > total / 10
    assert not [status for status in statuses if status >= 500]


def _statuses(
    cases: SearchStrategy[Case[Any]], each: int, ids: dict[str, str], url: str, session: requests.Session
) -> Counter[int]:
    """Counts the statuses of the answers to these requests, which must be as described."""
    found: Counter[int] = Counter()

    @settings(
        max_examples=each, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=cases)
    def ask(case: Case[Any]) -> None:
        case.path_parameters.update({name: ids[name] for name in ids.keys() & case.path_parameters.keys()})
        reply = case.call(url, session=session, timeout=PATIENCE_S)
        found[reply.status_code] += 1
        case.validate_response(reply, checks=CHECKS)

    ask()
    return found
