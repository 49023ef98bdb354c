"""Beam search on the wire: what the engine is asked, what is shown of what it found, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.engine.planning.params import BeamParams
from penstock.engine.planning.request import FinishReason, Request
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from penstock.gateway.wire.sampling import SamplingDefaults
from tests.gateway.endpoints.test_open_model_fields import replied
from tests.gateway.harness import EOS, MODEL, Gateway, chat_body, completion_body, logprobs

pytestmark = pytest.mark.anyio


def gateway(**options: Any) -> Gateway:
    return Gateway(ServiceOptions(models=(MODEL,), eos_token_ids=(EOS,), **options))


async def searched(at: Gateway, body: dict[str, Any], *texts: str) -> tuple[Request, dict[str, Any]]:
    """Returns the engine's request, and the reply if the engine finds these answers."""
    asking = asyncio.create_task(replied(at, body))
    taken = asyncio.create_task(at.taken())
    await asyncio.wait([asking, taken], return_when=asyncio.FIRST_COMPLETED)
    assert taken.done(), (await asking).text
    request = taken.result()
    for index, text in enumerate(texts):
        told = [logprobs((70, -1.0 - index % 2))] if request.sampling.num_logprobs is not None else None
        at.finish(request, text, index, reason=FinishReason.LENGTH, token_ids=[70], logprobs=told)
    reply = await asking
    assert reply.status_code == 200, reply.text
    return request, reply.json()


@pytest.mark.parametrize("make", [completion_body, chat_body])
async def test_the_first_n_of_best_of_beams_are_shown_and_all_are_counted(make: Any) -> None:
    body = make(
        use_beam_search=True, best_of=4, n=2, max_tokens=3, length_penalty=0.5, early_stopping="never"
    )
    request, reply = await searched(gateway(), body, "a", "b", "c", "d")
    assert request.n == 4
    assert request.beams == BeamParams(
        length_penalty=0.5, early_stopping="never", end_token_ids=frozenset({EOS})
    )
    assert request.sampling.num_logprobs is None
    shown = [choice.get("text") or choice["message"]["content"] for choice in reply["choices"]]
    assert shown == ["a", "b"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in reply["choices"]] == [None, None]
    assert reply["usage"]["completion_tokens"] == 4


async def test_they_stay_in_order_whatever_their_log_probabilities_are() -> None:
    """A length penalty may have put one first whose sum is smaller."""
    body = completion_body(["Hi"], use_beam_search=True, best_of=3, n=2, logprobs=1, max_tokens=3)
    request, reply = await searched(gateway(), body, "a", "b", "c")
    assert request.sampling.num_logprobs == 1
    assert [choice["text"] for choice in reply["choices"]] == ["a", "b"]
    assert [choice["logprobs"]["token_logprobs"] for choice in reply["choices"]] == [[-1.0], [-2.0]]


async def test_n_alone_is_the_number_of_beams() -> None:
    request, reply = await searched(gateway(), chat_body(use_beam_search=True, n=2), "a", "b")
    assert request.n == len(reply["choices"]) == 2
    assert request.beams == BeamParams(end_token_ids=frozenset({EOS}))


async def test_what_ends_an_answer() -> None:
    body = completion_body(
        "Hi", use_beam_search=True, n=2, stop_token_ids=[9, 8], ignore_eos=True, temperature=0
    )
    request, _ = await searched(gateway(), body, "a", "b")
    assert request.beams is not None
    assert request.beams.end_token_ids == {8, 9}
    assert request.num_logprobs == 4


async def test_the_defaults_of_a_checkpoint_do_not_count() -> None:
    at = gateway(defaults=SamplingDefaults(temperature=0.7, top_p=0.5, repetition_penalty=1.3))
    request, _ = await searched(at, completion_body("Hi", use_beam_search=True), "a")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0, 1, 1)


async def test_an_answer_is_as_long_as_all_beams_have_room_for() -> None:
    """32 blocks of 16 tokens: 15 tokens of a prompt and 7 beams, 4 blocks each."""
    body = {**chat_body("x" * 6, use_beam_search=True, n=7)}
    request, _ = await searched(gateway(), body, *"abcdefg")
    num_prompt = len(request.prompt_token_ids)
    assert num_prompt < 16
    assert request.sampling.max_tokens == 64 - num_prompt
    fits = {**body, "max_tokens": 64 - num_prompt}
    await searched(gateway(), fits, *"abcdefg")
    reply = await replied(gateway(), {**body, "max_tokens": 65 - num_prompt})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")
    assert reply.json()["error"]["code"] == "context_length_exceeded"


SEARCH: dict[str, Any] = {"use_beam_search": True, "n": 2}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (chat_body(**SEARCH, stream=True), "stream"),
        (chat_body(**SEARCH, temperature=0.7), "temperature"),
        (chat_body(**SEARCH, top_p=0.9), "top_p"),
        (chat_body(**SEARCH, top_k=5), "top_k"),
        (chat_body(**SEARCH, min_p=0.1), "min_p"),
        (chat_body(**SEARCH, typical_p=0.5), "typical_p"),
        (chat_body(**SEARCH, top_a=0.5), "top_a"),
        (chat_body(**SEARCH, xtc_probability=0.5), "xtc_probability"),
        (chat_body(**SEARCH, presence_penalty=0.5), "presence_penalty"),
        (chat_body(**SEARCH, frequency_penalty=-0.5), "frequency_penalty"),
        (chat_body(**SEARCH, repetition_penalty=1.1), "repetition_penalty"),
        (chat_body(**SEARCH, logit_bias={"5": 1.0}), "logit_bias"),
        (chat_body(**SEARCH, min_tokens=2), "min_tokens"),
        (chat_body(**SEARCH, stop="x"), "stop"),
        (chat_body(**SEARCH, bad_words=["x"]), "bad_words"),
        (chat_body(**SEARCH, allowed_token_ids=[5]), "allowed_token_ids"),
        (chat_body(**SEARCH, guided_regex="a+"), "guided_regex"),
        (chat_body(**SEARCH, structured_outputs={"regex": "a+"}), "structured_outputs"),
        (chat_body(**SEARCH, response_format={"type": "json_object"}), "response_format"),
        (chat_body(**SEARCH, tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
        (chat_body(use_beam_search=True, best_of=2, n=3), "best_of"),
        (chat_body(use_beam_search=True, n=9), "n"),
        (completion_body("a", use_beam_search=True, best_of=9), "best_of"),
        (completion_body("a", **SEARCH, max_tokens=0, echo=True), "max_tokens"),
        (completion_body("a", **SEARCH, length_penalty=11), "length_penalty"),
        (completion_body("a", **SEARCH, early_stopping="always"), "early_stopping"),
        (completion_body("a", length_penalty=0.5), "length_penalty"),
        (completion_body("a", early_stopping=True), "early_stopping"),
        (completion_body("a", use_beam_search="yes"), "use_beam_search"),
    ],
)
async def test_what_a_search_has_no_use_for_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    reply = await replied(gateway(), body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(field)


async def test_there_may_be_fewer_beams_than_the_engine_has_seats_for() -> None:
    body = chat_body(use_beam_search=True, n=5)
    reply = await replied(gateway(limits=Limits(max_beams=4)), body)
    assert reply.json()["error"]["param"] == "n"


async def test_what_is_off_may_be_said() -> None:
    body = chat_body(
        **SEARCH,
        stream=False,
        top_p=1,
        top_k=-1,
        min_p=0,
        stop=[],
        tools=[],
        response_format={"type": "text"},
    )
    await searched(gateway(), body, "a", "b")
    off = chat_body(use_beam_search=False, length_penalty=1, early_stopping=False)
    request, _ = await searched(gateway(), off, "a")
    assert request.beams is None


@pytest.mark.parametrize("fields", [{"use_beam_search": True}, {"best_of": 2}])
async def test_such_a_reply_cannot_be_fetched_again(fields: dict[str, Any]) -> None:
    reply = await replied(gateway(), chat_body(**fields), **{"idempotency-key": "k"})
    assert reply.json()["error"]["param"] == next(iter(fields))


async def test_the_best_of_several_chats_is_shown() -> None:
    """Without a search, by the sum of log probabilities."""
    at = gateway()
    asking = asyncio.create_task(replied(at, chat_body(best_of=3)))
    request = await at.taken()
    assert (request.n, request.sampling.num_logprobs) == (3, 0)
    for index, sum_of in enumerate([-3.0, -1.0, -2.0]):
        at.finish(request, f"{index}", index, token_ids=[70], logprobs=[logprobs((70, sum_of))])
    reply = (await asking).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["1"]
    assert reply["choices"][0]["logprobs"] is None
    assert reply["usage"]["completion_tokens"] == 3
