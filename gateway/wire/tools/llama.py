"""Calls of the Llama models, which are all of a reply: in JSON, or as Python writes them."""

from __future__ import annotations

from gateway.wire.tools.json_calls import JsonCalls
from gateway.wire.tools.pythonic import Pythonic
from gateway.wire.tools.scanning import Malformed, Steps


class Llama(JsonCalls, Pythonic):
    """Reads both forms, whichever of them the chat template asks for: Llama 4 writes either."""

    def section(self) -> Steps:
        closing, skipped = self._format.closing, ""
        if closing and (yield from self.begins(closing)):
            # Llama 4's template writes what is said before calls between its markers, be it nothing.
            skipped = self.consume(self._text.index(closing) + len(closing))
        try:
            yield from self._either()
        except Malformed:
            self._text = skipped * (not self._num_calls) + self._text
            raise

    def _either(self) -> Steps:
        i = yield from self.past_space()
        if self._text[i] == "[":
            i = yield from self.past_space(i + 1)
        yield from (JsonCalls if self._text[i] == "{" else Pythonic).section(self)
