"""A journal is written in parts while its reply is being made, and is the same as if it were written at once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Output, Request, TokenLogprobs
from penstock.gateway.sessions.recordings.journal import replay, words_of
from tests.few import examples
from tests.gateway.harness import make_timings
from tests.gateway.sessions.recordings.fakes import make_recording, make_request


class EchoReplayer:
    """Every token's text is its number, and a whole choice ends by itself."""

    def replay(
        self,
        request: Request,  # noqa: ARG002
        token_ids: Collection[int],
        max_len: int,  # noqa: ARG002
        *,
        is_whole: bool,
    ) -> tuple[list[str], FinishReason | None]:
        return list(map(str, token_ids)), FinishReason.STOP if is_whole else None


@given(
    order=st.lists(st.integers(0, 2), max_size=30),
    lengths=st.tuples(*3 * [st.integers(1, 6)]),
    num_top=st.sampled_from([None, 0, 2]),
)
@settings(max_examples=examples(100), deadline=None)
def test_words_in_parts_are_those_of_the_whole(
    order: list[int], lengths: tuple[int, int, int], num_top: int | None
) -> None:
    sampling = SamplingParams(max_tokens=100, num_logprobs=num_top)
    recording = make_recording(replace(make_request(), n=3, sampling=sampling))
    recording.on_news = lambda _: None
    brought, written = [0, 0, 0], list[int]()
    for index in order:
        if brought[index] == lengths[index]:
            continue
        brought[index] += 1
        token_id = 10 * index + brought[index]
        output = Output(recording.id, index, [token_id], str(token_id))
        if num_top is not None:
            output.logprobs = [TokenLogprobs(-token_id / 4, ((token_id, -0.5),)[:num_top])]
        if brought[index] == lengths[index]:
            output.finish_reason, output.timings = FinishReason.STOP, make_timings(recording.request)
        recording.push(output)
        number, words = words_of(recording, len(written))
        assert len(words()) == number
        written += words()
    assert tuple(written) == words_of(recording)[1]()
    again = make_recording(recording.request)
    for output in replay(again.request, tuple(written), replayer=EchoReplayer(), max_len=100):
        again.push(output)
    assert again.choices == recording.choices
    assert again.frames_from(0) == recording.frames_from(0)
