"""Converts messages or text to token ids.

Templates are rendered the way transformers renders them. What users wrote can never become a special token, nor another
one that the template writes to mark turns, calls or results: where their text spells one, that spot is guarded before
rendering and tokenised as plain text. Text that spells none is left as it is, so that its tokens are those of the
reference, whatever the template does with it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.wire.conversation import (
    AnyMessage,
    MessageTransform,
    apply_transforms,
    message_transforms,
    thinking_switches,
)
from penstock.gateway.wire.reading import Formats
from penstock.gateway.wire.rendered import RenderedTexts
from penstock.gateway.wire.tokenizer import Tokenizer

# A noncharacter of Unicode: no text has a use for it, and where it comes in it is replaced.
_GUARD, _REPLACEMENT = "\ufdd0", "\ufffd"
_SLOT = "\ufdd1"
"""Another one, for the place of a text that is rendered once for all that can stand there."""
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
_GUARDED = re.compile(f"({_GUARD}(?:[^{_GUARD}]{_GUARD})+)")
_IN_BRACKETS = re.compile(r"[^\w\s]\S*\w\S*[^\w\s]")
"""The form of marks. Vocabularies also have added tokens for spaces and newlines, which templates are full of."""
_OF_ROLE = re.compile(
    r"[^\w\s]+(system|developer|user|assistant|model|tool|ipython|observation)[^\w\s]+", re.IGNORECASE
)
"""A mark that templates put together of brackets and a message's role."""

_FIM = (
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),
)
"""The tokens before the prefix, before the middle and before the suffix, as model families name them."""
_FILE_MARKS = ("<|file_sep|>", "<file_sep>")
"""The tokens before each file of a project."""


class Prompts:
    """One model's chat template and tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises jinja2.TemplateSyntaxError if the checkpoint's template is broken."""
        self.tokenizer = tokenizer
        self._rendered = RenderedTexts(tokenizer)
        source, environment = tokenizer.chat_template, _environment()
        self._template = None if source is None else environment.from_string(source)
        self._has_tools_in_system = source is not None and "message['tools']" in source
        self.variables = jinja2.meta.find_undeclared_variables(environment.parse(source or ""))
        """The variables that the template reads, messages and tools included."""
        self._reserved = {*_OWN_VARIABLES, *environment.globals, *tokenizer.special_tokens}
        special = _texts(tokenizer, tokenizer.special_ids)
        added = _texts(tokenizer, getattr(tokenizer, "added_ids", ()))  # not every tokenizer tells of such
        marks = {text: i for text, i in added.items() if _is_mark(text, source or "")}
        self._mark_ids = frozenset(marks.values())
        self._marks = _any_of([*special, *marks])
        formats = Formats(tokenizer)
        self.reasons = formats.reasoning is not None
        """Whether the template's model may reason."""
        sayable = formats.markers
        self._marks_never_said = _any_of([*special, *(text for text in marks if text not in sayable)])
        marks_of_files = (_tokens_named(tokenizer, [name]) for name in _FILE_MARKS)
        self._file_mark = next(filter(None, marks_of_files), [])
        self._fim = next((ids for names in _FIM if (ids := _tokens_named(tokenizer, names))), None)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continues: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        owner: str | None = None,
    ) -> list[int]:
        """Returns the tokens of a conversation; with `continues`, those up to the end of its last message's text.

        Args:
            tools: those that the model is told of.
            variables: what else the template may read.
            owner: the tenant, whose earlier turns need not be tokenised again; None to remember nothing.

        Raises:
            ApiError: 400, if there is no template or it does not take these messages or tools.
        """
        if tools and "tools" not in self.variables:
            messages = self._with_tools(messages, tools)
        guarded = self._prepared(messages)
        context = {name: self._guard(value) for name, value in (variables or {}).items()}
        context["tools"] = self._guard(list(tools)) or None
        if not continues:
            return self._encode_rendered(self._render(guarded, add_generation_prompt, context), owner)
        rendered = self._render(guarded, False, context)
        return self._encode_rendered(_cut_after(rendered, guarded[-1]["content"]), owner)

    def behind(self, before: Sequence[int], turn: Sequence[int]) -> list[int]:
        """Returns the tokens of a conversation with another turn, less what a template begins a text with."""
        begin = self.tokenizer.special_tokens.get("bos_token", "") if "bos_token" in self.variables else ""
        begins = bool(begin) and [*turn[:1]] == self.tokenizer.encode(begin, parse_special=True)
        return [*before, *turn[begins:]]

    def branched(
        self,
        messages: Sequence[Mapping[str, Any]],
        lead: str,
        ends: Sequence[str],
        variables: Mapping[str, Any],
    ) -> tuple[list[int], list[list[int]]]:
        """The tokens that conversations begin with which differ in how their last message ends, and the rest of each.

        Args:
            lead: what stands in all of them before the end.

        Raises:
            ApiError: 400, if there is no template or it does not take these messages.
        """
        *before, last = messages
        messages = [*before, {**last, "content": last["content"] + lead + _SLOT}]
        rendered = self._render(self._prepared(messages), True, dict(variables))
        head, slot, tail = rendered.rpartition(_SLOT)
        if not slot:
            message = "The model's chat template does not show the last message as it is."
            raise invalid(message, "messages", "chat_template_error")
        # Encoded behind the lead, for some tokenizers put a space before every text.
        num_lead = len(self._encode_rendered(lead))
        rests = [self._encode_rendered(lead + self._guard(end) + tail)[num_lead:] for end in ends]
        return self._encode_rendered(head), rests

    def check_variables(self, variables: Mapping[str, Any], field: str) -> None:
        """Raises 400 for a variable of the template that is not the client's to set."""
        for name in variables:
            if name in self._reserved:
                raise invalid(f"'{field}' may not set '{name}'.", f"{field}.{name}")

    def around(self, text: str, suffix: str) -> list[int]:
        """Returns the tokens that ask for the text between two others.

        Raises:
            ApiError: 400, if the tokenizer has no tokens for that.
        """
        if self._fim is None:
            raise invalid(
                "This model has no tokens for filling in the middle.", "suffix", "unsupported_value"
            )
        before_text, before_middle, before_suffix = self._fim
        encode = self.tokenizer.encode
        return [before_text, *encode(text), before_suffix, *encode(suffix), before_middle]

    def infill(
        self, prefix: str, suffix: str, middle: str = "", files: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """Returns the tokens that ask for a text between two others.

        Args:
            middle: the beginning of that text.
            files: names and texts of other files of the project, which models know by marks of their own.

        Raises:
            ApiError: 400, if the tokenizer has no tokens for that.
        """
        encode, mark = self.tokenizer.encode, self._file_mark
        token_ids = [i for name, text in files for i in (*mark, *encode(f"{name}\n{text}\n"))]
        if files and mark:
            token_ids += [*mark, *encode("filename\n")]
        return [*token_ids, *self.around(prefix, suffix), *encode(middle)]

    def around_closing(self, closing: str) -> tuple[str, str]:
        """Returns the spaces that the template writes before and after the marker that ends reasoning."""
        question, thought, reply = {"role": "user", "content": "Q"}, "THOUGHT", "SAID"
        answer = {"role": "assistant", "content": reply, "reasoning_content": thought, "thinking": thought}
        try:
            rendered = self._render([question, answer], False, {"tools": None, **thinking_switches(True)})
        except ApiError:
            rendered = ""
        between = rendered.rpartition(thought)[2].partition(reply)[0]
        before, mark, after = between.partition(closing)
        if not mark or before.strip():
            return "\n", "\n\n"
        return before, after[: len(after) - len(after.lstrip())]

    def text(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Returns the tokens of a plain prompt, with those that the tokenizer itself puts around it."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def _render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, context: dict[str, Any]
    ) -> str:
        if self._template is None:
            message = "This model has no chat template; use /v1/completions."
            raise invalid(message, "messages", "no_chat_template")
        try:
            return self._template.render(
                {"documents": None, **context},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self.tokenizer.special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            message = f"The model's chat template does not take these messages: {error}"
            raise invalid(message, "messages", "chat_template_error") from None

    def _prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages in the template's order and shape, with guards in their texts."""
        return [
            {
                key: value if key == "role" else self._guard(value, self._marks_in(message, key))
                for key, value in message.items()
            }
            for message in apply_transforms(messages, self._transforms)
        ]

    @cached_property
    def _transforms(self) -> list[MessageTransform]:
        return message_transforms(self.tokenizer.chat_template or "", self._shows)

    def _shows(self, messages: Sequence[AnyMessage]) -> bool:
        """Whether the template takes these messages and shows their texts, none of which is a mark."""
        try:
            shown = self._render([dict(message) for message in messages], True, {"tools": None})
        except ApiError:
            return False
        return all(message["content"] in shown for message in messages)

    def _marks_in(self, message: Mapping[str, Any], key: str) -> re.Pattern[str]:
        """Returns the marks to look for in a field; the model's own text may have those of reasoning and calls."""
        is_said = message["role"] == "assistant" and key == "content"
        return self._marks_never_said if is_said else self._marks

    def _with_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Puts the tools as a text into the first message, where templates like Phi-4-mini's look for them."""
        if not self._has_tools_in_system:
            raise invalid("This model's chat template takes no tools.", "tools", "tools_not_supported")
        has_system = bool(messages) and messages[0]["role"] in ("system", "developer")
        first = messages[0] if has_system else {"role": "system", "content": ""}
        text = _to_json([tool["function"] for tool in tools])
        return [{**first, "tools": text}, *messages[has_system:]]

    def _guard(self, value: Any, marks: re.Pattern[str] | None = None) -> Any:
        """Sets guards around and between the characters of every mark of the template that a text of the value spells.

        Between them, too: a template that cuts the text would otherwise leave the token behind without its guards.
        """
        marks = marks or self._marks
        if isinstance(value, str):
            return _guarded(value.replace(_GUARD, _REPLACEMENT), marks)
        if isinstance(value, dict):
            return {self._guard(name): self._guard(item, marks) for name, item in value.items()}
        if isinstance(value, list):
            return [self._guard(item, marks) for item in value]
        return value

    def _encode_rendered(self, text: str, owner: str | None = None) -> list[int]:
        if _GUARD not in text:
            if owner is None or len(text) < self._rendered.least_chars:
                return self.tokenizer.encode(text, parse_special=True)
            return self._rendered.encode(text, owner)
        token_ids: list[int] = []
        for i, piece in enumerate(_GUARDED.split(text)):
            if i % 2 == 1:
                token_ids += self.tokenizer.spell_out(piece.replace(_GUARD, ""), self._mark_ids)
                continue
            # A guard can be left alone where the template cut; it still keeps its two sides apart.
            for part in filter(None, piece.split(_GUARD)):
                token_ids += self.tokenizer.encode(part, parse_special=True)
        return token_ids


def _cut_after(rendered: str, content: str) -> str:
    """Cuts a conversation where its last message ends, as transformers does.

    The spaces around it are kept where the template keeps them.

    Raises:
        ApiError: 400, if the template does not show the message as it is.
    """
    text = content.strip()
    at = rendered.rfind(text)
    if not text or at < 0:
        message = (
            "The last message cannot be continued: it is empty, or the model's chat template changes it."
        )
        raise invalid(message, "continue_final_message", "chat_template_error")
    kept = content.lstrip()
    end = at + len(kept if rendered.startswith(kept, at) else text)
    return rendered[:end]


def _tokens_named(tokenizer: Tokenizer, names: Sequence[str]) -> list[int] | None:
    """Returns the tokens that are spelt like this; None if one of them is no single token."""
    encoded = [tokenizer.encode(name, parse_special=True) for name in names]
    are_tokens = all(
        len(ids) == 1 and tokenizer.token_bytes(ids[0]) == name.encode()
        for ids, name in zip(encoded, names, strict=True)
    )
    return [ids[0] for ids in encoded] if are_tokens else None


def _is_mark(text: str, template: str) -> bool:
    """Whether a template writes a token as a mark."""
    return bool(_OF_ROLE.fullmatch(text) or (_IN_BRACKETS.fullmatch(text) and text in template))


def _with_guards(mark: re.Match[str]) -> str:
    return _GUARD + "".join(character + _GUARD for character in mark[0])


def _guarded(text: str, marks: re.Pattern[str]) -> str:
    """Sets guards in every spot that spells one of these; in the whole text, if it does so once it is normalized.

    Tokenizers that normalize a text find a token in letters of other widths, too.
    """
    text = marks.sub(_with_guards, text)
    if unicodedata.is_normalized("NFKC", text) or not marks.search(unicodedata.normalize("NFKC", text)):
        return text
    return _GUARD + "".join(character + _GUARD for character in text.replace(_GUARD, ""))


def _texts(tokenizer: Tokenizer, token_ids: Iterable[int]) -> dict[str, int]:
    """The ids of these tokens by their texts."""
    texts = {tokenizer.token_bytes(i).decode(errors="replace"): i for i in token_ids}
    return {text: i for text, i in texts.items() if text}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what a model is trained to say; it leaves no trace in the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raises 400 for an id that the model has no token for."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise invalid(f"'{field}' has a token id outside the vocabulary of {vocab_size}.", field)
