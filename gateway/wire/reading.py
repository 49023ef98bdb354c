"""How the text of a model's replies is understood: which format of calls it has, and which of reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

from engine.planning.grammar import Grammar, GrammarKind
from gateway.http.errors import invalid
from gateway.wire.parsing import ArgumentsDelta, CallBegun, Piece, ReasoningDelta, ReplyParser, TextDelta
from gateway.wire.prompts import Tokenizer
from gateway.wire.tools.coder import Qwen3Coder
from gateway.wire.tools.grammars import Beside, answer_grammar, calls_grammar
from gateway.wire.tools.json_calls import Hermes, LlamaJson, Mistral
from gateway.wire.tools.pythonic import Pythonic
from gateway.wire.tools.scanning import FormatParser, Malformed, Scanner, Steps, Tools
from gateway.wire.tools.use import ToolUse

AUTO, NONE = "auto", "none"
_TAIL_TOKENS = 16
"""Tokens at the end of a prompt among which a marker is looked for."""


class Thinking(NamedTuple):
    """What reasoning is written between."""

    opening: str
    closing: str


TOOL_FORMATS: Mapping[str, type[FormatParser]] = {
    "mistral": Mistral,
    "qwen3_coder": Qwen3Coder,
    "hermes": Hermes,
    "llama_pythonic": Pythonic,
    "llama3_json": LlamaJson,
}
_SIGNS_OF_TOOLS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "llama_pythonic"),
    ("<|python_start|>", "llama_pythonic"),
    ('{"name": function name, "parameters": ', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
)
"""What a chat template has in it, and the format it speaks of; the first that is found decides."""

REASONING_FORMATS = {
    "think": Thinking("<think>", "</think>"),
    "mistral": Thinking("[THINK]", "[/THINK]"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How one reply's text is understood. It is JSON: it goes into journals."""

    tools: str | None = None
    """The format of calls; None if there are none to make."""
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schema of its arguments, by the name of each tool."""
    one_call: bool = False
    """Calls after the first are left out."""
    reasoning: str | None = None
    """The format of reasoning; None if it is text like any other."""
    is_open: bool = False
    """The prompt ends within reasoning."""
    shows_reasoning: bool = True

    @property
    def is_plain(self) -> bool:
        """The text is the answer, as it is."""
        return self.tools is None and self.reasoning is None

    @property
    def markers(self) -> tuple[str, ...]:
        """What must be seen in the text, whether or not it is a special token."""
        calls = () if self.tools is None else TOOL_FORMATS[self.tools].markers
        return (*calls, *(() if self.reasoning is None else REASONING_FORMATS[self.reasoning]))

    def parser_of(self, reply_id: str) -> ReplyParser | None:
        """The same for the only choice; None if there is nothing to be understood."""
        return None if self.is_plain else self.parser(reply_id)

    def parser(self, reply_id: str, choice: int = 0) -> ReplyParser:
        """For one choice of the reply with that id: calls have the same ids whenever its text is parsed."""
        parser: ReplyParser = _Plain()
        if self.tools is not None:
            new_id = partial(_call_id, self.tools, f"{reply_id}/{choice}")
            parser = TOOL_FORMATS[self.tools](Tools(self.schemas, new_id))
        if self.reasoning is not None:
            parser = _Reasoned(REASONING_FORMATS[self.reasoning], self.is_open, parser)
        return _Filtered(self, parser) if self.one_call or not self.shows_reasoning else parser


PLAIN = Reading()


class Formats:
    """Those of one model."""

    def __init__(self, tokenizer: Tokenizer, tools: str = AUTO, reasoning: str = AUTO) -> None:
        """
        Args:
            tools: one of TOOL_FORMATS; NONE; or AUTO, what the chat template looks like.
            reasoning: the same of REASONING_FORMATS.
        """
        template = tokenizer.chat_template or ""
        self._tokenizer = tokenizer
        self.tools = _chosen(tools, template, _SIGNS_OF_TOOLS)
        closings = [(thinking.closing, name) for name, thinking in REASONING_FORMATS.items()]
        self.reasoning = _chosen(reasoning, template, closings)

    def reading(self, prompt: Sequence[int], use: ToolUse, *, shows_reasoning: bool = True) -> Reading:
        """How the replies to a prompt are understood.

        Raises:
            ApiError: 400, if there are tools and nobody knows how the model calls them.
        """
        if use.tools and self.tools is None:
            message = "How this model calls tools is not known; the server's --tool-parser says it."
            raise invalid(message, "tools", "tools_not_supported")
        return Reading(
            tools=self.tools if use.tools else None,
            schemas=use.schemas,
            one_call=use.one_call,
            reasoning=self.reasoning,
            is_open=self.is_open(prompt),
            shows_reasoning=shows_reasoning,
        )

    def grammar(
        self, prompt: Sequence[int], reading: Reading, use: ToolUse, answer: Grammar | None
    ) -> Grammar | None:
        """What a reply looks like: reasoning, and then calls or an answer; None if it is free.

        Args:
            answer: what an answer has to match; a reply that has to call a tool has none.
        """
        thinking = None if reading.reasoning is None else REASONING_FORMATS[reading.reasoning]
        if thinking is not None and self._tail(prompt).endswith(thinking.closing):
            thinking = None
        if use.required or (use.tools and (use.strict or answer is not None)):
            return self._with_calls(reading, use, answer, thinking)
        if answer is None or thinking is None:
            return answer
        text = answer_grammar(self._spelt, thinking, is_open=reading.is_open)
        return Grammar(GrammarKind.LARK, text, answer)

    def _with_calls(
        self, reading: Reading, use: ToolUse, answer: Grammar | None, thinking: Thinking | None
    ) -> Grammar:
        assert reading.tools is not None
        may_answer = not use.required and answer is not None
        beside = Beside.ANSWER if may_answer else Beside.NOTHING if use.required else Beside.TEXT
        schemas = {n: schema for n, schema in use.schemas.items() if not use.required or n in use.required}
        text = calls_grammar(
            reading.tools,
            schemas,
            self._spelt,
            one_call=use.one_call,
            thinking=thinking,
            is_open=reading.is_open,
            newer="[ARGS]" in (self._tokenizer.chat_template or ""),
            beside=beside,
            lenient=() if use.required else schemas.keys() - use.strict,
        )
        return Grammar(GrammarKind.LARK, text, answer if may_answer else None)

    def _spelt(self, marker: str) -> str:
        """As a grammar writes it: special tokens by their ids."""
        special = self._special(marker)
        return json.dumps(marker) if special is None else f"<[{special}]>"

    def _special(self, marker: str) -> int | None:
        """The special token that a marker is."""
        ids = self._tokenizer.encode(marker, parse_special=True)
        return ids[0] if len(ids) == 1 and ids[0] in self._tokenizer.special_ids else None

    def thoughts(self, reading: Reading) -> Thoughts | None:
        """Counts the reasoning of one reply; None if none is told from its text."""
        if reading.reasoning is None:
            return None
        return Thoughts(REASONING_FORMATS[reading.reasoning], reading.is_open, self._tokenizer.token_bytes)

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
        found = map(self._special, reading.markers)
        return frozenset(token_id for token_id in found if token_id is not None)


class Thoughts:
    """Counts the tokens of a reply's choices that are reasoning, its markers included: in each they come first."""

    def __init__(self, thinking: Thinking, is_open: bool, token_bytes: Callable[[int], bytes]) -> None:
        self._opening, self._closing = thinking.opening.encode(), thinking.closing.encode()
        self._is_open = is_open
        self._token_bytes = token_bytes
        self._choices: dict[Hashable, _Begun | None] = {}
        """None for a choice that reasons no more."""

    def count(self, choice: Hashable, token_ids: Iterable[int]) -> int:
        """How many more reasoning tokens a choice has with its next tokens."""
        begun = self._choices.setdefault(choice, _Begun(self._is_open))
        if begun is None:
            return 0
        number = 0
        for token_id in token_ids:
            begun.text += self._token_bytes(token_id)
            begun.num_undecided += 1
            if not begun.is_open:
                said = begun.text.lstrip()
                if said and not (said.startswith(self._opening) or self._opening.startswith(said)):
                    self._choices[choice] = None
                    return number
                begun.is_open, begun.text = said.startswith(self._opening), said
            if begun.is_open:
                number += begun.num_undecided
                begun.num_undecided = 0
                if self._closing in begun.text:
                    self._choices[choice] = None
                    return number
                begun.text = begun.text[1 - len(self._closing) :]
        return number


@dataclass(slots=True)
class _Begun:
    """A choice that reasons, or may be about to."""

    is_open: bool
    text: bytes = b""
    """As much of its end as may have to do with a marker."""
    num_undecided: int = 0


class _Plain:
    """Everything is text."""

    def feed(self, text: str) -> list[Piece]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class _Reasoned(Scanner):
    """Reasoning at the beginning of a reply, and then the answer. Space around reasoning belongs to neither."""

    def __init__(self, thinking: Thinking, is_open: bool, answer: ReplyParser) -> None:
        super().__init__()
        self._thinking = thinking
        self._is_open = is_open
        self._answer = answer

    def parse(self) -> Steps:
        if self._is_open or (yield from self._begins()):
            yield from self.skip(self._thinking.opening)
            yield from self.skip_space()
            yield from self.said_until(self._thinking.closing, ReasoningDelta)
            yield from self.skip_space()
        while True:
            self._pieces += self._answer.feed(self.consume(len(self._text)))
            if self._ended:
                break
            yield
        self._pieces += self._answer.finish()

    def _begins(self) -> Generator[None, None, bool]:
        try:
            start = yield from self.past_space()
        except Malformed:
            return False
        return (yield from self.ahead(self._thinking.opening, start))


class _Filtered:
    """Leaves out what the client does not want to see."""

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


def _chosen(name: str, template: str, signs: Iterable[tuple[str, str]]) -> str | None:
    if name == AUTO:
        return next((format for sign, format in signs if sign in template), None)
    return None if name == NONE else name


def _call_id(format: str, choice: str, number: int) -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    digest = sha256(f"{choice}/{number}".encode()).hexdigest()
    return digest[:9] if format == "mistral" else f"call_{digest[:24]}"
