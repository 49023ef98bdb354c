"""Makes text of the tokens of sequences, and ends them: at stop strings, stop tokens and the end of their model."""

from __future__ import annotations

from collections.abc import Collection

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Request, Sequence
from penstock.engine.text.detokenizer import make_detokenizer
from penstock.engine.text.stop_strings import TextStream
from penstock.engine.text.thinking import Thinking
from penstock.engine.text.tokenizer import Tokenizer


class TextSink:
    """Makes text of the tokens of all sequences of one model, and ends them. It is the engine's TokenSink."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:
        """Takes a sequence's newest token; see TokenSink. An end-of-sequence or stop token has no text of its own."""
        stream = self._stream_of(sequence)
        params, number = sequence.request.sampling, sequence.num_output_tokens
        text, reason = self._take(stream, params, token_id, number, is_last)
        if reason is not None:
            sequence.stop = stream.stop
        return text, reason

    def thinking(self, sequence: Sequence) -> Thinking:
        """Returns the reasoning of a sequence whose request bounds it; see TokenSink."""
        if sequence.thinking is None:
            budget = sequence.request.sampling.thinking
            assert budget is not None
            known = sequence.token_ids[sequence.num_prompt_tokens :]
            sequence.thinking = Thinking(budget, self._tokenizer.token_bytes, known)
        return sequence.thinking

    def replay(
        self, request: Request, token_ids: Collection[int], max_len: int, *, is_whole: bool = False
    ) -> tuple[list[str], FinishReason | None]:
        """Returns the texts that these tokens of a request bring one by one, and why they end, if they do.

        Args:
            max_len: prompt and output tokens that one sequence can have.
            is_whole: it is known that they end, with the last one; a grammar may have been complete there.
        """
        stream, params = self._new_stream(request), request.sampling
        most = min(params.max_tokens, max_len - len(request.prompt_token_ids))
        texts: list[str] = []
        for number, token_id in enumerate(token_ids, 1):
            ends = is_whole and number == len(token_ids)
            text, reason = self._take(stream, params, token_id, number, ends or number >= most)
            texts.append(text)
            if reason is not None:
                return texts, reason if number >= most else FinishReason.STOP
        return texts, None

    def _take(
        self, stream: TextStream, params: SamplingParams, token_id: int, number: int, is_last: bool
    ) -> tuple[str, FinishReason | None]:
        """Takes the `number`-th output token, counted from 1."""
        if number > params.min_tokens and self._ends(params, token_id):
            return stream.flush(), FinishReason.STOP
        text = stream.push(token_id, may_stop=number >= params.min_tokens)
        if is_last and not stream.stopped:
            text += stream.flush()
            return text, FinishReason.STOP if stream.stopped else FinishReason.LENGTH
        return text, FinishReason.STOP if stream.stopped else None

    def _stream_of(self, sequence: Sequence) -> TextStream:
        if sequence.text is None:
            sequence.text = stream = self._new_stream(sequence.request)
            for number, token_id in enumerate(sequence.request.output_token_ids, 1):
                self._take(stream, sequence.request.sampling, token_id, number, is_last=False)
        assert isinstance(sequence.text, TextStream)
        return sequence.text

    def _new_stream(self, request: Request) -> TextStream:
        params = request.sampling
        detokenizer = make_detokenizer(self._tokenizer, params.shown_special)
        return TextStream(detokenizer, params.stop, shows_stop=params.shows_stop)

    def _ends(self, params: SamplingParams, token_id: int) -> bool:
        return token_id in params.stop_token_ids or (token_id in self._eos and not params.ignore_eos)
