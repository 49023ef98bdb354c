"""`/openapi.json` says all that there is: every route, the limits, and whether a key is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from penstock.gateway.app import create_app
from penstock.gateway.endpoints.openapi import OpenApi
from penstock.gateway.endpoints.operations import OPERATIONS
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from tests.gateway.harness import MODEL, Gateway, client


@pytest.mark.anyio
async def test_every_route_is_described(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("")
    gateway = Gateway(ServiceOptions(models=(MODEL,), cluster_secret="so that every route is there"))
    app: Any = create_app(gateway.service, tmp_path)
    async with client(app) as http:
        described = (await http.get("/openapi.json")).json()["paths"]
    assert described.keys() == OPERATIONS.keys()
    for path, operations in OPERATIONS.items():
        assert described[path].keys() == {method.lower() for method in operations}


def test_a_route_that_is_not_described_cannot_be_overlooked() -> None:
    with pytest.raises(LookupError, match="/new"):
        OpenApi([Route("/new", lambda _: None)], Limits(), with_keys=False).document()


@pytest.mark.anyio
async def test_limits_and_keys_are_said() -> None:
    assert "security" not in OpenApi([], Limits(), with_keys=False).document()
    keyed = OpenApi([], Limits(), with_keys=True).document()
    assert keyed["security"] == [{"key": []}]
    assert keyed["paths"]["/openapi.json"]["get"]["security"] == []
    options = ServiceOptions(models=(MODEL,), limits=Limits(max_messages=3, max_choices=2))
    async with client(Gateway(options).app) as http:
        schemas = (await http.get("/openapi.json")).json()["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["messages"]["maxItems"] == 3
    assert {"maximum": 2, "minimum": 1, "type": "integer"} in schemas["ChatBody"]["properties"]["n"]["anyOf"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "status", "sent"),
    [
        ("/v1/chat/completions", 413, {"content": b" " * 300}),
        ("/v1/chat/completions", 431, {"headers": {"x-a": "b" * 300}, "content": b"{}"}),
        ("/v1/chat/completions", 421, {"headers": {"host": "elsewhere"}, "content": b"{}"}),
        (
            "/v1/chat/completions",
            404,
            {"json": {"model": "no", "messages": [{"role": "user", "content": "a"}]}},
        ),
        ("/api/show", 404, {"json": {"model": "no"}}),
    ],
)
async def test_statuses_are_described(path: str, status: int, sent: dict[str, Any]) -> None:
    limits = Limits(max_body_bytes=299, max_header_bytes=299)
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=limits, allowed_hosts=("penstock",)))
    async with client(gateway.app) as http:
        assert (await http.post(path, **sent)).status_code == status
        described = (await http.get("/openapi.json")).json()["paths"][path]["post"]["responses"]
    assert str(status) in described
