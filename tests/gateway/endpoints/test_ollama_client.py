"""The real ollama package against a real port."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest

from penstock.engine.planning.request import FinishReason
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.service import ServiceOptions
from tests.gateway.endpoints.test_anthropic_client import CALL, TOOL_TEMPLATE
from tests.gateway.endpoints.test_open_model_fields import with_fim
from tests.gateway.harness import MODEL, Gateway, client, logprobs, make_tokenizer, serving

pytestmark = pytest.mark.anyio

HI: Any = [{"role": "user", "content": "Hi"}]


@contextlib.asynccontextmanager
async def connected(gateway: Gateway) -> AsyncIterator[Any]:
    async with serving(gateway.app) as url, ollama.AsyncClient(url, verify=False) as api:
        yield api


async def test_a_chat_in_one_piece() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        reply = await gateway.answering(api.chat(model=MODEL, messages=HI), "Hel", "lo")
    assert (reply.model, reply.message.role, reply.message.content) == (MODEL, "assistant", "Hello")
    assert (reply.done, reply.done_reason, reply.eval_count) == (True, "stop", 2)
    assert reply.created_at.endswith("Z")
    # As harness.make_timings has it: queued for 10 ms, the first token after 30, the last after 70.
    assert (reply.load_duration, reply.prompt_eval_duration) == (10_000_000, 20_000_000)
    assert (reply.eval_duration, reply.total_duration) == (40_000_000, 70_000_000)


async def test_a_streamed_chat_arrives_line_by_line() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.chat(model=f"{MODEL}:latest", messages=HI, stream=True))
        stream = aiter(await asking)
        first = asyncio.ensure_future(anext(stream))
        request = await gateway.taken()
        gateway.bring(request, "Hel")
        parts = [await first]
        gateway.bring(request, "lo\u2028\x85")
        parts.append(await anext(stream))  # it is there before the next step is
        gateway.finish(request, "!", reason=FinishReason.LENGTH)
        parts += [part async for part in stream]
    assert "".join(part.message.content for part in parts) == "Hello\u2028\x85!"
    assert [part.done for part in parts] == [False, False, False, True]
    assert (parts[-1].done_reason, parts[-1].prompt_eval_count) == ("length", len(request.prompt_token_ids))


async def test_it_is_streamed_unless_it_says_no() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.ensure_future(http.post("/api/chat", json={"model": MODEL, "messages": HI}))
        gateway.answer(await gateway.taken(), "a", "b")
        reply = await asking
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "ab"


async def test_a_prompt_is_a_turn_unless_it_is_raw() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.generate(model=MODEL, prompt="Hi", system="Be brief."))
        request = await gateway.taken()
        gateway.answer(request, "Hel", "lo")
        assert (await asking).response == "Hello"
        assert gateway.prompt_of(request) == (
            "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
        )
        stream = await api.generate(model=MODEL, prompt="Once", raw=True, stream=True)
        reading = asyncio.ensure_future(_texts(stream))
        request = await gateway.taken()
        assert gateway.prompt_of(request) == "<|bos|>Once"
        gateway.answer(request, " upon", " a")
        assert "".join(await reading) == " upon a"


async def _texts(stream: Any) -> list[str]:
    return [part.response async for part in stream]


async def test_nothing_asked_is_nothing_said() -> None:
    """Clients load a model that way."""
    async with connected(Gateway()) as api:
        loaded = await api.generate(model=MODEL)
        assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")
        assert (await api.chat(model=MODEL, messages=[])).message.content == ""


async def test_options_reach_the_engine() -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "seed": 7,
        "num_predict": 9,
        "stop": ["x", "y"],
        "num_ctx": 4096,
        "num_thread": 2,
    }
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.chat(model=MODEL, messages=HI, options=options, keep_alive="5m"))
        request = await gateway.taken()
        gateway.answer(request, "ok")
        await asking
        unbounded = asyncio.ensure_future(api.chat(model=MODEL, messages=HI, options={"num_predict": -1}))
        whole = await gateway.taken()
        gateway.answer(whole, "ok")
        await unbounded
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (params.seed, params.max_tokens, params.stop) == (7, 9, ("x", "y"))
    assert whole.sampling.max_tokens == 512 - len(whole.prompt_token_ids)


async def test_a_stream_that_waits_says_so() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), timeouts=Timeouts(tick_s=3600)))
    async with connected(gateway) as api:
        stream = aiter(await api.generate(model=MODEL, prompt="Hi", stream=True))
        reading = asyncio.ensure_future(anext(stream))
        await gateway.queued()
        gateway.clock.now += 2
        gateway.service.tick(gateway.clock.now)  # the status is out
        gateway.clock.now += 6
        gateway.service.tick(gateway.clock.now)
        assert ((await reading).response, (await reading).done) == ("", False)
        gateway.finish(await gateway.taken(), "a")
        assert [part.response async for part in stream] == ["a", ""]


async def test_errors_are_the_clients_own() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        with pytest.raises(ollama.ResponseError, match="'other' does not exist") as unknown:
            await api.chat(model="other", messages=HI)
        assert unknown.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="mirostat") as wrong:
            await api.chat(model=MODEL, messages=HI, options={"mirostat": 2})
        assert wrong.value.status_code == 400
        with pytest.raises(ollama.ResponseError, match="images"):
            await api.chat(model=MODEL, messages=[{**HI[0], "images": [b"x"]}])
        stream = await api.chat(model=MODEL, messages=HI, stream=True)
        reading = asyncio.ensure_future(anext(aiter(stream)))
        request = await gateway.taken()
        gateway.bring(request, "x")
        await reading
        gateway.finish(request, reason=FinishReason.FAILED, error="logits were not finite")
        with pytest.raises(ollama.ResponseError, match="logits were not finite"):
            async for _ in stream:
                pass


async def test_tools_and_thoughts() -> None:
    gateway = Gateway(tokenizer=make_tokenizer(TOOL_TEMPLATE))
    function = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
    messages: Any = [
        *HI,
        {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": {"zone": "UTC"}}}]},
        {"role": "tool", "tool_name": "clock", "content": "Noon."},
    ]
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(
            api.chat(
                model=MODEL, messages=messages, tools=[{"type": "function", "function": function}], think=True
            )
        )
        request = await gateway.taken()
        gateway.answer(request, "<think>Hm.</think>", "Well.", CALL)
        message = (await asking).message
        shown = await api.show(MODEL)
    assert gateway.prompt_of(request).partition("<|user|>")[2] == (
        "Hi<|end|><|assistant|>[call_1_0UTC]<|end|><|tool|>Noon.call_1_0<|end|><|assistant|><think></think>"
    )
    assert (message.thinking, message.content) == ("Hm.", "Well.")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("clock", {"zone": "UTC"})
    ]
    assert shown.capabilities == ["completion", "tools", "thinking"]


async def test_the_model() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL, "org/alias"), created=7, num_bytes=9))
    async with connected(gateway) as api:
        listed, loaded = await api.list(), await api.ps()
        shown = await api.show(f"{MODEL}:latest")
    assert [model.model for model in listed.models] == [MODEL, "org/alias"]
    assert listed.models[0].modified_at.timestamp() == 7
    assert (listed.models[0].size, loaded.models[0].size, loaded.models[0].size_vram) == (9, 9, 9)
    assert loaded.models[0].context_length == 512
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo["penstock.context_length"] == 512
    async with client(gateway.app) as http:
        assert (await http.get("/api/version")).json()["version"].count(".") == 2


async def test_embeddings() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(
            api.embed(model=f"{MODEL}:latest", input=["Hi", "there"], dimensions=2)
        )
        for request in (first := await gateway.taken(), await gateway.taken()):
            vector = [3.0, 4.0, 9.0] if request is first else [0.0, 2.0, 0.0]
            gateway.finish(request, reason=FinishReason.LENGTH, token_ids=[], embedding=vector)
        reply = await asking
        assert [list(one) for one in reply.embeddings] == [pytest.approx([0.6, 0.8]), [0.0, 1.0]]
        assert (reply.model, reply.prompt_eval_count) == (MODEL, 3 + 6)
        assert (reply.load_duration, reply.total_duration) == (10_000_000, 70_000_000)
        older = asyncio.ensure_future(api.embeddings(model=MODEL, prompt="Hi"))
        request = await gateway.taken()
        assert gateway.prompt_of(request) == "<|bos|>Hi"
        gateway.finish(request, reason=FinishReason.LENGTH, token_ids=[], embedding=[3.0, 4.0])
        assert list((await older).embedding) == [3.0, 4.0], "as the model has it"
        assert (await api.embed(model=MODEL, input=[])).embeddings == []
        assert (await api.embeddings(model=MODEL)).embedding == []


async def test_what_is_too_long_to_embed_loses_its_end() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.embed(model=MODEL, input="ab" * 100_000))
        request = await gateway.taken()
        assert gateway.prompt_of(request) == "<|bos|>" + "ab" * 255
        gateway.finish(request, reason=FinishReason.LENGTH, token_ids=[], embedding=[1.0])
        await asking
        with pytest.raises(ollama.ResponseError, match="maximum context length"):
            await api.embed(model=MODEL, input="ab" * 300, truncate=False)


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/api/embed", {"input": 1}, 400),
        ("/api/embed", {"input": ["a", 1]}, 400),
        ("/api/embed", {"input": ["a"] * 1025}, 400),
        ("/api/embed", {"input": ["a", ""], "add": 1}, 400),
        ("/api/embed", {"input": "a", "dimensions": -1}, 400),
        ("/api/embed", {"input": "a", "model": "other"}, 404),
        ("/api/embed", {"input": [], "model": "other"}, 404),
        ("/api/embeddings", {"prompt": ["a"]}, 400),
        ("/api/embeddings", {"prompt": "a", "think": True}, 400),
        ("/api/embeddings", {"prompt": "a" * 5, "model": "other"}, 404),
    ],
)
async def test_embeddings_that_are_refused(path: str, fields: dict[str, Any], status: int) -> None:
    async with client(Gateway().app) as http:
        reply = await http.post(path, json={"model": MODEL, **fields})
    assert reply.status_code == status
    assert reply.json().keys() == {"error"}


@pytest.mark.parametrize(
    ("told", "status"), [({}, 200), ({"origin": "null"}, 415), ({"sec-fetch-site": "none"}, 415)]
)
async def test_a_program_need_not_say_that_it_sends_json_and_a_page_must(
    told: dict[str, str], status: int
) -> None:
    content = json.dumps({"model": MODEL, "messages": []})
    async with client(Gateway().app) as http:
        for media_type in ("application/x-www-form-urlencoded", ""):
            headers = {"content-type": media_type, **told}
            assert (await http.post("/api/chat", content=content, headers=headers)).status_code == status


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
async def test_log_probabilities(is_chat: bool, streamed: bool) -> None:
    gateway = Gateway()
    asked: Any = {"messages": HI} if is_chat else {"prompt": "Hi"}
    async with connected(gateway) as api:
        call = api.chat if is_chat else api.generate
        asking = call(MODEL, **asked, stream=streamed, logprobs=True, top_logprobs=1)
        lines = asyncio.ensure_future(_lines(asking, streamed=streamed))
        request = await gateway.taken()
        assert request.sampling.num_logprobs == 1
        a, b = gateway.service.tokenizer.encode("ab")
        gateway.bring(request, "a", token_ids=[a], logprobs=[logprobs((a, -0.5), (9, -2.0))])
        gateway.finish(request, "b", token_ids=[b], logprobs=[logprobs((b, -0.5), (9, -2.0))])
        found = await lines
    told = [one for line in found for one in line.logprobs or ()]
    assert [(one.token, one.logprob) for one in told] == [("a", -0.5), ("b", -0.5)]
    assert [[top.token for top in one.top_logprobs] for one in told] == [["a"], ["b"]]
    assert "".join(line.message.content if is_chat else line.response for line in found) == "ab"


async def _lines(asking: Any, *, streamed: bool) -> list[Any]:
    reply = await asking
    return [line async for line in reply] if streamed else [reply]


async def test_what_is_between_two_texts() -> None:
    names = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    gateway = Gateway(tokenizer=with_fim(*names))
    async with connected(gateway) as api:
        asking = asyncio.ensure_future(api.generate(MODEL, "a", suffix="z"))
        request = await gateway.taken()
        assert gateway.prompt_of(request) == "<|fim_prefix|>a<|fim_suffix|>z<|fim_middle|>"
        gateway.answer(request, "m")
        assert (await asking).response == "m"


async def test_the_default_of_repeat_last_n_is_taken_and_named() -> None:
    gateway = Gateway()
    body = {"model": MODEL, "messages": HI, "stream": False, "options": {"repeat_last_n": 64}}
    async with client(gateway.app) as http:
        reply = await gateway.answering(http.post("/api/chat", json=body), "Hello")
    assert (reply.status_code, reply.headers["x-penstock-ignored"]) == (200, "options.repeat_last_n")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_context_is_the_conversation_so_far(streamed: bool) -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        context: Any = None
        said = ""
        for prompt, answer in (("Hi", "Hello"), ("And?", "No.")):
            asking = api.generate(MODEL, prompt, context=context, stream=streamed)
            lines = asyncio.ensure_future(_lines(asking, streamed=streamed))
            request = await gateway.taken()
            begin = "" if context else "<|bos|>"
            said += f"{begin}<|user|>{prompt}<|end|><|assistant|>"
            assert gateway.prompt_of(request) == said
            for text in answer:
                gateway.bring(request, text, token_ids=gateway.service.tokenizer.encode(text))
            gateway.finish(request, token_ids=gateway.service.tokenizer.encode("<|end|>", parse_special=True))
            context = (await lines)[-1].context
            said += f"{answer}<|end|>"
            assert gateway.service.tokenizer.decode(context, skip_special=False) == said
        for fields in ({"context": [10**6]}, {"context": [9], "raw": True}):
            with pytest.raises(ollama.ResponseError, match="context") as wrong:
                await api.generate(MODEL, "Hi", **fields)
            assert wrong.value.status_code == 400
