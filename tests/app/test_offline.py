"""`LLM`: the engine inside a program. Its answers are the server's; it works with and without an event loop."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest

from penstock.app.checkpoint import DEMO_MODEL
from penstock.app.offline.answers import Answer
from penstock.app.offline.llm import LLM
from penstock.app.offline.requests import Sampling
from penstock.app.offline.settings import offline_settings
from penstock.gateway.wire.schemas import ChatBody, CompletionBody
from penstock.priority.lanes import Lane

PROMPTS = ["Once upon a time", "The old bear", "Paris is", "What is a penstock?"]
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story about a fox"}],
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, num_blocks=512, max_num_seqs=8) as llm:
        yield llm


def post(url: str, path: str, **body: object) -> Any:
    asked = urllib.request.Request(
        url + path,
        json.dumps({"model": "penstock-demo", **body}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as reply:
        return json.load(reply)


def said(answer: Answer) -> list[tuple[str, str | None]]:
    return [(choice.text, choice.finish_reason) for choice in answer.choices]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "max_tokens": 40},
        {"temperature": 0},
        {"seed": 7, "n": 3, "max_tokens": 20, "top_p": 0.9},
        {"temperature": 0, "max_tokens": 60, "stop": [" the", "."]},
        {"seed": -7, "logit_bias": {18: -100}, "max_tokens": 30, "frequency_penalty": 0.5},
        {"use_beam_search": True, "n": 3, "max_tokens": 12, "length_penalty": 0.5, "early_stopping": "never"},
    ],
    ids=str,
)
def test_answers_are_those_of_the_server(llm: LLM, live_server: str, sampling: Any) -> None:
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, **sampling), strict=True):
        reply = post(live_server, "/v1/completions", prompt=prompt, **sampling)
        assert said(answer) == [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]]
    for messages, answer in zip(CONVERSATIONS, llm.chat(CONVERSATIONS, **sampling), strict=True):
        reply = post(live_server, "/v1/chat/completions", messages=messages, **sampling)
        assert said(answer) == [
            (choice["message"]["content"], choice["finish_reason"]) for choice in reply["choices"]
        ]


def test_log_probabilities_are_those_of_the_server(llm: LLM, live_server: str) -> None:
    sampling: Sampling = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    (choice,) = llm.chat(CONVERSATIONS[0], **sampling)[0].choices
    reply = post(live_server, "/v1/chat/completions", messages=CONVERSATIONS[0], **sampling)
    expected = reply["choices"][0]["logprobs"]["content"]
    assert choice.logprobs is not None
    assert [found.token_id for found in choice.logprobs] == choice.token_ids
    for found, wanted in zip(choice.logprobs, expected, strict=True):
        assert found.token == wanted["token"]
        assert found.logprob == pytest.approx(wanted["logprob"])
        assert [other.token for other in found.top] == [other["token"] for other in wanted["top_logprobs"]]
    (plain,) = llm.chat(CONVERSATIONS[0], max_tokens=1)
    assert plain.choices[0].logprobs is None


def test_log_probabilities_of_a_prompt_are_those_of_its_tokens(llm: LLM) -> None:
    """The last token of the prompt was chosen before, with the same log probabilities."""
    (first,) = llm.generate(PROMPTS[0], temperature=0, max_tokens=1, logprobs=2)
    prompt = [*first.prompt_token_ids, *first.choices[0].token_ids]
    (answer,) = llm.generate([prompt], max_tokens=1, prompt_logprobs=2)
    assert first.prompt_logprobs is None
    assert first.choices[0].logprobs is not None
    assert answer.prompt_logprobs is not None
    assert [found.token_id for found in answer.prompt_logprobs] == prompt[1:]
    assert all(len(found.top) == 2 for found in answer.prompt_logprobs)
    (chosen,), last = first.choices[0].logprobs, answer.prompt_logprobs[-1]
    assert last.logprob == pytest.approx(chosen.logprob)
    assert [other.token for other in last.top] == [other.token for other in chosen.top]


def test_answers_match_the_form_that_was_asked_for(llm: LLM) -> None:
    words = ["yes", "no", "perhaps"]
    answers = llm.generate(PROMPTS, structured_outputs={"choice": words}, seed=1)
    assert {answer.text for answer in answers} <= set(words)
    ages = {"type": "integer", "minimum": 0, "maximum": 120}
    schema = {
        "type": "object",
        "properties": {"age": ages},
        "required": ["age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for answer in llm.chat(CONVERSATIONS, response_format=form, seed=1, max_tokens=200):
        assert 0 <= json.loads(answer.text)["age"] <= 120


@pytest.mark.parametrize("dimensions", [None, 16])
def test_embeddings_are_those_of_the_server(llm: LLM, live_server: str, dimensions: int | None) -> None:
    found = llm.embed(PROMPTS, dimensions=dimensions)
    reply = post(live_server, "/v1/embeddings", input=PROMPTS, dimensions=dimensions)
    for embedding, expected in zip(found, reply["data"], strict=True):
        assert embedding == pytest.approx(expected["embedding"], abs=1e-6)
    assert llm.embed(PROMPTS[0], dimensions=dimensions) == [pytest.approx(found[0], abs=1e-6)]


def test_one_prompt_alone_is_a_list_of_one(llm: LLM) -> None:
    greedy: Sampling = {"temperature": 0, "max_tokens": 5}
    (text,) = llm.generate(PROMPTS[0], **greedy)
    (tokens,) = llm.generate(text.prompt_token_ids, **greedy)
    assert tokens.text == text.text
    assert llm.generate([list(text.prompt_token_ids)], **greedy)[0].text == text.text
    assert llm.generate([]) == []
    (chat,) = llm.chat(CONVERSATIONS[0], **greedy)
    assert chat.text == llm.chat(CONVERSATIONS, **greedy)[0].text


def test_answers_stand_in_the_order_of_many_prompts(llm: LLM) -> None:
    prompts = [f"{number} plus 1 is" for number in range(50)]
    fields: Sampling = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    together = llm.generate(prompts, **fields)
    assert [len(answer.choices[0].token_ids) for answer in together] == [6] * 50
    for number in (0, 17, 49):
        assert together[number].text == llm.generate(prompts[number], **fields)[0].text


def test_a_prompt_is_found_in_the_cache_the_next_time(llm: LLM) -> None:
    prompt = [5 + number % 7 for number in range(64)]
    first, second = (llm.generate(prompt, max_tokens=2)[0].num_cached_tokens for _ in range(2))
    assert (first, second) == (0, 48)


def test_pieces_of_a_stream_make_the_answers(llm: LLM) -> None:
    sampling: Sampling = {"seed": 3, "n": 2, "max_tokens": 12, "logprobs": 0}
    texts: dict[tuple[int, int], str] = {}
    tokens: dict[tuple[int, int], list[int]] = {}
    for piece in llm.stream(PROMPTS, **sampling):
        place = piece.prompt, piece.choice
        texts[place] = texts.get(place, "") + piece.text
        tokens.setdefault(place, []).extend(piece.token_ids)
        assert piece.logprobs is not None
    for number, answer in enumerate(llm.generate(PROMPTS, **sampling)):
        for index, choice in enumerate(answer.choices):
            assert texts[number, index] == choice.text
            assert tokens[number, index] == choice.token_ids


def test_a_stream_takes_conversations_and_can_be_read_again(llm: LLM) -> None:
    stream = llm.stream(CONVERSATIONS[0], temperature=0, max_tokens=8)
    (answer,) = llm.chat(CONVERSATIONS[0], temperature=0, max_tokens=8)
    assert "".join(piece.text for piece in stream) == answer.text
    assert "".join(piece.text for piece in stream) == answer.text


def test_whoever_stops_reading_cancels_the_rest(llm: LLM) -> None:
    stream = llm.stream(PROMPTS * 5, temperature=0, max_tokens=500, ignore_eos=True)
    pieces = iter(stream)
    next(pieces)
    assert llm._engine.stats().num_running > 0
    del pieces
    llm.generate("x", max_tokens=2)  # comes after the cancelling
    assert llm._engine.stats().num_running == 0
    assert llm._queue.depths() == dict.fromkeys(llm._queue.depths(), 0)
    assert llm._deliveries.calls == {}


def test_it_works_where_an_event_loop_runs(llm: LLM) -> None:
    """As in a notebook: a call blocks until it is done, `async for` does not block."""

    async def run() -> tuple[str, list[str], int]:
        num_turns, is_over = 0, False

        async def turn() -> None:
            nonlocal num_turns
            while not is_over:
                num_turns += 1
                await asyncio.sleep(0)

        blocking = llm.generate(PROMPTS[0], temperature=0, max_tokens=8)[0].text
        turning = asyncio.create_task(turn())
        texts = [""] * len(PROMPTS)
        async for piece in llm.stream(PROMPTS, temperature=0, max_tokens=8):
            texts[piece.prompt] += piece.text
        is_over = True
        await turning
        return blocking, texts, num_turns

    blocking, texts, num_turns = asyncio.run(run())
    assert blocking == texts[0]
    assert texts == [answer.text for answer in llm.generate(PROMPTS, temperature=0, max_tokens=8)]
    assert num_turns > 10


def test_a_loop_that_is_gone_does_not_harm_the_engine(llm: LLM) -> None:
    async def run() -> Any:
        pieces = aiter(llm.stream(PROMPTS[0], max_tokens=400, ignore_eos=True))
        await anext(pieces)
        return pieces

    loop = asyncio.new_event_loop()
    pieces = loop.run_until_complete(run())
    loop.close()
    assert len(llm.generate(PROMPTS, max_tokens=4)) == 4
    with pytest.raises(StopIteration):
        pieces.aclose().send(None)
    assert llm._deliveries.calls == {}


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda llm: llm.generate("x", temprature=1), TypeError, "'temprature'; did you mean temperature?"),
        (lambda llm: llm.generate("x", stream=True), TypeError, "unexpected keyword argument 'stream'"),
        (
            lambda llm: llm.generate("x", temperature=101),
            ValueError,
            "Invalid 'temperature': Input should be",
        ),
        (lambda llm: llm.generate(["x", "y"], n=0), ValueError, "number 0 of 2: Invalid 'n'"),
        (lambda llm: llm.generate("x", top_logprobs=2), ValueError, "argument supplied: top_logprobs"),
        (lambda llm: llm.generate(["x", [1, 10**9]]), ValueError, "number 1 of 2: .* outside the vocabulary"),
        (lambda llm: llm.generate([["a", "b"]]), ValueError, "A prompt is a text or a list of token ids"),
        (lambda llm: llm.generate(CONVERSATIONS[0]), ValueError, "Invalid 'prompt"),
        (lambda llm: llm.generate("x " * 9_000), ValueError, "maximum context length is"),
        (lambda llm: llm.generate("x", max_tokens=10**6), ValueError, "and max_tokens 1000000"),
        (lambda llm: llm.chat([{"role": "wizard", "content": "x"}]), ValueError, "messages.0..role"),
        (lambda llm: llm.chat("Hello"), ValueError, "Invalid 'messages'"),
        (lambda llm: llm.chat(CONVERSATIONS[0], service_tier="best"), ValueError, "Invalid 'service_tier'"),
        (
            lambda llm: llm.generate("x", structured_outputs={"regex": "("}),
            ValueError,
            "Invalid 'structured_outputs.regex'",
        ),
        (lambda llm: llm.embed("x", dimensions=10**6), ValueError, "'dimensions' must be 1 to"),
        (lambda llm: llm.embed(["x", []]), ValueError, "number 1 of 2: 'input' must not be empty"),
        (lambda llm: llm.stream("x", top_p=2), ValueError, "Invalid 'top_p'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_generated(
    llm: LLM, call: Callable[[Any], object], kind: type[Exception], message: str
) -> None:
    before = llm._engine.stats().num_steps
    with pytest.raises(kind, match=message):
        call(llm)
    assert llm._engine.stats().num_steps == before


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (partial(LLM, max_num_seq=1), TypeError, "'max_num_seq'; did you mean max_num_seqs?"),
        (partial(LLM, port=8000), TypeError, "an LLM has no setting 'port'"),
        (partial(LLM, strict=True), TypeError, "an LLM has no setting 'strict'"),
        (
            partial(LLM, cluster_secret="sixteen-characters"),
            TypeError,
            "an LLM has no setting 'cluster_secret'",
        ),
        (partial(LLM, max_num_seqs=0), ValueError, "--max-num-seqs: input should be"),
        (partial(LLM, "/nowhere"), ValueError, "there is no directory /nowhere"),
    ],
)
def test_wrong_settings_are_said_in_one_line(
    make: Callable[[], LLM], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_loaded_is_said_in_one_line(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(RuntimeError, match=re.escape(str(weights))) as caught:
        LLM(model, progress=False)
    assert "\n" not in str(caught.value)


def test_what_it_takes_are_settings_and_fields_that_there_are() -> None:
    assert Sampling.__optional_keys__ <= ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()


def test_lanes_promise_what_was_set_and_else_nothing() -> None:
    lanes = offline_settings(None, {"lane_interactive": "tpot=0.05"}).lanes
    assert (lanes[Lane.INTERACTIVE].tpot_s, lanes[Lane.INTERACTIVE].ttft_s) == (0.05, 1.0)
    assert (lanes[Lane.STANDARD].tpot_s, lanes[Lane.STANDARD].ttft_s) == (inf, inf)
    assert lanes[Lane.STANDARD].kv_share == lanes[Lane.BATCH].kv_share == 1
    assert lanes[Lane.INTERACTIVE].weight > lanes[Lane.STANDARD].weight > lanes[Lane.BATCH].weight


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_where_somebody_watches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Terminal()
    monkeypatch.setattr("sys.stderr", seen)
    llm.generate(PROMPTS, max_tokens=2)
    assert seen.getvalue() == ""
    llm.generate(PROMPTS, max_tokens=2, progress=True)
    assert "generating" in seen.getvalue()
    assert "4/4" in seen.getvalue()


def test_closing_ends_calls_and_the_thread() -> None:
    threads = set(threading.enumerate())
    llm = LLM(progress=False, num_blocks=512)
    begun, failures = threading.Event(), []

    def read() -> None:
        try:
            for _ in llm.stream("x", max_tokens=1_000, ignore_eos=True):
                begun.set()
        except RuntimeError as error:
            failures.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    llm.close()
    reader.join(60)
    assert failures == ["the engine ended before the answer did"]
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("x")
    assert set(threading.enumerate()) <= threads  # others' may have ended


def test_one_that_is_forgotten_ends_its_thread() -> None:
    llm = LLM(progress=False, num_blocks=512)
    engine = llm._engine
    del llm
    assert engine.state == "stopped"
