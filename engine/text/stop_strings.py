"""Stop strings and stop tokens: where a sequence ends, and which text can be shown before that is known."""

from __future__ import annotations

from collections import deque
from functools import lru_cache

from penstock.engine.text.detokenizer import Detokenizer


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
