"""What a connection is sent does not depend on when it came, how fast it reads, or how the tokens were brought."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.sessions.recordings.frames import FRAME_BYTES, KeptFrames
from tests.few import examples
from tests.gateway.sessions.recordings.fakes import FakeReader, bring, end, make_recording

PREFIX = b"x" * 1000
texts = st.lists(st.sampled_from(["", "a", "é", "\n", '"', "long " * 9]), max_size=12)


def canonical(brought: list[str], *, include_usage: bool) -> list[bytes]:
    recording = make_recording(include_usage=include_usage)
    for text in brought:
        bring(recording, text)
    end(recording)
    reader = FakeReader(recording)
    reader.take()
    return reader.frames


@settings(max_examples=examples(200))
@given(texts, st.booleans(), st.data())
def test_every_reader_gets_every_event_after_its_position_once(
    brought: list[str], include_usage: bool, data: st.DataObject
) -> None:
    expected = canonical(brought, include_usage=include_usage)
    recording = make_recording(include_usage=include_usage)
    readers: list[tuple[int, FakeReader]] = []
    for text in brought:
        if data.draw(st.booleans(), label="a reader comes"):
            position = data.draw(st.integers(-1, recording.num_events), label="position")
            readers.append((position, FakeReader(recording, position)))
        for _, reader in readers:
            reader.connection.writable = data.draw(st.booleans(), label="writable")
        bring(recording, text)
        for _, reader in readers:
            if data.draw(st.booleans(), label="its task runs"):
                reader.take()
    end(recording)
    for position, reader in readers:
        reader.take()
        assert reader.reader.at_end
        assert reader.frames == expected[position + 1 :]


@given(texts)
def test_numbers_have_no_gaps(brought: list[str]) -> None:
    *numbered, done = canonical(brought, include_usage=True)
    assert done == b"data: [DONE]\n\n"
    assert [int(frame.split(b"\n")[0].removeprefix(b"id: ")) for frame in numbered] == list(
        range(len(numbered))
    )


def test_what_replaying_brings_is_what_was_said() -> None:
    recording, again = make_recording(), make_recording()
    for text in ("a", "", "b"):
        bring(recording, text)
    end(recording)
    for text in ("a", "", "b"):
        bring(again, text)
    end(again)
    first, second = FakeReader(recording), FakeReader(again)
    first.take()
    second.take()
    assert first.frames == second.frames


def test_a_reader_that_falls_behind_what_is_kept_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.sessions.recordings.frames.MAX_KEPT_BYTES", 500)
    recording = make_recording()
    reader = FakeReader(recording)
    reader.connection.writable = False
    for text in "abcdefg":
        bring(recording, text)
    reader.take()
    *_, fault, done = reader.frames
    assert b"position_expired" in fault
    assert done == b"data: [DONE]\n\n"
    assert reader.reader.at_end


def test_a_long_reply_is_taken_in_batches() -> None:
    """Other work of the event loop has its turn between them."""
    recording = make_recording()
    for _ in range(1000):
        bring(recording, "a")
    end(recording)
    reader, sizes = FakeReader(recording), []
    while not reader.reader.at_end:
        taken = reader.reader.take()
        reader.connection.sent.append(taken)
        sizes.append(taken.count(b"id: "))
        assert reader.reader.is_behind != reader.reader.at_end
    assert max(sizes) <= 256
    assert sum(sizes) == recording.num_events == 1002
    assert reader.frames[:-1] == recording.frames_from(0)


def test_what_all_readers_are_sent_is_made_once() -> None:
    recording = make_recording()
    readers = [FakeReader(recording) for _ in range(3)]
    bring(recording, "a")
    (first, *others) = [reader.connection.sent[-1] for reader in readers]
    assert all(other is first for other in others)


@given(st.integers(1, 30), st.integers(0, 20))
def test_what_is_forgotten_is_the_oldest(number: int, kept: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        whole = make_recording()
        for i in range(number):
            bring(whole, chr(97 + i))
        opening, *frames = whole.frames_from(0)
        sizes = [len(frame) + FRAME_BYTES for frame in whole._frames._frames]
        size = sum(sizes[1:][max(0, number - kept) :])
        patch.setattr("penstock.gateway.sessions.recordings.frames.MAX_KEPT_BYTES", size)
        recording = make_recording()
        for i in range(number):
            bring(recording, chr(97 + i))
    assert recording.num_events == number + 1
    assert recording.num_dropped == max(0, number - kept) + 1
    kept_events = frames[recording.num_dropped - 1 :]
    assert opening not in kept_events
    assert recording.frames_from(0) == kept_events
    assert recording.frames_from(number) == kept_events[-1:]


@given(st.lists(st.tuples(st.sampled_from(["", "one", "two", "three", "four"]), st.text("ab", max_size=3))))
def test_what_frames_have_in_common_is_kept_once_and_given_back(parts: list[tuple[str, str]]) -> None:
    kept = KeptFrames()
    frames = [f"id: {number}\n{common}{rest}".encode() for number, (common, rest) in enumerate(parts)]
    for frame, (common, _) in zip(frames, parts, strict=True):
        kept.append(frame, common.encode())
    assert kept.since(0) == frames
    assert kept.since(2, 1) == frames[2:3]
    shared = KeptFrames()
    for number in range(100):
        shared.append(b"%b%d" % (PREFIX, number), PREFIX)
    assert shared.num_bytes < 100 * (FRAME_BYTES + 10)
    assert shared.since(99) == [PREFIX + b"99"]
