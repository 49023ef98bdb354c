"""Calls in JSON or as Python writes them, and those of the Llama models, which are all of a reply."""

from __future__ import annotations

import re

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
        markers = re.compile(f"{re.escape(closing)}|{re.escape(self._format.tag)}")
        end = yield from self.until(markers, max(len(closing), len(self._format.tag)), self._seen)
        if end[0] != closing:
            raise Malformed
        before, start = self._num_calls, self._at
        self._before = self._text[start : end.start()].rstrip()
        self._at = end.end()
        try:
            yield from super().section()
        except Malformed:
            if self._num_calls == before:
                self._at = start
            self._before = ""
            raise

    def begin(self, name: str) -> None:
        self.say(self._before)
        self._before = ""
        super().begin(name)
