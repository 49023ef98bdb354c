"""Objects and events of a response: whatever came of it, OpenAI's own types read it, and the numbers are right."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseInputItem, ResponseItem
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

from penstock.engine.planning.request import FinishReason, Output, TokenLogprobs
from penstock.engine.planning.text_sink import TextSink
from penstock.engine.text.watermark import Watermark
from penstock.gateway.errors import ApiError
from penstock.gateway.sessions.recordings.journal import (
    CorruptJournal,
    end_of,
    header_of,
    rebuild,
    replay,
    words_of,
)
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses import writer
from penstock.gateway.sessions.responses.objects import deleted, input_items, page
from penstock.gateway.sessions.responses.records import (
    KIND,
    RECORDS,
    KeptResponse,
    continued,
    find,
    keep,
    kept_response,
)
from penstock.gateway.sessions.responses.schemas import LOGPROBS, PageQuery
from penstock.gateway.sessions.responses.threads import Thread
from penstock.gateway.sessions.responses.writer import beginning, make_writer, response, status_of
from penstock.gateway.store.interface import Journal, Key
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.wire.logprobs import ChosenLogprob, TokenText, logprob_entry
from tests.few import examples
from tests.gateway.harness import EOS, make_timings, make_tokenizer
from tests.gateway.sessions.responses.recorded_responses import (
    EVENT,
    SAMPLING,
    body_of,
    cancel,
    data_of,
    fail,
    finish,
    frames_of,
    recording_of,
    say,
    strict,
)

CODEC = TypeAdapter(KeptResponse)
OPENING = ["response.created", "response.in_progress"]
BEGUN = ["response.output_item.added", "response.content_part.added"]
DELTA = "response.output_text.delta"
CLOSING = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
# No model says half a character.
ANYTHING = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TEXTS = st.lists(ANYTHING, max_size=8)
ENDS = {
    "completed": lambda recording: finish(recording),
    "incomplete": lambda recording: finish(recording, FinishReason.LENGTH),
    "cancelled": cancel,
    "failed": fail,
}
LAST = {"completed": "response.completed", "failed": "response.failed"}


def ended(how: str, *texts: str, **fields: Any) -> Recording:
    recording = recording_of(**fields)
    say(recording, *texts)
    ENDS[how](recording)
    return recording


def read_events(recording: Recording) -> list[Any]:
    """All events, strictly read."""
    data = [data_of(frame) for frame in frames_of(recording)]
    return [EVENT.validate_json(json.dumps(event), strict=True) for event in data]


# Objects


@pytest.mark.parametrize("background", [False, True])
def test_a_response_that_has_not_ended(background: bool) -> None:
    recording = recording_of(background=background)
    assert strict(response(recording)).status == ("queued" if background else "in_progress")
    say(recording, "Hel", "lo")
    found = strict(response(recording))
    assert (found.status, found.output, found.usage) == ("in_progress", [], None)


def test_a_completed_response() -> None:
    found = strict(response(ended("completed", "Hel", "lo")))
    assert (found.status, found.output_text, found.error) == ("completed", "Hello", None)
    (item,) = found.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert item.id.startswith("msg_")
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (4, 3, 7)
    assert found.usage.input_tokens_details.cached_tokens == 4
    assert found.usage.output_tokens_details.reasoning_tokens == 0
    assert found.model_extra is not None
    assert found.model_extra["timings"]["ttft_ms"] == 30.0
    assert found.model_extra["timings"]["lane"] == "standard"


def test_a_response_that_was_cut_off() -> None:
    found = strict(response(ended("incomplete", "Hel")))
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].status == "incomplete"
    assert found.usage is not None


@pytest.mark.parametrize("texts", [(), ("Hel",)])
@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_a_response_that_came_to_nothing(how: str, texts: tuple[str, ...]) -> None:
    found = strict(response(ended(how, *texts)))
    assert (found.status, found.output_text) == (how, "".join(texts))
    assert len(found.output) == len(texts)
    assert (found.error is not None) == (how == "failed")


def test_a_fault_says_what_openai_would_call_it() -> None:
    recording = recording_of()
    recording.fail(ApiError(429, "Too many.", type="rate_limit_error", code="queue_full"))
    recording.close()
    found = strict(response(recording))
    assert found.error is not None
    assert (found.error.code, found.error.message) == ("rate_limit_exceeded", "Too many.")
    found = strict(response(ended("failed")))
    assert found.error is not None
    assert (found.error.code, found.error.message) == ("server_error", "It broke.")


def test_what_was_asked_for_is_told() -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "ä\u2028"},
        "previous_response_id": "resp_1",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "user": "u",
        "tool_choice": "none",
        "text": {
            "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}},
            "verbosity": "low",
        },
        "parallel_tool_calls": False,
    }
    found = strict(response(recording_of(**fields))).model_dump(by_alias=True)
    found["text"]["format"] = {
        name: value for name, value in found["text"]["format"].items() if value is not None
    }
    assert {name: found[name] for name in fields} == fields
    assert (found["temperature"], found["top_p"]) == (0.5, 0.9)
    assert (found["service_tier"], found["truncation"], found["tools"]) == ("default", "disabled", [])
    assert found["created_at"] == 1_700_000_000
    assert strict(response(recording_of(conversation="conv_1"))).conversation is not None


def test_all_of_it_can_be_made_again_from_json() -> None:
    recording = ended("completed", "Hel", "lo", metadata={"a": "b"}, background=True)
    before = (response(recording), frames_of(recording), kept_response(recording))
    recording.details = json.loads(json.dumps(recording.details))
    assert (response(recording), frames_of(recording), kept_response(recording)) == before


@pytest.mark.parametrize("how", ENDS)
@given(text=ANYTHING)
def test_a_restarted_server_tells_the_same(how: str, text: str) -> None:
    """From the journal alone: what was asked, the tokens, and how it ended."""
    tokenizer = make_tokenizer()
    token_ids = [*tokenizer.encode(text), EOS]
    recording = recording_of(background=True, metadata={"a": "b"})
    if how == "incomplete":
        token_ids = token_ids[: len(token_ids) - 1 or 1]
    most = len(token_ids) if how == "incomplete" else 1_000
    sampling = replace(recording.request.sampling, max_tokens=most, ignore_eos=how == "incomplete")
    recording.request = replace(recording.request, sampling=sampling)
    sink = TextSink(tokenizer, (EOS,))
    texts, reason = sink.replay(recording.request, token_ids, 10_000)
    for token_id, said in zip(token_ids[:-1], texts[:-1], strict=True):
        say(recording, said, token_id=token_id)
    if how in ("failed", "cancelled"):
        ENDS[how](recording)
    else:
        assert reason is not None
        finish(recording, reason, texts[-1], token_ids[-1])
    journal = Journal(
        recording.id, header_of(recording), tuple(recording.kept[0].token_ids), end_of(recording)
    )
    replayed = partial(replay, replayer=sink, max_len=10_000)
    rebuilt = rebuild(journal, 99.0, {KIND: partial(make_writer, make_tokenizer())}, replayed)
    assert rebuilt.request.sampling == recording.request.sampling
    rebuilt.close()
    assert status_of(rebuilt) == status_of(recording) == how
    assert frames_of(rebuilt) == frames_of(recording)
    assert kept_response(rebuilt) == kept_response(recording)


def test_a_restarted_server_tells_the_same_log_probabilities() -> None:
    tokenizer = make_tokenizer()
    token_ids = [*tokenizer.encode("Grüße"), EOS]
    sampling = replace(SAMPLING, num_logprobs=1, max_tokens=1_000)
    recording = recording_of(background=True, include=[LOGPROBS], top_logprobs=1, sampling=sampling)
    sink = TextSink(tokenizer, (EOS,))
    texts, reason = sink.replay(recording.request, token_ids, 10_000)
    for token_id, said in zip(token_ids, texts, strict=True):
        told = [TokenLogprobs(-token_id / 64, ((token_id, -token_id / 64),))]
        is_last = token_id == EOS
        timings = make_timings(recording.request) if is_last else None
        output = Output(recording.id, 0, [token_id], said, told, timings=timings)
        output.finish_reason = reason if is_last else None
        recording.push(output)
    recording.close()
    recording.settle()
    journal = Journal(recording.id, header_of(recording), words_of(recording)[1](), end_of(recording))
    replayed = partial(replay, replayer=sink, max_len=10_000)
    rebuilt = rebuild(journal, 99.0, {KIND: partial(make_writer, tokenizer)}, replayed)
    rebuilt.close()
    assert b'"logprob":' in b"".join(frames_of(recording))
    assert frames_of(rebuilt) == frames_of(recording)


def test_log_probabilities_are_spelt_once_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in a delta and in four events of the end."""
    spelt: list[int] = []

    def spell(tokens: TokenText, token_id: int, *rest: Any) -> ChosenLogprob:
        spelt.append(token_id)
        return logprob_entry(tokens, token_id, *rest)

    monkeypatch.setattr(writer, "logprob_entry", spell)
    sampling = replace(SAMPLING, num_logprobs=1)
    recording = recording_of(include=[LOGPROBS], top_logprobs=1, sampling=sampling)
    for token_id in (70, 71):
        told = [TokenLogprobs(-0.5, ((token_id, -0.5),))]
        recording.push(Output(recording.id, 0, [token_id], "a", told))
    finish(recording)
    frames = frames_of(recording)
    assert spelt == [70, 71]
    assert [frame.count(b'"top_logprobs":[{') for frame in frames] == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]


def test_a_deleted_response() -> None:
    assert deleted("resp_1") == {"id": "resp_1", "object": "response", "deleted": True}


# Lists of items


def test_items_are_listed_as_openai_reads_them() -> None:
    given_items = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
    ]
    items = input_items(body_of(given_items).input)
    listed = page(items, PageQuery(order="asc"))
    found = ResponseItemList.model_validate_json(json.dumps(listed), strict=True)
    assert [item.role for item in found.data] == ["system", "user", "assistant"]  # type: ignore[union-attr]
    assert (found.first_id, found.last_id, found.has_more) == (items[0]["id"], items[2]["id"], False)
    for item in items:
        TypeAdapter[Any](ResponseItem).validate_json(json.dumps(item), strict=True)
        TypeAdapter[Any](ResponseInputItem).validate_json(json.dumps(item), strict=True)


@given(st.integers(0, 12), st.integers(1, 5), st.sampled_from(["asc", "desc"]))
def test_the_pages_of_a_list_are_the_list(num_items: int, limit: int, order: Any) -> None:
    items = [{"id": f"msg_{k}"} for k in range(num_items)]
    found: list[Any] = []
    after, has_more = None, True
    while has_more:
        listed = page(items, PageQuery(after=after, limit=limit, order=order))
        assert len(listed["data"]) <= limit
        found += listed["data"]
        after, has_more = listed["last_id"], listed["has_more"]
        shown = [item["id"] for item in listed["data"]] or [""]
        assert (listed["first_id"], listed["last_id"]) == (shown[0], shown[-1])
    assert found == (items if order == "asc" else items[::-1])


def test_a_list_goes_on_after_its_own_items_only() -> None:
    with pytest.raises(ApiError) as caught:
        page([{"id": "msg_1"}], PageQuery(after="msg_2"))
    assert (caught.value.status, caught.value.param) == (400, "after")


# Events


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("background", [False, True])
@given(texts=TEXTS)
@settings(max_examples=examples(25))
def test_openai_reads_every_event_and_the_numbers_have_no_gap(
    how: str, background: bool, texts: list[str]
) -> None:
    recording = ended(how, *texts, background=background)
    events = read_events(recording)
    said = [text for text in texts if text]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    # An answer that says nothing is an empty message; no answer is none.
    has_item = bool(said) or how in ("completed", "incomplete")
    item = [*BEGUN, *[DELTA] * len(said), *CLOSING] if has_item else []
    last = LAST.get(how, "response.incomplete")
    assert [event.type for event in events] == [*OPENING, *item, last]
    assert [event.delta for event in events if event.type == DELTA] == said
    assert events[-1].response.status == how
    assert events[-1].response.id == events[0].response.id == recording.id
    assert json.loads(events[-1].response.to_json()) == json.loads(strict(response(recording)).to_json())


@given(TEXTS)
@settings(max_examples=examples(50))
def test_a_clients_snapshot_is_the_response(texts: list[str]) -> None:
    """The snapshot is made of the events by openai's own accumulator."""
    recording = ended("completed", *texts)
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in read_events(recording):
        state.handle_event(event)
    assert state._completed_response.output_text == "".join(texts)


@given(TEXTS)
def test_the_texts_of_the_end_are_all_that_was_said(texts: list[str]) -> None:
    done, part, item, _ = read_events(ended("completed", *texts))[-4:]
    assert done.text == part.part.text == item.item.content[0].text == "".join(texts)
    assert done.item_id == part.item_id == item.item.id


@given(TEXTS, st.data())
def test_numbers_do_not_depend_on_how_tokens_came(texts: list[str], data: st.DataObject) -> None:
    """In one step or in many, to a client that was there or to one that came later: the same events."""
    whole = ended("completed", *texts)
    grouped = recording_of()
    grouped.details = whole.details
    frames: list[bytes] = []
    for text in texts:
        say(grouped, text)
        if data.draw(st.booleans()):
            frames += grouped.frames_from(len(frames))
    finish(grouped)
    grouped.settle()
    assert frames + grouped.frames_from(len(frames)) == frames_of(whole)


def test_how_it_opens_does_not_depend_on_when_that_is_told() -> None:
    early, late = recording_of(background=True), recording_of(background=True)
    early.open()
    opening = early.frames_from(0)
    for recording in (early, late):
        say(recording, "Hello")
        finish(recording)
        assert frames_of(recording)[:2] == opening
    assert data_of(opening[0])["response"] == beginning(early, "queued")
    assert data_of(opening[1])["response"]["status"] == "in_progress"
    assert data_of(first_frame(recording_of()))["response"]["status"] == "in_progress"


def first_frame(recording: Recording) -> bytes:
    recording.open()
    return recording.frames_from(0)[0]


@given(ANYTHING)
def test_any_text_survives_on_one_line(text: str) -> None:
    recording = recording_of()
    say(recording, "a", f"b{text}")
    frame = recording.frames_from(0)[-1]
    # Also for clients that split lines at everything Python calls a line end.
    assert len(frame.decode("ascii").splitlines()) == 3
    assert (data_of(frame)["delta"], data_of(frame)["sequence_number"]) == (f"b{text}", 5)


def test_a_stream_that_another_process_goes_on_with_has_not_failed() -> None:
    recording = recording_of(background=True)
    say(recording, "Hel", "lo")
    error = fail(recording, "server_shutting_down")
    frame = recording.writer.fault(recording, error, 5)
    event = EVENT.validate_json(json.dumps(data_of(frame)), strict=True)
    # A client that goes on after this event misses none.
    assert (event.type, event.code, event.sequence_number) == ("error", "server_shutting_down", 5)
    assert strict(response(recording)).status == "in_progress"
    waiting = recording_of()
    fail(waiting, "server_shutting_down")
    assert strict(response(waiting)).status == "failed"


# What is kept


@pytest.mark.anyio
async def test_a_record_survives_the_store() -> None:
    recording, store = ended("completed", "Hel", "lo"), MemoryStore()
    await keep(store, recording)
    record = await find(store, "default", recording.id)
    assert record is not None
    assert (record.object, record.input) == (response(recording), recording.details["input"])
    assert record.thread == Thread(
        ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}),
        (3, 4, 5, 6, 7, 7, 7),
    )


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_what_came_to_no_answer_is_not_gone_on_from(how: str) -> None:
    record, pieces = kept_response(ended(how, "Hel"))
    assert (record.thread, pieces) == (None, {})
    assert CODEC.validate_json(CODEC.dump_json(record)) == record


def test_a_thread_has_what_came_before_but_no_instructions() -> None:
    recording = recording_of(instructions="Be brief.")
    recording.details["history"] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    say(recording, "c")
    finish(recording, FinishReason.LENGTH)
    thread = continued(recording)
    assert thread is not None
    assert [message["content"] for message in thread.messages] == ["a", "b", "Hi", "c"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"object":{},"input":[]}',
        b'{"object":{},"input":[],"thread":{"messages":7}}',
        b'{"object":[],"input":[],"thread":null}',
        b"[" * 100_000,
    ],
)
async def test_a_corrupt_record_is_told_from_a_good_one(value: bytes) -> None:
    store = MemoryStore()
    await store.put(Key(RECORDS.kind, "t", "resp_1"), value, 60.0)
    assert await RECORDS.get(store, "t", "resp_1") is None


def test_a_journal_has_no_key_of_a_watermark_and_the_text_goes_on_with_it() -> None:
    mark = Watermark(key=0x1234_5678_9ABC_DEF0)
    recording = recording_of(sampling=replace(SAMPLING, watermark=mark))
    journal = Journal(recording.id, header := header_of(recording), (), None)
    assert str(mark.key).encode() not in header
    made = partial(rebuild, journal, 99.0, {KIND: partial(make_writer, make_tokenizer())}, lambda *_: [])
    assert made(watermark=mark).request.sampling.watermark == mark
    with pytest.raises(CorruptJournal, match="key"):
        made()
    journal = Journal(recording.id, header_of(recording_of()), (), None)
    made = partial(rebuild, journal, 99.0, {KIND: partial(make_writer, make_tokenizer())}, lambda *_: [])
    assert made(watermark=mark).request.sampling.watermark is None
