"""Every bound of every field: its edges reach the engine, the next value is refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning.request import Request
from penstock.gateway.errors import ApiError
from penstock.gateway.limits import Limits
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, check_chat, check_completion
from penstock.gateway.wire.strict import read
from tests.gateway.harness import Gateway, chat_body, client, completion_body, make_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: chat_body(), COMPLETIONS: completion_body()}
INT64 = 2**63
NO_NUMBERS = ['"1"', "true", "[1]", "{}"]
TOKENIZER = make_tokenizer()


class Range(NamedTuple):
    field: str
    lowest: float
    highest: float
    below: float
    above: float


RANGES = [
    Range("temperature", 0, 100, -1e-9, 100.0001),
    Range("top_p", 1e-9, 1, -1e-9, 1.000001),
    Range("min_p", 0, 1, -1e-9, 1.000001),
    Range("presence_penalty", -2, 2, -2.000001, 2.000001),
    Range("frequency_penalty", -2, 2, -2.000001, 2.000001),
    Range("repetition_penalty", 0.01, 100, 0.009999, 100.0001),
    Range("top_k", 0, INT64 - 1, -2, INT64),
    Range("seed", -INT64, INT64 - 1, -INT64 - 1, INT64),
    Range("n", 1, 128, 0, 129),
    Range("min_tokens", 0, 8, -1, 9),
    Range("max_tokens", 8, 506, 0, 510),
]
ON_BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "text"])
EVERY_RANGE = pytest.mark.parametrize("range_", RANGES, ids=lambda found: found.field)


async def accepted(path: str, body: dict[str, Any]) -> Request:
    """The request that the engine gets."""
    gateway = Gateway(tokenizer=TOKENIZER)
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post(path, json=body))
        request = await gateway.taken()
        gateway.answer(request, "ok")
        assert (await asking).status_code == 200
    return request


async def params_of_refusals(path: str, *contents: str) -> list[str | None]:
    """Returns the field that each of these bodies is refused for."""
    headers = {"content-type": "application/json"}
    async with client(Gateway(tokenizer=TOKENIZER).app) as http:
        answers = [await asyncio.wait_for(http.post(path, content=c, headers=headers), 10) for c in contents]
    assert {answer.status_code for answer in answers} == {400}
    errors = [answer.json()["error"] for answer in answers]
    assert {error["type"] for error in errors} == {"invalid_request_error"}
    return [error["param"] for error in errors]


@pytest.mark.anyio
@ON_BOTH
@EVERY_RANGE
async def test_the_edges_reach_the_engine(path: str, range_: Range) -> None:
    for value in (range_.lowest, range_.highest):
        request = await accepted(path, {**BODIES[path], "max_tokens": 8, range_.field: value})
        found = request.n if range_.field == "n" else getattr(request.sampling, range_.field)
        assert found == value


@pytest.mark.anyio
@ON_BOTH
@EVERY_RANGE
async def test_beyond_the_edges_is_a_400_that_names_the_field(path: str, range_: Range) -> None:
    body = {**BODIES[path], "max_tokens": 8}
    contents = [json.dumps({**body, range_.field: value}) for value in (range_.below, range_.above)]
    assert await params_of_refusals(path, *contents) == [range_.field] * 2


@pytest.mark.anyio
@ON_BOTH
@EVERY_RANGE
async def test_what_is_no_number_is_a_400_that_names_the_field(path: str, range_: Range) -> None:
    start = json.dumps(BODIES[path])[:-1]
    contents = [f'{start}, "{range_.field}": {spelt}}}' for spelt in NO_NUMBERS]
    assert await params_of_refusals(path, *contents) == [range_.field] * len(NO_NUMBERS)


@pytest.mark.anyio
@ON_BOTH
@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "01"])
async def test_what_no_float_holds_is_no_json(path: str, number: str) -> None:
    assert await params_of_refusals(path, json.dumps(BODIES[path])[:-1] + f', "seed": {number}}}') == [None]


@pytest.mark.anyio
@ON_BOTH
@pytest.mark.parametrize("field", ["top_k", "seed", "n", "min_tokens", "max_tokens"])
async def test_half_a_thing_cannot_be_counted(path: str, field: str) -> None:
    assert await params_of_refusals(path, json.dumps({**BODIES[path], field: 1.5})) == [field]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "fields", "too_many", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 20}, {"top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 0}, {"top_logprobs": -1}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": 20}, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": 0}, {"logprobs": -1}, "logprobs"),
        (CHAT, {"logit_bias": {"7": 100}}, {"logit_bias": {"7": 100.1}}, "logit_bias.7"),
        (CHAT, {"logit_bias": {"7": -100}}, {"logit_bias": {"7": -100.1}}, "logit_bias.7"),
        (CHAT, {"repetition_penalty": 0.01}, {"repetition_penalty": 1e-38}, "repetition_penalty"),
        (CHAT, {"repetition_penalty": 0.01}, {"repetition_penalty": 0}, "repetition_penalty"),
        (CHAT, {"repetition_penalty": 100}, {"repetition_penalty": 1e38}, "repetition_penalty"),
        (CHAT, {"logit_bias": {"260": 1}}, {"logit_bias": {"261": 1}}, "logit_bias"),
        (CHAT, {"stop_token_ids": [260]}, {"stop_token_ids": [261]}, "stop_token_ids"),
        (CHAT, {"stop_token_ids": [1] * 64}, {"stop_token_ids": [1] * 65}, "stop_token_ids"),
        (CHAT, {"stop": ["x" * 256] * 16}, {"stop": ["x" * 256] * 17}, "stop"),
        (CHAT, {"stop": "é" * 256}, {"stop": "é" * 257}, "stop"),
        (COMPLETIONS, {"prompt": [260]}, {"prompt": [261]}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 503}, {"prompt": "x" * 504}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 506}, {"max_completion_tokens": 507}, "max_completion_tokens"),
    ],
)
async def test_the_last_that_is_taken_and_the_first_that_is_not(
    path: str, fields: dict[str, Any], too_many: dict[str, Any], param: str
) -> None:
    body = BODIES[path] if "max_completion_tokens" in fields else {**BODIES[path], "max_tokens": 8}
    await accepted(path, {**body, **fields})
    assert await params_of_refusals(path, json.dumps({**body, **fields, **too_many})) == [param]


@pytest.mark.anyio
async def test_top_k_of_minus_one_is_off() -> None:
    assert (await accepted(CHAT, chat_body(top_k=-1))).sampling.top_k == 0


@pytest.mark.anyio
@ON_BOTH
@EVERY_RANGE
async def test_null_is_the_default(path: str, range_: Range) -> None:
    silent = await accepted(path, BODIES[path])
    null = await accepted(path, {**BODIES[path], range_.field: None})
    if range_.field != "seed":
        expected = silent.n if range_.field == "n" else getattr(silent.sampling, range_.field)
        assert expected == (null.n if range_.field == "n" else getattr(null.sampling, range_.field))
    else:
        assert silent.sampling.seed != null.sampling.seed, "who asks for no seed gets a new one each time"


KEYS = st.sampled_from(["a", "7", "role", "content", "type", "text", "include_usage"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(-3, 3)
    | st.sampled_from(["", "user", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def is_in(param: str, body: object, *, but_last: bool) -> bool:
    """Whether a path leads somewhere in the body, or to the object that lacks its last step."""
    steps = re.findall(r"[^.\[\]]+", param)
    for number, step in enumerate(steps, start=1):
        if isinstance(body, list) and int(step) < len(body):
            body = body[int(step)]
        elif isinstance(body, dict) and step in body:
            body = body[step]
        else:
            return but_last and isinstance(body, dict) and number == len(steps)
    return bool(steps)


def refusal_of(kind: type[ChatBody | CompletionBody], values: dict[str, Any]) -> ApiError | None:
    try:
        body = read(kind, values, Limits())
        if isinstance(body, ChatBody):
            check_chat(body, Limits())
        else:
            check_completion(body, Limits())
    except ApiError as error:
        return error
    return None


KINDS: list[type[ChatBody | CompletionBody]] = [ChatBody, CompletionBody]
FIELDS = sorted({field for kind in KINDS for field in (*kind.model_fields, *kind.NOT_SUPPORTED)})


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.booleans())
def test_a_refusal_names_something_that_was_sent(
    kind: type[ChatBody | CompletionBody], fields: dict[str, Any], complete: bool
) -> None:
    whole = (chat_body() if kind is ChatBody else completion_body()) if complete else {}
    values = {**whole, **fields}
    error = refusal_of(kind, values)
    if error is not None:
        is_missing = error.code == "missing_required_parameter"
        assert error.status == 400
        assert is_in(error.param or "", values, but_last=is_missing), error.message
