"""Rendering: whatever the text, a client reads back exactly what the model said."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Request
from penstock.engine.planning.timings import MAX_MARKS, DraftCount, ExpertSums
from penstock.gateway.errors import ApiError
from penstock.gateway.reply.generation import Generation
from penstock.gateway.wire.completions import ChatWriter, CompletionWriter, Extras, TextWriter
from penstock.gateway.wire.frames import error_frame, timings_of
from penstock.gateway.wire.writing import Delta, Head
from penstock.priority.lanes import Lane
from tests.gateway.harness import events, logprobs, make_timings, make_tokenizer

TOKENIZER = make_tokenizer()
ANYTHING = st.text(st.characters(), max_size=40)


def writer_of(
    name: str, reply: Generation, model: str = "m", *, include_usage: bool = False
) -> tuple[CompletionWriter, list[bytes]]:
    """A writer that has begun, and the frames with which it did."""
    head = Head(id="id-1", created=7, model=model)
    make = ChatWriter if name == "chat" else TextWriter
    writer = make(TOKENIZER, head, Extras(num_top=2), include_usage=include_usage)
    return writer, writer.begin(reply)


def said(chunk: Any, name: str) -> str:
    choice = chunk["choices"][0]
    text = choice["delta"].get("content", "") if name == "chat" else choice["text"]
    assert isinstance(text, str)
    return text


@given(st.lists(ANYTHING, max_size=6), ANYTHING, st.sampled_from(["chat", "text"]), st.booleans())
def test_any_text_survives(texts: list[str], model: str, name: str, include_usage: bool) -> None:
    reply = Generation([_request()])
    reply.timings_json = {"lane": "standard"}
    writer, frames = writer_of(name, reply, model, include_usage=include_usage)
    for text in texts:
        frames += writer.more(reply, 0, Delta([text]))
    frames += writer.more(reply, 0, Delta(finish_reason=FinishReason.STOP))
    frames += writer.end(reply)[:1]
    stream = b"".join(frames).decode("ascii")
    # Also for clients that split lines at everything Python calls a line end.
    assert all(line.startswith("data: ") or not line for line in stream.splitlines())
    chunks = events(stream)
    assert "".join(said(chunk, name) for chunk in chunks) == "".join(texts)
    assert all(chunk["model"] == model for chunk in chunks)
    assert all(("usage" in chunk) == include_usage for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["timings"] == {"lane": "standard"}


@given(ANYTHING)
def test_any_error_message_survives(message: str) -> None:
    (frame,) = events(error_frame(ApiError(500, message, code="x")).decode("ascii"))
    assert frame["error"]["message"] == message


def test_offsets_of_streamed_logprobs_go_on() -> None:
    reply = Generation([_request()])
    writer, frames = writer_of("text", reply)
    for text, i in zip("ab", TOKENIZER.encode("ab"), strict=True):
        frames += writer.more(reply, 0, Delta([text], token_ids=[i], logprobs=[logprobs((i, -1.0))]))
    found = [chunk["choices"][0]["logprobs"] for chunk in events(b"".join(frames).decode())]
    assert [logprob["tokens"] for logprob in found] == [["a"], ["b"]]
    assert [logprob["text_offset"] for logprob in found] == [[0], [1]]
    assert found[0]["top_logprobs"] == [{"a": -1.0}]


def test_usage_is_openais() -> None:
    generation = Generation([_request()])
    generation.num_output_tokens = 2
    writer, _ = writer_of("chat", generation, include_usage=True)
    writer.more(generation, 0, Delta(finish_reason=FinishReason.STOP))
    (_, chunk) = events(b"".join(writer.end(generation)).decode())
    assert chunk["choices"] == []
    assert chunk["usage"]["total_tokens"] == 5
    assert chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_timings_of_several_choices_are_one() -> None:
    request = _request()
    early = make_timings(request, preempted_s=(0.5,), drafts={"lookup": DraftCount([2, 2], [2, 1])})
    late = make_timings(request, first_token_s=request.arrival_s + 0.5, finished_s=request.arrival_s + 1)
    single = make_timings(
        request,
        num_output_tokens=1,
        drafts={"draft": DraftCount([4, 2, 1], [1, 0, 0]), "lookup": DraftCount([1], [0])},
    )
    generation = Generation([request])
    generation.num_cached_tokens, generation.predicted_ttft_s = 4, 0.25
    generation.promised_ttft_s = 3.0
    generation.timings = [late, early, single]
    timings = told_timings(generation)
    assert (timings["ttft_ms"], timings["lane"], timings["cached_tokens"]) == (30.0, "batch", 4)
    assert (timings["preemptions"], timings["draft_tokens"], timings["accepted_tokens"]) == (3, 12, 4)
    assert timings["drafts"] == {
        "draft": {
            "draft_tokens": 7,
            "accepted_tokens": 1,
            "drafted_by_position": [4, 2, 1],
            "accepted_by_position": [1, 0, 0],
        },
        "lookup": {
            "draft_tokens": 5,
            "accepted_tokens": 3,
            "drafted_by_position": [3, 2],
            "accepted_by_position": [2, 1],
        },
    }
    assert timings["tpot_ms"] == 135.0
    assert (timings["promised_ttft_ms"], timings["predicted_ttft_ms"]) == (3000.0, 250.0)
    generation.timings = [single]
    assert told_timings(generation)["tpot_ms"] is None
    json.dumps(timings)


def test_the_experts_of_a_layer_are_told_where_they_were_counted() -> None:
    request = _request()
    generation = Generation([request])
    generation.timings = [
        make_timings(request),
        make_timings(request, experts=ExpertSums(100, 6)),
        make_timings(request, experts=ExpertSums(28, 3)),
    ]
    assert told_timings(generation)["experts_per_layer"] == round(128 / 9, 2)
    del generation.timings[1:]
    assert told_timings(generation)["experts_per_layer"] is None


def test_the_timeline_is_of_the_first_choice_and_bounded() -> None:
    request = _request()
    early = make_timings(
        request,
        prefills=((10.02, 16), (10.03, 4)),
        preempted_s=tuple(10.05 + i for i in range(MAX_MARKS + 9)),
        resumed_s=(10.06,),
        draft_steps=((10.065, 4, 2),),
    )
    late = make_timings(request, first_token_s=request.arrival_s + 0.5, prefills=((11.0, 1),))
    generation = Generation([request])
    generation.timings = [late, early]
    timeline = json.loads(json.dumps(told_timings(generation)["timeline"]))
    assert len(timeline["preempted_ms"]) == MAX_MARKS
    assert timeline | {"preempted_ms": timeline["preempted_ms"][:2]} == {
        "prefills": [[20.0, 16], [30.0, 4]],
        "preempted_ms": [50.0, 1050.0],
        "resumed_ms": [60.0],
        "drafts": [[65.0, 4, 2]],
        "ended_ms": 70.0,
    }


def told_timings(generation: Generation) -> Any:
    return timings_of(generation)


def _request() -> Request:
    sampling, ids = SamplingParams(), (1, 2, 3)
    return Request(request_id="r", prompt_token_ids=ids, sampling=sampling, arrival_s=10.0, lane=Lane.BATCH)
