"""Where a sequence ends, and what of its text may be shown before that is known."""

from __future__ import annotations

from engine.request import FinishReason, SamplingParams, Sequence
from engine.sampling.detokenizer import Detokenizer, make_detokenizer
from engine.tokenizer import Tokenizer


class TextStream:
    """The text of one sequence, watched for stop strings.

    A stop string is found wherever token borders fall, and no part of it is ever shown: text that could still become
    one is held back until it cannot.
    """

    __slots__ = ("_detokenizer", "_held", "_stops", "stopped")

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._held = ""
        self.stopped = False
        """A stop string was found; the text is complete."""

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Text that can be shown now that this token is known."""
        text = self._detokenizer.push(token_id)
        if not self._stops or not may_stop:
            return self._take_held() + text
        return self._watch(text)

    def flush(self) -> str:
        """All that is left, when no more tokens come."""
        rest = self._detokenizer.flush()
        return self._watch(rest) + self._take_held() if self._stops else rest

    def _watch(self, text: str) -> str:
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = len(text) - self._longest_start_of_a_stop(text)
        self._held = text[keep:]
        return text[:keep]

    def _longest_start_of_a_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held


class TextSink:
    """The engine's TokenSink: text and endings of all sequences of one model."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:
        """Takes a sequence's newest token. An end-of-sequence or stop token has no text of its own."""
        params = sequence.request.sampling
        stream = self._stream_of(sequence)
        may_stop = sequence.num_output_tokens > params.min_tokens
        if may_stop and self._ends(params, token_id):
            return stream.flush(), FinishReason.STOP
        text = stream.push(token_id, may_stop=sequence.num_output_tokens >= params.min_tokens)
        if is_last and not stream.stopped:
            text += stream.flush()
            return text, FinishReason.STOP if stream.stopped else FinishReason.LENGTH
        return text, FinishReason.STOP if stream.stopped else None

    def _stream_of(self, sequence: Sequence) -> TextStream:
        if sequence.text is None:
            sequence.text = TextStream(make_detokenizer(self._tokenizer), sequence.request.sampling.stop)
        assert isinstance(sequence.text, TextStream)
        return sequence.text

    def _ends(self, params: SamplingParams, token_id: int) -> bool:
        return token_id in params.stop_token_ids or (token_id in self._eos and not params.ignore_eos)
