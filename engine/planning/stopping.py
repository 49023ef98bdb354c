"""Stop strings and stop tokens: where a sequence ends, and which text can be shown before that is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from functools import lru_cache

from penstock.engine.planning.detokenizer import Detokenizer, make_detokenizer
from penstock.engine.planning.request import FinishReason, Request, SamplingParams, Sequence
from penstock.engine.planning.thinking import Thinking
from penstock.engine.planning.tokenizer import Tokenizer


class StopStrings:
    """Finds the first of several strings to end in a text that comes a character at a time.

    The automaton of Aho and Corasick ("Efficient string matching", CACM 1975): a state is the longest end of the text
    that one of the strings begins with, so a step costs the same however many strings there are and however long.
    """

    __slots__ = ("_fallback", "_next", "depth", "found")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]
        """The number of characters at the end of the text that could still become one of the strings, by state."""
        self.found = [0]
        """The length of the longest string that ends in a state; 0 if none does."""
        for string in strings:
            self._add(string)
        self._link()

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def _add(self, string: str) -> None:
        state = 0
        for depth, character in enumerate(string, 1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(depth)
                self.found.append(0)
            state = self._next[state][character]
        self.found[state] = len(string)

    def _link(self) -> None:
        """Sets the fallbacks, breadth first: the fallback of a state is less deep and must be complete before it."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self.found[state] = max(self.found[state], self.found[self._fallback[state]])
            for character, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], character)
                queue.append(child)


@lru_cache(maxsize=256)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings)


class TextStream:
    """The text of one sequence, watched for stop strings.

    A stop string is found wherever token borders fall, and no part of it is ever shown, unless it is `shows_stop`: text
    that could still become one is held back until it cannot.
    """

    __slots__ = ("_detokenizer", "_held", "_shows_stop", "_state", "_stops", "stop")

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], *, shows_stop: bool = False) -> None:
        self._detokenizer = detokenizer
        self._shows_stop = shows_stop
        self._stops = stop_strings(stops) if any(stops) else None
        self._state = 0
        self._held = ""
        self.stop: str | None = None
        """The stop string that was found; then the text is complete."""

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Returns the text that can be shown with this token. Without `may_stop`, a stop string is ordinary text."""
        text = self._detokenizer.push(token_id)
        return text if self._stops is None else self._watch(self._stops, text, may_stop)

    def flush(self) -> str:
        """Returns the rest of the text, when no more tokens come."""
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        shown = self._watch(self._stops, rest, may_stop=True)
        held, self._held = self._held, ""
        return shown + held

    def _watch(self, stops: StopStrings, text: str, may_stop: bool) -> str:
        state, whole = self._state, self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            state = stops.step(state, character)
            if stops.found[state] and may_stop:
                shown = end - stops.found[state]
                self.stop, self._held = whole[shown:end], ""
                return whole[: end if self._shows_stop else shown]
            if stops.found[state]:
                state = 0
        self._state = state
        keep = len(whole) - stops.depth[state]
        self._held = whole[keep:]
        return whole[:keep]


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
