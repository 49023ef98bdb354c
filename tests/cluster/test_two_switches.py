"""Two switches before the same replicas, for the openai package: a client may come back through the other one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI, AsyncStream, NotFoundError
from openai.types import Completion

from penstock.gateway.sessions.owners import tag_in, tag_of
from tests.cluster.scripted_replicas import PATIENCE_S
from tests.cluster.test_switch import Cluster, cluster, make_gateway
from tests.gateway.harness import MODEL

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.asynccontextmanager
async def openai_of(found: Cluster) -> AsyncIterator[AsyncOpenAI]:
    url = f"{found.http.base_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=PATIENCE_S, max_retries=0) as client:
        yield client


async def test_a_text_completion_that_began_at_one_switch_goes_on_and_is_forgotten_at_the_other() -> None:
    gateways = {tag_of(name): make_gateway(name) for name in ("a", "b")}
    owners = set()
    async with (
        cluster(*gateways.values()) as first,
        cluster(*gateways.values()) as second,
        openai_of(first) as before,
        openai_of(second) as after,
    ):
        for prompt in ("A tale of a fox. " * 8, "Of a wolf, another one. " * 8):
            asking = asyncio.create_task(
                before.completions.create(
                    model=MODEL,
                    prompt=prompt,
                    max_tokens=4,
                    stream=True,
                    extra_body={"stream_options": {"resumable": True}},
                )
            )
            taking = {asyncio.create_task(gateway.taken()): gateway for gateway in gateways.values()}
            (taken,), (left,) = await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
            left.cancel()
            gateway, request = taking[taken], taken.result()
            gateway.bring(request, "one ")
            stream = await asking
            begun = await anext(stream)
            await stream.close()
            gateway.answer(request, "two ", "three")
            rest = await after.get(
                f"/completions/{begun.id}",
                cast_to=Completion,
                options={"params": {"stream": "true", "starting_after": "0"}},
                stream=True,
                stream_cls=AsyncStream[Completion],
            )
            texts = [chunk.choices[0].text async for chunk in rest if chunk.choices]
            assert (begun.choices[0].text, "".join(texts)) == ("one ", "two three")
            owners.add(tag_in(begun.id))
            await after.delete(f"/completions/{begun.id}", cast_to=object)
            with pytest.raises(NotFoundError):
                await before.get(f"/completions/{begun.id}", cast_to=Completion)
    assert owners == gateways.keys()
