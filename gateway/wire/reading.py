"""Readings of a model's replies: the formats in which they call tools and reason, found in its chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import groupby
from json.encoder import encode_basestring_ascii
from typing import Any

from penstock.engine.text.grammar import Grammar
from penstock.engine.text.thinking import ThinkingBudget
from penstock.gateway.errors import invalid
from penstock.gateway.wire.memo import Memo
from penstock.gateway.wire.parsing import ArgumentsDelta, CallBegun, Piece, ReasoningDelta, ReplyParser
from penstock.gateway.wire.reasoning import (
    ANSWERS,
    REASONING_FORMATS,
    PlainParser,
    ReasoningMarkers,
    ReasoningScanner,
    Thoughts,
    is_in,
)
from penstock.gateway.wire.tokenizer import Tokenizer
from penstock.gateway.wire.tools.formats import HARMONY, TOOL_FORMATS, Style
from penstock.gateway.wire.tools.gemma import Gemma
from penstock.gateway.wire.tools.grammars import ReplyGrammars
from penstock.gateway.wire.tools.harmony import Harmony
from penstock.gateway.wire.tools.json_calls import Fenced, JsonCalls
from penstock.gateway.wire.tools.pythonic import Llama, Pythonic
from penstock.gateway.wire.tools.scanning import FormatParser, Scanner, Tools
from penstock.gateway.wire.tools.tagged import Tagged
from penstock.gateway.wire.tools.use import ToolUse

AUTO, NONE = "auto", "none"
_TOKENS_BYTES = 1024 * 1024
_TAIL_TOKENS = 16
"""The tokens at the end of a prompt among which a marker is looked for."""


_PARSERS: Mapping[Style, type[FormatParser]] = {
    Style.JSON: JsonCalls,
    Style.NAMED: JsonCalls,
    Style.FENCED: Fenced,
    Style.TAGGED: Tagged,
    Style.PYTHON: Pythonic,
    Style.GEMMA: Gemma,
}
_NEXT = "<|start|>assistant"
"""The marker before each of harmony's messages except the first, for which the prompt ends with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The formats in which one reply's text is read. Its fields are JSON, for it goes into journals."""

    tools: str | None = None
    """The format of calls; None if there are none to make."""
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schema of its arguments, by the name of each tool."""
    one_call: bool = False
    """Calls after the first are left out."""
    reasoning: str | None = None
    """The format of reasoning; None if it is text like any other."""
    is_open: bool = False
    """Whether the prompt ends within reasoning."""
    shows_reasoning: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that must be seen in the text, special tokens or not."""
        name = self.tools or (HARMONY if self.reasoning == HARMONY else None)
        calls = () if name is None else TOOL_FORMATS[name].markers
        thinking = () if self.reasoning is None else REASONING_FORMATS[self.reasoning]
        return (*calls, *thinking, *ANSWERS.get(self.reasoning, ()))

    def parser(self, reply_id: str, choice: int = 0) -> ReplyParser:
        """Returns the parser of one choice of the reply with that id, from which the ids of its calls follow."""
        parser: ReplyParser = PlainParser()
        if self.tools is not None:
            parser = self._calls_parser(self.tools, partial(_call_id, self.tools, f"{reply_id}/{choice}"))
        if self.reasoning is not None and not isinstance(parser, Harmony):
            parser = self.reasoning_parser(parser)
        return _Filtered(self, parser) if self.one_call or not self.shows_reasoning else parser

    def reasoning_parser(self, answer: ReplyParser) -> Scanner:
        """Returns the parser of reasoning, which gives what follows it to another."""
        assert self.reasoning is not None
        if self.reasoning == HARMONY:
            return self._harmony(None if self.tools is None else Tools(self.schemas, str))
        return ReasoningScanner(self.reasoning, self.is_open, answer)

    def _calls_parser(self, name: str, new_id: Callable[[int], str]) -> FormatParser:
        tools, format = Tools(self.schemas, new_id), TOOL_FORMATS[name]
        if name == HARMONY:
            return self._harmony(tools)
        return (Llama if format.tag else _PARSERS[format.style])(format, tools)

    def _harmony(self, tools: Tools | None) -> Harmony:
        return Harmony(tools, tells_reasoning=self.reasoning == HARMONY, is_open=self.is_open)


PLAIN = Reading()


def needs_grammar(use: ToolUse, answer: Grammar | None) -> bool:
    """Returns whether calls of tools have to be bounded: by their schemas, or against an answer with a grammar."""
    return bool(use.required or (use.tools and (use.strict or answer is not None)))


class Formats:
    """The formats of one model's replies."""

    def __init__(self, tokenizer: Tokenizer, tools: str = AUTO, reasoning: str = AUTO) -> None:
        """
        Args:
            tools: one of TOOL_FORMATS; NONE; or AUTO, what the chat template looks like.
            reasoning: the same of REASONING_FORMATS.
        """
        template = tokenizer.chat_template or ""
        self._tokenizer = tokenizer
        self._tokens = Memo[str, tuple[int, ...]](_TOKENS_BYTES)
        self._grammars = ReplyGrammars(self._spelt)
        self._shown: dict[tuple[str | None, str | None], frozenset[int]] = {}
        special = map(tokenizer.token_bytes, tokenizer.special_ids)
        self._special_firsts = frozenset(text.decode(errors="replace")[:1] for text in special)
        """The characters with which special tokens begin."""
        self._without: dict[str, set[int]] = {}
        """The tokens without a character that begins a marker, as far as they were looked at; see Thoughts."""
        self.tools = _chosen(tools, (name for name, format in TOOL_FORMATS.items() if format.is_in(template)))
        self.reasoning = _chosen(reasoning, (name for name in REASONING_FORMATS if is_in(name, template)))

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that replies may have in them."""
        return Reading(tools=self.tools, reasoning=self.reasoning).markers

    def reading(self, prompt: Sequence[int], use: ToolUse, *, shows_reasoning: bool = True) -> Reading:
        """Returns how the replies to a prompt are read.

        Raises:
            ApiError: 400, if there are tools and nobody knows how the model calls them.
        """
        if use.tools and self.tools is None:
            message = "How this model calls tools is not known; the server's --tool-parser says it."
            raise invalid(message, "tools", "tools_not_supported")
        return Reading(
            tools=self.tools if use.tools else None,
            schemas=use.schemas if use.tools else {},
            one_call=use.one_call,
            reasoning=self.reasoning,
            is_open=self.is_open(prompt),
            shows_reasoning=shows_reasoning,
        )

    def grammar(
        self, prompt: Sequence[int], reading: Reading, use: ToolUse, answer: Grammar | None, tenant: str = ""
    ) -> Grammar | None:
        """Returns the grammar of a reply, reasoning and then calls or an answer; None if it is free.

        Args:
            answer: what an answer has to match; a reply that has to call a tool has none.
            tenant: whose request it is: nobody learns from the time that it takes what tools others have.

        Raises:
            ApiError: 400, if the tools are too large for a grammar.
        """
        thinking = self._thinking(prompt, reading)
        if not needs_grammar(use, answer) and (answer is None or thinking is None):
            return answer
        tools = reading.tools or (HARMONY if reading.reasoning == HARMONY else None)
        return self._grammars.grammar(tools, thinking, reading.is_open, use, answer, tenant)

    def _thinking(self, prompt: Sequence[int], reading: Reading) -> ReasoningMarkers | None:
        """Returns the markers of the reasoning that may come, or that a prompt has begun; None if it is over."""
        name, tail = HARMONY if reading.tools == HARMONY else reading.reasoning, self._tail(prompt)
        if name is None:
            return None
        thinking = REASONING_FORMATS[name]
        is_over = tail.endswith(thinking.closing)
        if name == HARMONY:
            is_over = not (reading.is_open or tail.endswith(_NEXT))
        return None if is_over else thinking

    def _spelt(self, marker: str) -> str:
        """Returns a marker as grammars write it: special tokens by their ids, the text between them as it is."""
        special = self._tokenizer.special_ids
        token_ids = () if self._special_firsts.isdisjoint(marker) else self._encoded(marker)
        if special.isdisjoint(token_ids):
            return encode_basestring_ascii(marker)
        parts: list[str] = []
        for is_special, run in groupby(token_ids, special.__contains__):
            if is_special:
                parts += [f"<[{token_id}]>" for token_id in run]
            else:
                text = b"".join(map(self._tokenizer.token_bytes, run))
                parts.append(encode_basestring_ascii(text.decode()))
        return " ".join(parts)

    def budget(
        self,
        prompt: Sequence[int],
        reading: Reading,
        num_tokens: int,
        spaces: Callable[[str], tuple[str, str]],
    ) -> ThinkingBudget | None:
        """Returns the bound on the reasoning of a reply, markers included; None if none may come.

        Args:
            spaces: returns what the model writes before and after the marker that ends reasoning.
        """
        markers = None if reading.reasoning is None else self._thinking(prompt, reading)
        if markers is None:
            return None
        before, after = spaces(markers.closing)
        answer = ""
        if reading.reasoning == HARMONY:
            answer = ANSWERS[HARMONY][0]
            # A call begins like a text beside calls: the model still chooses between the two.
            before, after = "", _NEXT + ("<|channel|>commentary" if reading.tools else answer)
        num_markers = len(self._encoded(before + markers.closing))
        return ThinkingBudget(
            num_tokens=max(0, num_tokens - num_markers),
            opening=markers.opening,
            closing=markers.closing,
            answer=answer,
            is_open=reading.is_open,
            forced=self._encoded(before + markers.closing + after),
        )

    def _encoded(self, text: str) -> tuple[int, ...]:
        return self._tokens.get(text, lambda: tuple(self._tokenizer.encode(text, parse_special=True)))

    def thoughts(self, reading: Reading) -> Thoughts | None:
        """Returns a counter of one reply's reasoning tokens; None if its format has none."""
        if reading.reasoning is None:
            return None
        first = REASONING_FORMATS[reading.reasoning].closing[0]
        make = partial(reading.reasoning_parser, PlainParser())
        return Thoughts(make, first, self._tokenizer.token_bytes, self._without.setdefault(first, set()))

    def closing(self, prompt: Sequence[int]) -> list[int]:
        """The tokens that end the reasoning which a prompt has begun, and those that begin an answer."""
        if self.reasoning is None:
            return []
        is_open, closing = self.is_open(prompt), REASONING_FORMATS[self.reasoning].closing
        text = f"\n{closing}\n\n" if is_open else ""
        if self.reasoning == HARMONY:
            text = f"{closing}{_NEXT}" * is_open + ANSWERS[HARMONY][0]
        return list(self._encoded(text))

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends within reasoning that it has begun."""
        if self.reasoning is None:
            return False
        return self._tail(prompt).endswith(REASONING_FORMATS[self.reasoning].opening)

    def _tail(self, prompt: Sequence[int]) -> str:
        """The end of a prompt's text, without space."""
        return self._tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special=False).rstrip()

    def shown(self, reading: Reading) -> frozenset[int]:
        """The special tokens that a reply's text must have in it."""
        key = reading.tools, reading.reasoning
        if (shown := self._shown.get(key)) is None:
            token_ids = {token_id for marker in reading.markers for token_id in self._encoded(marker)}
            shown = self._shown[key] = self._tokenizer.special_ids & token_ids
        return shown


class _Filtered:
    """A parser that leaves out what the client does not want to see."""

    def __init__(self, reading: Reading, parser: ReplyParser) -> None:
        self._reading = reading
        self._parser = parser

    def feed(self, text: str) -> list[Piece]:
        return list(filter(self._is_shown, self._parser.feed(text)))

    def finish(self) -> list[Piece]:
        return list(filter(self._is_shown, self._parser.finish()))

    def _is_shown(self, piece: Piece) -> bool:
        if isinstance(piece, CallBegun | ArgumentsDelta):
            return not (self._reading.one_call and piece.index)
        return self._reading.shows_reasoning or not isinstance(piece, ReasoningDelta)


def _chosen(name: str, fitting: Iterator[str]) -> str | None:
    """Returns the format of that name; with AUTO, the first one that fits."""
    if name == AUTO:
        return next(fitting, None)
    return None if name == NONE else name


def _call_id(format: str, choice: str, number: int) -> str:
    digest = sha256(f"{choice}/{number}".encode()).hexdigest()
    return digest[:9] if TOOL_FORMATS[format].has_short_ids else f"call_{digest[:24]}"
