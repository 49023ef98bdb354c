"""A process answers with what it knows of a response, whatever state the store is in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.gateway.store.interface import Key, StoreUnavailable
from penstock.gateway.store.memory import MemoryStore
from tests.clock import Clock
from tests.gateway.harness import MODEL, Gateway, client

pytestmark = pytest.mark.anyio

RESPONSES = "/v1/responses"


class Away(MemoryStore):
    """A store that can be told to go away, or to forget all."""

    away = False

    async def get(self, key: Key, ttl_s: float | None = None) -> bytes | None:
        if self.away:
            raise StoreUnavailable
        return await super().get(key, ttl_s)

    def forget(self) -> None:
        for key, _ in list(self.records.items()):
            self.records.pop(key)


def gateway_with(store: Away) -> Gateway:
    return Gateway(store=store)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Hi", **fields}


async def test_a_response_that_runs_here_is_shown_without_the_store() -> None:
    gateway = gateway_with(store := Away(Clock()))
    async with client(gateway.app) as http:
        made = (await http.post(RESPONSES, json=body(background=True))).json()
        request = await gateway.taken()
        store.away = True
        for path in (f"{RESPONSES}/{made['id']}", f"{RESPONSES}/{made['id']}/input_items"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get(f"{RESPONSES}/resp_{'0' * 48}")).status_code == 503
        gateway.answer(request, "Ho")
        await gateway.left()
        ended = (await http.get(f"{RESPONSES}/{made['id']}")).json()
    assert (ended["status"], ended["output"][0]["content"][0]["text"]) == ("completed", "Ho")


@pytest.mark.parametrize("fault", ["away", "empty"])
async def test_a_response_of_here_is_gone_on_from_without_the_store(fault: str) -> None:
    gateway = gateway_with(store := Away(Clock()))
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post(RESPONSES, json=body()))
        gateway.answer(await gateway.taken(), "Ho")
        first = (await asking).json()["id"]
        store.away = fault == "away"
        if fault == "empty":
            store.forget()
        asking = asyncio.create_task(http.post(RESPONSES, json=body(previous_response_id=first)))
        request = await gateway.taken()
        gateway.answer(request, "again")
        assert (await asking).json()["previous_response_id"] == first
    assert "Hi<|end|><|assistant|>Ho" in gateway.service.tokenizer.decode(
        request.prompt_token_ids, skip_special=False
    )


async def test_one_that_came_to_no_answer_is_not_gone_on_from() -> None:
    gateway = gateway_with(store := Away(Clock()))
    async with client(gateway.app) as http:
        made = (await http.post(RESPONSES, json=body(background=True))).json()["id"]
        store.away = True
        waiting = (await http.post(RESPONSES, json=body(previous_response_id=made))).json()["error"]
        assert "has not ended yet" in waiting["message"]
        await http.post(f"{RESPONSES}/{made}/cancel")
        await gateway.left()
        refused = (await http.post(RESPONSES, json=body(previous_response_id=made))).json()["error"]
    assert "came to no answer" in refused["message"]
