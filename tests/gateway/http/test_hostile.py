"""Openings and bodies that no friend sends: each is answered with the status that stands beside it, and no other.

`hostile.json` has what is sent, byte by byte, as texts in Latin-1; `["x", 3]` is three of them.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import Gateway, serving
from tests.gateway.raw_http import connect, get

pytestmark = pytest.mark.anyio

HOSTILE: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("hostile.json").read_text())


def sent(pieces: list[str | list[Any]]) -> bytes:
    return "".join(p if isinstance(p, str) else p[0] * p[1] for p in pieces).encode("latin-1")


async def status_of(url: str, data: bytes) -> int | None:
    """None if the server hangs up without a word."""
    async with connect(url) as connection:
        connection.send(data)
        try:
            status, _ = await connection.head()
        except asyncio.IncompleteReadError:
            return None
    return status


async def test_every_opening_has_its_answer() -> None:
    async with serving(Gateway().app) as url:
        found = {case["name"]: await status_of(url, sent(case["sent"])) for case in HOSTILE["openings"]}
        assert await status_of(url, get("/health")) == 200
    assert found == {case["name"]: case["status"] for case in HOSTILE["openings"]}


async def test_every_body_has_its_answer() -> None:
    async with serving(Gateway().app) as url:
        found = {
            case["name"]: await _answer_to(url, case["path"], sent(case["sent"]))
            for case in HOSTILE["bodies"]
        }
        assert await status_of(url, get("/health")) == 200
    assert found == {case["name"]: case["status"] for case in HOSTILE["bodies"]}


async def _answer_to(url: str, path: str, body: bytes) -> int | None:
    head = get(path, "content-type: application/json", f"content-length: {len(body)}", method="POST")
    return await status_of(url, head + body)
