"""What calls of an `LLM` ask the engine for, and what they make of its outputs; no model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.app.build import build_core
from penstock.app.offline.calls import CallOutputs, Deliveries
from penstock.app.offline.requests import Requests, Sampling
from penstock.app.offline.settings import offline_settings
from penstock.engine.engine import EngineState, EngineStats
from penstock.engine.planning.params import Pooling, SamplingParams
from penstock.engine.planning.request import FinishReason, Output, Request
from penstock.gateway.access.keys import OPEN_TENANT
from penstock.gateway.endpoints.requests import salt_of
from penstock.priority.lanes import Lane

CHAT = [{"role": "user", "content": "Hello"}]


def nothing(*_: object) -> None: ...


@pytest.fixture(scope="module")
def requests() -> Requests:
    return Requests(build_core(offline_settings(None, {"device": "cpu"}), nothing, nothing))


def asked(token_ids: tuple[int, ...], sampling: SamplingParams, **more: Any) -> Request:
    return Request(
        request_id="",
        prompt_token_ids=token_ids,
        sampling=sampling,
        tenant=OPEN_TENANT.name,
        salt=salt_of(OPEN_TENANT),
        **more,
    )


def test_a_prompt_is_asked_for_as_it_is_said(requests: Requests) -> None:
    sampling: Sampling = {
        "max_tokens": 3, "temperature": 0.5, "top_p": 0.25, "seed": 1, "n": 2, "logprobs": 4, "service_tier": "flex",
        "logit_bias": {7: 1.5},
    }  # fmt: skip
    params = SamplingParams(
        temperature=0.5, top_p=0.25, seed=1, max_tokens=3, num_logprobs=4, logit_bias={7: 1.5}
    )
    expected = asked((5, 6), params, n=2, lane=Lane.BATCH)
    assert requests.of_prompts([5, 6], sampling) == [expected]
    assert requests.of_either([[5, 6], [5, 6]], sampling) == [expected] * 2


@pytest.mark.parametrize(("room", "most"), [(100, 16), (16, 16), (15, 15), (1, 1)])
def test_an_answer_to_a_prompt_has_16_tokens_or_what_there_is_room_for(
    requests: Requests, room: int, most: int
) -> None:
    prompt = [5] * (requests._core.engine.max_sequence_tokens - room)
    (request,) = requests.of_prompts(prompt, {})
    assert (request.sampling.max_tokens, request.n, request.lane) == (most, 1, Lane.STANDARD)


@pytest.mark.parametrize(
    ("sampling", "num_logprobs"),
    [
        ({"logprobs": True, "top_logprobs": 2}, 2),
        ({"logprobs": True}, 0),
        ({"logprobs": False}, None),
        ({}, None),
    ],
)
def test_an_answer_to_a_conversation_may_fill_the_context(
    requests: Requests, sampling: Sampling, num_logprobs: int | None
) -> None:
    (request,) = requests.of_conversations(CHAT, sampling)
    length = len(request.prompt_token_ids)
    assert request.sampling.max_tokens == requests._core.engine.max_sequence_tokens - length
    assert request.sampling.num_logprobs == num_logprobs
    assert requests.of_either(CHAT, {})[0].prompt_token_ids == request.prompt_token_ids
    for name in ("max_tokens", "max_completion_tokens"):
        (request,) = requests.of_either([CHAT], {name: 7})  # type: ignore[misc]
        assert request.sampling.max_tokens == 7


def test_a_text_is_asked_for_its_embedding(requests: Requests) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=0)
    expected = asked((5, 6), params, pooling=Pooling.LAST)
    assert requests.of_texts([5, 6]) == [expected]
    (request,) = requests.of_texts("Hello")
    assert requests.of_prompts("Hello", {})[0].prompt_token_ids == request.prompt_token_ids


@pytest.mark.parametrize("max_num_seqs", [4, 8])
def test_there_are_at_most_as_many_beams_as_sequences_run(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int
) -> None:
    found = EngineStats(num_blocks=64, num_kv_tokens=1024, max_num_seqs=max_num_seqs, block_size=16)
    monkeypatch.setattr(type(requests._core.engine), "stats", lambda _: found)
    sampling: Sampling = {"use_beam_search": True, "n": max_num_seqs, "max_tokens": 12}
    (request,) = requests.of_prompts([5, 6], sampling)
    assert request.beams is not None
    assert (request.n, request.sampling.max_tokens) == (max_num_seqs, 12)
    with pytest.raises(ValueError, match="'n'"):
        requests.of_prompts([5, 6], sampling | {"n": max_num_seqs + 1})


def test_special_tokens_are_shown_where_they_are_not_skipped(requests: Requests) -> None:
    special = requests._core.model.tokenizer.special_ids
    assert special
    for skip, shown in ((False, special), (True, frozenset())):
        (request,) = requests.of_prompts([5], {"skip_special_tokens": skip, "bad_words": ["bear"]})
        assert request.sampling.shown_special == shown
        assert request.sampling.bad_words


def test_a_form_that_answers_match_is_compiled(requests: Requests) -> None:
    (request,) = requests.of_prompts([5], {"structured_outputs": {"choice": ["yes", "no"]}})
    assert request.sampling.grammar is not None
    assert requests.of_prompts([5], {})[0].sampling.grammar is None


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda r: r.of_prompts([[5], [5, "a"]], {}), ValueError, "number 1 of 2: "),
        (lambda r: r.of_prompts([[]], {}), ValueError, "'prompt' must not be empty."),
        (lambda r: r.of_texts([5] * 9999), ValueError, "This model's maximum context length is"),
        (lambda r: r.of_prompts([5], {"logit_bias": 3}), ValueError, "Invalid 'logit_bias'"),
        (
            lambda r: r.of_prompts([5], {"tempreature": 1}),
            TypeError,
            "unexpected keyword argument 'tempreature'; did",
        ),
    ],
)
def test_what_is_wrong_is_told(
    requests: Requests, call: Callable[[Requests], object], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught:
        call(requests)
    assert str(caught.value).startswith(said)


# What comes back


def test_outputs_come_with_the_number_of_their_request_until_all_have_ended() -> None:
    params, told = SamplingParams(temperature=0.0, max_tokens=9), list[int]()
    given = [
        Request(request_id=name, prompt_token_ids=(1,), sampling=params, n=n)
        for name, n in (("a", 1), ("b", 2))
    ]
    call, deliveries = CallOutputs(given, lambda: told.append(1)), Deliveries()
    deliveries.calls = {"a": call, "b": call}
    outputs = [
        Output("b", 0),
        Output("b", 1, finish_reason=FinishReason.STOP),
        Output("a", 0, finish_reason=FinishReason.LENGTH),
        Output("b", 0, finish_reason=FinishReason.STOP),
    ]
    assert list(call.arrived()) == []
    deliveries.deliver(SimpleNamespace(outputs=[outputs[0], Output("c", 0), *outputs[1:3]]))  # type: ignore[arg-type]
    assert list(call.arrived()) == [(1, outputs[0]), (1, outputs[1]), (0, outputs[2])]
    assert call.open == {"b": 1}
    call.put(outputs[3])
    assert list(call) == [(1, outputs[3])]
    assert call.open == {}
    assert told == [1] * 4


def test_an_engine_that_ends_is_told_to_whoever_waits() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9)
    call = CallOutputs([Request(request_id="a", prompt_token_ids=(1,), sampling=params)], nothing)
    deliveries = Deliveries()
    deliveries.calls["a"] = call
    deliveries.announce(EngineState.READY)
    assert deliveries.settled.is_set()
    assert list(call.arrived()) == []
    deliveries.announce(EngineState.STOPPED)
    with pytest.raises(RuntimeError, match=r"^the engine ended before the answer did$"):
        next(call.arrived())
    for reason, error, said in (
        (FinishReason.FAILED, "the device is gone", "the device is gone"),
        (FinishReason.CANCELLED, None, "the engine ended the request"),
    ):
        call.put(Output("a", 0, finish_reason=reason, error=error))
        with pytest.raises(RuntimeError, match=f"^{said}$"):
            next(iter(call))
