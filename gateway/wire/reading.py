"""Readings of a model's replies: the formats in which they call tools and reason, found in its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

from penstock.engine.planning.grammar import Grammar, GrammarKind
from penstock.engine.planning.thinking import ThinkingBudget
from penstock.gateway.http.errors import invalid
from penstock.gateway.wire.parsing import (
    ArgumentsDelta,
    CallBegun,
    Piece,
    ReasoningDelta,
    ReplyParser,
    TextDelta,
)
from penstock.gateway.wire.tokenizer import Tokenizer
from penstock.gateway.wire.tools.formats import HARMONY, TOOL_FORMATS, Format, Style
from penstock.gateway.wire.tools.gemma import Gemma
from penstock.gateway.wire.tools.grammars import Beside, answer_grammar, calls_grammar
from penstock.gateway.wire.tools.harmony import Harmony
from penstock.gateway.wire.tools.json_calls import Fenced, JsonCalls
from penstock.gateway.wire.tools.llama import Either, Llama
from penstock.gateway.wire.tools.scanning import NO_MARKER, FormatParser, Scanner, Steps, Tools
from penstock.gateway.wire.tools.tagged import Tagged
from penstock.gateway.wire.tools.use import ToolUse

AUTO, NONE = "auto", "none"
_TAIL_TOKENS = 16
"""The tokens at the end of a prompt among which a marker is looked for."""


_PARSERS: Mapping[Style, type[FormatParser]] = {
    Style.JSON: JsonCalls,
    Style.NAMED: JsonCalls,
    Style.FENCED: Fenced,
    Style.TAGGED: Tagged,
    Style.PYTHON: Either,
    Style.GEMMA: Gemma,
}


class Thinking(NamedTuple):
    """The markers that reasoning is written between."""

    opening: str
    closing: str


REASONING_FORMATS: Mapping[str, Thinking] = {
    HARMONY: Thinking("<|channel|>analysis<|message|>", "<|end|>"),
    "minimax_m2": Thinking("<think>", "</think>"),
    "think_answer": Thinking("<think>", "</think>"),
    "think_response": Thinking("<think>", "</think>"),
    "think": Thinking("<think>", "</think>"),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "seed_oss": Thinking("<seed:think>", "</seed:think>"),
    "gemma4": Thinking("<|channel>thought", "<channel|>"),
    "cohere2": Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    "cohere2_text": Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    "granite_words": Thinking("Here is my thought process:", "Here is my response:"),
}
"""The formats of reasoning; a chat template's is the first one whose closing, answer markers and sign are in it."""
_ANSWERS: Mapping[str | None, tuple[str, str]] = {
    HARMONY: ("<|channel|>final<|message|>", "<|return|>"),
    "think_answer": ("<answer>", "</answer>"),
    "think_response": ("<response>", "</response>"),
    "cohere2": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "cohere2_text": ("<|START_TEXT|>", "<|END_TEXT|>"),
}
"""The markers around the answer in some of these formats."""
_SIGNS = {"minimax_m2": ("<minimax:tool_call>",)}
"""More that a chat template has of some of them."""
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
        return (*calls, *thinking, *_ANSWERS.get(self.reasoning, ()))

    def parser(self, reply_id: str, choice: int = 0) -> ReplyParser:
        """Returns the parser of one choice of the reply with that id, from which the ids of its calls follow."""
        parser: ReplyParser = _Plain()
        make = partial(self._calls_parser, reply_id, choice)
        if self.tools is not None:
            parser = make()
        if self.reasoning is not None and not isinstance(parser, Harmony):
            parser = self.reasoning_parser(parser)
            format = None if self.tools is None else TOOL_FORMATS[self.tools]
            if isinstance(parser, _Reasoned) and format is not None and format.opening and format.closing:
                parser = _Unclosed(parser, format, self.schemas, make)
        return _Filtered(self, parser) if self.one_call or not self.shows_reasoning else parser

    def _calls_parser(self, reply_id: str, choice: int) -> ReplyParser:
        assert self.tools is not None
        tools = Tools(self.schemas, partial(_call_id, self.tools, f"{reply_id}/{choice}"))
        if self.tools == HARMONY:
            return Harmony(tools, tells_reasoning=self.reasoning == HARMONY, is_open=self.is_open)
        format = TOOL_FORMATS[self.tools]
        return (Llama if format.tag else _PARSERS[format.style])(format, tools)

    def reasoning_parser(self, answer: ReplyParser) -> Scanner:
        """Returns the parser of reasoning, which gives what follows it to another."""
        assert self.reasoning is not None
        if self.reasoning == HARMONY:
            tools = None if self.tools is None else Tools(self.schemas, str)
            return Harmony(tools, tells_reasoning=True, is_open=self.is_open)
        return _Reasoned(self.reasoning, self.is_open, answer)


PLAIN = Reading()


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
        signs = {name: [(sign,) for sign in format.signs] for name, format in TOOL_FORMATS.items()}
        self.tools = _chosen(tools, template, signs)
        ends = {
            name: [(format.closing, *_ANSWERS.get(name, ()), *_SIGNS.get(name, ()))]
            for name, format in REASONING_FORMATS.items()
        }
        self.reasoning = _chosen(reasoning, template, ends)
        self._shown: dict[tuple[str | None, str | None], frozenset[int]] = {}
        """The special tokens that `shown` found, by formats."""

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
        self, prompt: Sequence[int], reading: Reading, use: ToolUse, answer: Grammar | None
    ) -> Grammar | None:
        """Returns the grammar of a reply, reasoning and then calls or an answer; None if it is free.

        Args:
            answer: what an answer has to match; a reply that has to call a tool has none.
        """
        thinking = self._thinking(prompt, reading)
        if use.required or (use.tools and (use.strict or answer is not None)):
            return self._with_calls(reading, use, answer, thinking)
        if answer is None or thinking is None:
            return answer
        if reading.reasoning == HARMONY:
            return self._with_calls(replace(reading, tools=HARMONY), use, answer, thinking)
        text = answer_grammar(self._spelt, thinking, is_open=reading.is_open)
        return Grammar(GrammarKind.LARK, text, answer)

    def _thinking(self, prompt: Sequence[int], reading: Reading) -> Thinking | None:
        """Returns the markers of the reasoning that may come, or that a prompt has begun; None if it is over."""
        name, tail = HARMONY if reading.tools == HARMONY else reading.reasoning, self._tail(prompt)
        if name is None:
            return None
        thinking = REASONING_FORMATS[name]
        is_over = tail.endswith(thinking.closing)
        if name == HARMONY:
            is_over = not (reading.is_open or tail.endswith(_NEXT))
        return None if is_over else thinking

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
            beside=beside,
            lenient=() if use.required else schemas.keys() - use.strict,
        )
        return Grammar(GrammarKind.LARK, text, answer if may_answer else None)

    def _spelt(self, marker: str) -> str:
        """Returns a marker as grammars write it: special tokens by their ids, the text between them as it is."""
        found, text = [], b""
        for token_id in self._tokenizer.encode(marker, parse_special=True):
            if token_id not in self._tokenizer.special_ids:
                text += self._tokenizer.token_bytes(token_id)
                continue
            found += [json.dumps(text.decode()), f"<[{token_id}]>"] if text else [f"<[{token_id}]>"]
            text = b""
        if not found:
            return json.dumps(marker)
        return " ".join(found + [json.dumps(text.decode())] * bool(text))

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
            answer = _ANSWERS[HARMONY][0]
            # A call begins like a text beside calls: the model still chooses between the two.
            before, after = "", _NEXT + ("<|channel|>commentary" if reading.tools else answer)
        num_markers = len(self._encoded(before + markers.closing))
        return ThinkingBudget(
            num_tokens=max(0, num_tokens - num_markers),
            opening=markers.opening,
            closing=markers.closing,
            answer=answer,
            is_open=reading.is_open,
            forced=tuple(self._encoded(before + markers.closing + after)),
        )

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=True)

    def thoughts(self, reading: Reading) -> Thoughts | None:
        """Returns a counter of one reply's reasoning tokens; None if its format has none."""
        if reading.reasoning is None:
            return None
        return Thoughts(reading, self._tokenizer.token_bytes)

    def closing(self, prompt: Sequence[int]) -> list[int]:
        """The tokens that end the reasoning which a prompt has begun, and those that begin an answer."""
        if self.reasoning is None:
            return []
        is_open, closing = self.is_open(prompt), REASONING_FORMATS[self.reasoning].closing
        text = f"\n{closing}\n\n" if is_open else ""
        if self.reasoning == HARMONY:
            text = f"{closing}{_NEXT}" * is_open + _ANSWERS[HARMONY][0]
        return self._tokenizer.encode(text, parse_special=True)

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
        if key not in self._shown:
            encode, special = self._tokenizer.encode, self._tokenizer.special_ids
            found = (encode(marker, parse_special=True) for marker in reading.markers)
            self._shown[key] = frozenset(token_id for ids in found for token_id in ids if token_id in special)
        return self._shown[key]


class Thoughts:
    """Counts the tokens of a reply's choices that are reasoning, its markers included."""

    def __init__(self, reading: Reading, token_bytes: Callable[[int], bytes]) -> None:
        self._reading = reading
        self._token_bytes = token_bytes
        self._choices: dict[Hashable, Scanner] = {}
        self.num_over = 0
        """The choices that reason no more."""

    def count(self, choice: Hashable, token_ids: Iterable[int]) -> int:
        """Returns how many of a choice's next tokens are reasoning, earlier undecided ones included."""
        read = self._choices.get(choice)
        if read is None:
            read = self._choices[choice] = self._reading.reasoning_parser(_Plain())
        if read.is_over:
            return 0
        number = 0
        for token_id in token_ids:
            read.num_undecided += 1
            # A byte a character: a token may end within one.
            read.feed(self._token_bytes(token_id).decode("latin-1"))
            if read.reasons is not None:
                number += read.num_undecided * read.reasons
                read.num_undecided = 0
            if read.is_over:
                self.num_over += 1
                break
        return number


class _Plain:
    """The parser of replies that are nothing but text."""

    def feed(self, text: str) -> list[Piece]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class _Reasoned(Scanner):
    """The parser of a reply that may begin with reasoning. Space around reasoning is part of neither."""

    def __init__(self, format: str, is_open: bool, answer: ReplyParser) -> None:
        super().__init__()
        self._thinking = REASONING_FORMATS[format]
        self._around = _ANSWERS.get(format)
        self._is_open = is_open
        self._answer = answer
        self.reasons = is_open or None

    def parse(self) -> Steps:
        if self._is_open or (yield from self.begins(self._thinking.opening)):
            self.reasons = True
            yield from self.skip(self._thinking.opening)
            yield from self.skip_space()
            yield from self.said_until(self._thinking.closing, ReasoningDelta)
        self.is_over = True
        if self.reasons:
            yield from self.skip_space()
        if self._around and (yield from self.begins(self._around[0])):
            yield from self.skip(self._around[0])
            yield from self.skip_space()
            yield from self.said_until(self._around[1], say=self._answer.feed)
            yield from self.skip_space()
        yield from self.said_until(NO_MARKER, say=self._answer.feed)
        self._pieces += self._answer.finish()


class _Unclosed:
    """Adds the calls with which a reply ends whose reasoning never does, as Qwen 3.5 may write it.

    Their text is told as reasoning, too: until the end they might be an example.
    """

    def __init__(
        self, parser: _Reasoned, format: Format, names: Collection[str], make: Callable[[], ReplyParser]
    ) -> None:
        self._parser = parser
        self._format = format
        self._names = names
        self._make = make
        """Returns a parser of calls."""
        self._thoughts = parser.told = []
        self.feed = parser.feed

    def finish(self) -> list[Piece]:
        is_unclosed = bool(self._parser.reasons) and not self._parser.is_over
        pieces = self._parser.finish()
        return pieces + self._calls() if is_unclosed else pieces

    def _calls(self) -> list[Piece]:
        text = "".join(self._thoughts)
        start = len(text)
        while text[:start].rstrip().endswith(self._format.closing):
            start = text.rfind(self._format.opening, 0, start)
            if start < 0:
                return []
        parser = self._make()
        found = parser.feed(text[start:]) + parser.finish()
        calls: list[Piece] = [piece for piece in found if not isinstance(piece, TextDelta)]
        begun = [piece.name for piece in calls if isinstance(piece, CallBegun)]
        return calls if all(name in self._names for name in begun) else []


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


def _chosen(name: str, template: str, signs: Mapping[str, Iterable[Iterable[str]]]) -> str | None:
    """Returns the format of that name; with AUTO, the first one of which some signs are all in the template."""
    if name != AUTO:
        return None if name == NONE else name
    fits = (format for format, ways in signs.items() if any(all(s in template for s in way) for way in ways))
    return next(fits, None)


def _call_id(format: str, choice: str, number: int) -> str:
    digest = sha256(f"{choice}/{number}".encode()).hexdigest()
    return digest[:9] if TOOL_FORMATS[format].has_short_ids else f"call_{digest[:24]}"
