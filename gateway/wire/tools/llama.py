"""Calls in JSON or as Python writes them, and those of the Llama models, which are all of a reply."""

from __future__ import annotations

from penstock.gateway.wire.tools.json_calls import JsonCalls
from penstock.gateway.wire.tools.pythonic import Pythonic
from penstock.gateway.wire.tools.scanning import Malformed, Steps


class Either(JsonCalls, Pythonic):
    """Reads both forms, whichever of them is asked for: Llama 4 and LFM2 write either."""

    def section(self) -> Steps:
        i = yield from self.past_space()
        if self._text[i] == "[":
            i = yield from self.past_space(i + 1)
        yield from (JsonCalls if self._text[i] == "{" else Pythonic).section(self)


class Llama(Either):
    """Reads calls that begin a reply, or stand behind the markers of the format."""

    _before = ""
    """Text that is said when a call begins behind it."""

    def section(self) -> Steps:
        before = self._num_calls
        try:
            yield from super().section()
        except Malformed:
            if self._num_calls > before or not self._opening or not self._format.closing:
                raise
            yield from self._after_text(self._format.closing)

    def _after_text(self, closing: str) -> Steps:
        """Reads calls behind the markers between which Llama 4's template writes what is said before."""
        before, searched = self._num_calls, 0
        while (end := self._text.find(closing, searched)) < 0:
            searched = max(0, len(self._text) - len(closing))
            yield from self.more()
        whole = self.consume(end + len(closing))
        self._before = whole[:end].rstrip()
        try:
            yield from super().section()
        except Malformed:
            self._text, self._before = whole * (self._num_calls == before) + self._text, ""
            raise

    def begin(self, name: str) -> None:
        self.say(self._before)
        self._before = ""
        super().begin(name)
