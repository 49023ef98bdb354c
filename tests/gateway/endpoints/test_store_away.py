"""What this process knows of a response it says, whatever state the store is in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.store.interface import Key, StoreUnavailable
from gateway.store.memory import MemoryStore
from tests.gateway.desk import MODEL, Clock, Desk, client

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


def desk_with(store: Away) -> Desk:
    return Desk(store=store)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Hi", **fields}


async def test_a_response_that_runs_here_is_shown_without_the_store() -> None:
    desk = desk_with(store := Away(Clock()))
    async with client(desk.app) as http:
        made = (await http.post(RESPONSES, json=body(background=True))).json()
        request = await desk.taken()
        store.away = True
        for path in (f"{RESPONSES}/{made['id']}", f"{RESPONSES}/{made['id']}/input_items"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get(f"{RESPONSES}/resp_{'0' * 48}")).status_code == 503
        desk.answer(request, "Ho")
        await desk.left()
        ended = (await http.get(f"{RESPONSES}/{made['id']}")).json()
    assert (ended["status"], ended["output"][0]["content"][0]["text"]) == ("completed", "Ho")


@pytest.mark.parametrize("fault", ["away", "empty"])
async def test_a_response_of_here_is_gone_on_from_without_the_store(fault: str) -> None:
    desk = desk_with(store := Away(Clock()))
    async with client(desk.app) as http:
        asking = asyncio.create_task(http.post(RESPONSES, json=body()))
        desk.answer(await desk.taken(), "Ho")
        first = (await asking).json()["id"]
        store.away = fault == "away"
        if fault == "empty":
            store.forget()
        asking = asyncio.create_task(http.post(RESPONSES, json=body(previous_response_id=first)))
        request = await desk.taken()
        desk.answer(request, "again")
        assert (await asking).json()["previous_response_id"] == first
    assert "Hi<|end|><|assistant|>Ho" in desk.service.tokenizer.decode(
        request.prompt_token_ids, skip_special=False
    )


async def test_one_that_came_to_no_answer_is_not_gone_on_from() -> None:
    desk = desk_with(store := Away(Clock()))
    async with client(desk.app) as http:
        made = (await http.post(RESPONSES, json=body(background=True))).json()["id"]
        store.away = True
        waiting = (await http.post(RESPONSES, json=body(previous_response_id=made))).json()["error"]
        assert "has not ended yet" in waiting["message"]
        await http.post(f"{RESPONSES}/{made}/cancel")
        await desk.left()
        refused = (await http.post(RESPONSES, json=body(previous_response_id=made))).json()["error"]
    assert "came to no answer" in refused["message"]
