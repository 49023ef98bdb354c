"""llama.cpp's API, as its editors and its page use it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tokenizers

from penstock.engine.planning.request import FinishReason
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Tenant
from tests.gateway.harness import (
    MODEL,
    TEMPLATE,
    Gateway,
    chat_body,
    client,
    events,
    logprobs,
    make_tokenizer,
    settled,
    tokenizer_json,
)

pytestmark = pytest.mark.anyio

FIM = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
# What llama.vim sends.
VIM = {
    "id_slot": 0,
    "input_prefix": "a\n",
    "input_suffix": "z\n",
    "input_extra": [],
    "prompt": "b",
    "n_predict": 9,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "no/such"],
}


def with_fim(*more: str) -> Gateway:
    made = tokenizers.Tokenizer.from_str(tokenizer_json())
    made.add_special_tokens([*FIM, *more])
    return Gateway(tokenizer=Tokenizer(made.to_str(), {"bos_token": "<|bos|>"}, TEMPLATE))


async def asked(gateway: Gateway, path: str, body: dict[str, Any], *texts: str) -> Any:
    async with client(gateway.app) as http:
        return await gateway.answering(http.post(path, json=body), *texts)


async def test_a_completion() -> None:
    reply = await asked(Gateway(), "/completion", {"prompt": "<|user|>Hi", "n_predict": 9}, "Hel", "lo\n")
    found = reply.json()
    assert (found["content"], found["stop"], found["stop_type"], found["stopping_word"]) == (
        "Hello\n", True, "eos", "",
    )  # fmt: skip
    assert (found["model"], found["prompt"], found["tokens"], found["has_new_line"]) == (
        MODEL, "<|user|>Hi", [], True,
    )  # fmt: skip
    # Beginning of text, the user's mark and two letters, of which the cache had 4 (see make_timings).
    assert (found["tokens_evaluated"], found["tokens_cached"], found["tokens_predicted"]) == (4, 4, 2)
    assert found["generation_settings"]["n_predict"] == 9
    timings = found["timings"]
    assert (timings["predicted_n"], timings["predicted_ms"], timings["predicted_per_second"]) == (2, 40, 50)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({}, "max_tokens", 508),
        ({"n_predict": -1}, "max_tokens", 508),
        ({"n_predict": 9000}, "max_tokens", 508),
        ({"n_predict": 0}, "max_tokens", 0),
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"logit_bias": [[7, 1.5], [8, False]]}, "logit_bias", {7: 1.5, 8: -100.0}),
        ({"logit_bias": {"7": 1.5}}, "logit_bias", {7: 1.5}),
        ({"n_probs": 3}, "num_logprobs", 3),
        ({"n_probs": 0}, "num_logprobs", None),
        ({"seed": 7}, "seed", 7),
    ],
)
async def test_what_a_completion_asks_for(fields: dict[str, Any], name: str, value: object) -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/completion", json={"prompt": "abc", **fields}))
        request = await gateway.taken()
        assert getattr(request.sampling, name) == value
        gateway.answer(request, "x")
        assert (await asking).status_code == 200


async def test_a_stream() -> None:
    reply = await asked(Gateway(), "/completion", {"prompt": "Hi", "stream": True}, "a", "b", "c")
    parts = events(reply.text)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "".join(part["content"] for part in parts) == "abc"
    assert [part["stop"] for part in parts] == [*[False] * (len(parts) - 1), True]
    assert parts[-1]["tokens_predicted"] == 3


async def test_a_stream_that_fails_ends_with_the_error() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/completion", json={"prompt": "Hi", "stream": True}))
        request = await gateway.taken()
        gateway.bring(request, "a")
        await settled()
        gateway.finish(request, reason=FinishReason.FAILED, error="logits were not finite")
        said, error = events((await asking).text)
    assert (said["content"], said["stop"], error["error"]["code"]) == ("a", False, "internal_error")


async def test_the_choices_of_a_stream_end_one_by_one() -> None:
    body = {"prompt": "Hi", "stream": True, "n_cmpl": 2, "n_probs": 1}
    parts = events((await asked(Gateway(), "/completion", body, "a", "b")).text)
    ends = [part for part in parts if part["stop"]]
    assert [end["index"] for end in ends] == [0, 1]
    for index in (0, 1):
        assert "".join(part["content"] for part in parts if part["index"] == index) == "ab"


async def test_several_answers_are_a_list() -> None:
    found = (await asked(Gateway(), "/completion", {"prompt": "Hi", "n_cmpl": 2}, "a")).json()
    assert [(each["index"], each["content"]) for each in found] == [(0, "a"), (1, "a")]


async def test_probabilities_tokens_and_stop_words() -> None:
    gateway = Gateway()
    body = {"prompt": "Hi", "n_probs": 1, "return_tokens": True, "stop": ["!"]}
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/completion", json=body))
        request = await gateway.taken()
        gateway.finish(request, "a", logprobs=[logprobs((7, -0.5), (8, -1.0))], stop="!")
        found = (await asking).json()
    (probability,) = found["completion_probabilities"]
    assert (probability["id"], probability["logprob"]) == (7, -0.5)
    assert [one["id"] for one in probability["top_logprobs"]] == [7]
    assert (found["tokens"], found["stop_type"], found["stopping_word"]) == ([7], "word", "!")


async def test_a_limit() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/completion", json={"prompt": "Hi"}))
        gateway.finish(await gateway.taken(), "a", reason=FinishReason.LENGTH)
        assert (await asking).json()["stop_type"] == "limit"


# Fill in the middle


@pytest.mark.parametrize(
    ("more", "extra", "prompt"),
    [
        ([], [], "<|fim_prefix|>a\n<|fim_suffix|>z\n<|fim_middle|>b"),
        (
            [],
            [{"filename": "f.py", "text": "F"}],
            "f.py\nF\n<|fim_prefix|>a\n<|fim_suffix|>z\n<|fim_middle|>b",
        ),
        (
            ["<|file_sep|>"],
            [{"filename": "f.py", "text": "F"}],
            "<|file_sep|>f.py\nF\n<|file_sep|>filename\n<|fim_prefix|>a\n<|fim_suffix|>z\n<|fim_middle|>b",
        ),
    ],
)
async def test_the_middle_is_asked_for(more: list[str], extra: list[Any], prompt: str) -> None:
    gateway = with_fim(*more)
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/infill", json={**VIM, "input_extra": extra}))
        request = await gateway.taken()
        assert gateway.prompt_of(request) == prompt
        assert (request.sampling.top_p, request.sampling.temperature) == (0.9, 1)
        gateway.answer(request, "m")
        reply = await asking
    assert reply.json() == {
        "content": "m", "timings/prompt_n": request.num_prompt_tokens - 4, "timings/predicted_ms": 40.0,
        "truncated": False,
    }  # fmt: skip
    told = reply.headers["x-penstock-ignored"].split(", ")
    assert told == ["cache_prompt", "n_indent", "t_max_predict_ms", "t_max_prompt_ms"]


async def test_what_only_warms_the_cache_generates_nothing() -> None:
    gateway = with_fim()
    body = {**VIM, "n_predict": 0, "samplers": [], "response_fields": [""], "t_max_predict_ms": 1}
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/infill", json=body))
        request = await gateway.taken()
        assert request.sampling.max_tokens == 0
        gateway.finish(request, reason=FinishReason.LENGTH, token_ids=[])
        assert (await asking).json() == {}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/infill", VIM, "input_suffix"),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {**VIM, "input_extra": [{"filename": "f"}]}, "input_extra[0].text"),
        ("/infill", {**VIM, "input_prefix": "a" * 10_000}, "input_prefix"),
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": "x" * 600}, "prompt"),
        ("/completion", {"prompt": "Hi", "model": "another"}, "model"),
        ("/completion", {"prompt": "Hi", "dry_multiplier": 0.8}, "dry_multiplier"),
        ("/completion", {"prompt": "Hi", "logit_bias": [["Hi", 1]]}, "logit_bias[0]"),
        ("/completion", {"prompt": "Hi", "use_beam_search": True}, "use_beam_search"),
        ("/completion", {"prompt": "Hi", "lora": [{"id": 0, "scale": 1}]}, "lora"),
        ("/apply-template", {}, "messages"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "content"),
    ],
)
async def test_what_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    async with client(Gateway().app) as http:
        reply = await http.post(path, json=fields)
    assert reply.status_code == (404 if param == "model" else 400)
    assert reply.json()["error"]["param"] == param


# Templates and tokens


async def test_a_template_and_its_tokens_come_round() -> None:
    """What llama.vscode does to count a prompt, and what others do to complete one."""
    gateway = Gateway()
    async with client(gateway.app) as http:
        body = {"messages": chat_body("Hi")["messages"]}
        prompt = (await http.post("/apply-template", json=body)).json()["prompt"]
        assert prompt == "<|user|>Hi<|end|><|assistant|>"
        counted = (await http.post("/tokenize", json={"content": prompt})).json()["tokens"]
        asking = asyncio.create_task(http.post("/completion", json={"prompt": prompt}))
        request = await gateway.taken()
        assert list(request.prompt_token_ids) == [0, *counted]
        gateway.answer(request, "x")
        await asking


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, [3, 44]),
        ({"add_special": True}, [0, 3, 44]),
        ({"with_pieces": True}, [{"id": 3, "piece": "<|user|>"}, {"id": 44, "piece": "H"}]),
    ],
)
async def test_tokens_of_a_content(fields: dict[str, Any], tokens: object) -> None:
    expected = make_tokenizer().encode("<|user|>H", parse_special=True)
    assert expected == [3, 44]
    async with client(Gateway().app) as http:
        reply = await http.post("/tokenize", json={"content": "<|user|>H", **fields})
        assert reply.json() == {"tokens": tokens}


async def test_pieces_that_are_no_text_are_bytes_and_marks_may_be_text() -> None:
    async with client(Gateway().app) as http:
        reply = await http.post("/tokenize", json={"content": "é", "with_pieces": True})
        assert [token["piece"] for token in reply.json()["tokens"]] == [[195], [169]]
        plain = await http.post("/tokenize", json={"content": "<|user|>", "parse_special": False})
        assert len(plain.json()["tokens"]) == len("<|user|>")
        back = await http.post("/detokenize", json={"tokens": plain.json()["tokens"]})
        assert back.json()["prompt"] == "<|user|>"


# The server


async def test_props() -> None:
    async with client(Gateway().app) as http:
        found = (await http.get("/props?model=x")).json()
        assert (await http.post("/props", json={})).status_code == 405
    assert found["default_generation_settings"]["n_ctx"] == 512
    assert (found["total_slots"], found["model_alias"], found["bos_token"]) == (8, MODEL, "<|bos|>")
    assert found["chat_template"] == TEMPLATE


async def test_slots_are_the_callers_own_or_the_operators() -> None:
    clients = {
        digest_of(name): Client(Tenant(name=name), is_operator=name == "boss")
        for name in ("ann", "bob", "boss")
    }
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=clients))
    async with client(gateway.app) as http:

        def key(name: str) -> dict[str, str]:
            return {"authorization": f"Bearer {name}"}

        asking = asyncio.create_task(http.post("/completion", json={"prompt": "Hi"}, headers=key("ann")))
        request = await gateway.taken()
        busy = {}
        for name in clients.values():
            slots = (await http.get("/slots", headers=key(name.tenant.name))).json()
            assert len(slots) == 8
            busy[name.tenant.name] = [slot for slot in slots if slot["is_processing"]]
        assert [len(slots) for slots in busy.values()] == [1, 0, 1]
        assert busy["ann"][0]["n_prompt_tokens"] == request.num_prompt_tokens
        info = [(await http.get("/server_info", headers=key(name))).status_code for name in ("ann", "boss")]
        assert info == [403, 200]
        gateway.answer(request, "x")
        await asking


async def test_a_ping_is_a_health_check() -> None:
    async with client(Gateway().app) as http:
        reply = await http.get("/ping")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
