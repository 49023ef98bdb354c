"""Formats of calls of tools, as families of models write them: descriptions that parsers and grammars go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

QUOTE = '<|"|>'
"""The quotation mark of Gemma 4's calls."""


class Style(Enum):
    """The ways in which a tool's name and its arguments stand in a call."""

    JSON = auto()
    """One object has both."""
    NAMED = auto()
    """The arguments are an object after the name."""
    FENCED = auto()
    """The same, with markers around each call."""
    TAGGED = auto()
    """The name and each argument stand between tags."""
    PYTHON = auto()
    """`name(key=literal)`."""
    GEMMA = auto()
    """`call:name{key:value}`, where keys are bare and QUOTE stands around texts."""
    HARMONY = auto()
    """A message to the tool, whose text is an object; other messages are reasoning and text."""


HARMONY = "harmony"
"""The name of gpt-oss's format, of calls and of reasoning; see `gateway.wire.tools.harmony`."""


class SectionLayout(NamedTuple):
    """The texts before the first call of a section, between two of them, and after the last."""

    start: str = ""
    between: str = ""
    """The text between two calls; without it a section is one call."""
    end: str = ""


_ONE = SectionLayout()


class ArgumentForm(NamedTuple):
    """The texts around an argument's key and its value, `pad` on both sides of a value, and the text between two."""

    key: tuple[str, str]
    value: tuple[str, str] = ("", "")
    pad: str = ""
    quote: str = ""
    """The mark on both sides of a value that is text; without it, text ends where the value does."""
    between: str = ""


class CallForm(NamedTuple):
    """The way in which a call is written."""

    style: Style
    before: str = ""
    """The text before the tool's name."""
    after: str = ""
    """The text after it."""
    argument: ArgumentForm | None = None
    """The form of each argument; None if all of them are one object in JSON."""
    end: tuple[str, ...] = ()
    """The texts after the arguments."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A section of calls stands between an opening and its closing; a reply may have several."""

    call: CallForm
    opening: str = ""
    """The marker of a section; without it calls are all of a reply, and only names of the request's tools make one."""
    closing: str = ""
    layout: SectionLayout = _ONE
    _: KW_ONLY
    signs: tuple[str, ...] = ()
    """A chat template that has one of these in it, or the opening if there are none, speaks of this format."""
    has_lines: bool = False
    """Newlines may stand inside the opening and the closing."""
    tag: str = ""
    """The marker that may stand before calls that are all of a reply, in JSON or as Python writes them."""
    after_name: str = ""
    """The text after a name that no object has, where a model writes either form."""
    has_cdata: bool = False
    """A value between tags may stand between the markers of XML's CDATA, and then end at these only."""
    others: tuple[str, ...] = ()
    """Further markers that models write."""
    has_short_ids: bool = False
    """Templates take ids of nine letters and digits only."""

    @property
    def style(self) -> Style:
        return self.call.style

    def is_in(self, template: str) -> bool:
        """Returns whether a chat template speaks of this format."""
        return any(sign in template for sign in self.signs or (self.opening,))

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that the format is written with; some vocabularies have special tokens for them."""
        call, texts = self.call, (self.opening, self.closing, self.tag, self.after_name, *self.others)
        if self.style in (Style.NAMED, Style.FENCED, Style.TAGGED, Style.HARMONY):
            texts += (call.before, call.after, *call.end)
            texts += () if call.argument is None else (*call.argument.key, *call.argument.value)
        return tuple(filter(None, texts))


_LIST = SectionLayout("[", ", ", "]")
_LINES = SectionLayout(between="\n")
_PARAMETER = ArgumentForm(("<parameter=", ">"), ("", "</parameter>"))
_INVOKED = ArgumentForm(('<parameter name="', '">'), ("", "</parameter>"))
_PARAM = ArgumentForm(('<param name="', '">'), ("", "</param>"))
_ARG = ArgumentForm(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))

_JSON = CallForm(Style.JSON, '{"name": "', '", "arguments": ', end=("}",))
_LLAMA_JSON = _JSON._replace(after='", "parameters": ')
_COHERE = _LLAMA_JSON._replace(before='{"tool_call_id": "0", "tool_name": "')
_FENCED = CallForm(Style.FENCED, "<tool_call>", "\n```json\n", end=("\n```", "</tool_call>"))
_PYTHON = CallForm(Style.PYTHON, "", "(", ArgumentForm(("", "="), between=", "), (")",))
_GEMMA = CallForm(Style.GEMMA, "call:", "{", ArgumentForm(("", ":"), quote=QUOTE, between=","), ("}",))
_FUNCTION = CallForm(Style.TAGGED, "<function=", ">", _PARAMETER, ("</function>",))
_PADDED = _FUNCTION._replace(argument=_PARAMETER._replace(pad="\n"))
_INVOKE = CallForm(Style.TAGGED, '<invoke name="', '">', _INVOKED, ("</invoke>",))

_MISTRAL = ToolFormat(
    _JSON, "[TOOL_CALLS]", layout=_LIST, after_name="[ARGS]", others=("[CALL_ID]",), has_short_ids=True
)
_LLAMA_3 = ToolFormat(
    _LLAMA_JSON,
    layout=SectionLayout(between="; "),
    signs=('{"name": function name, "parameters": ', "<|python_tag|>"),
    tag="<|python_tag|>",
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    HARMONY: ToolFormat(
        CallForm(Style.HARMONY, after=" <|constrain|>json<|message|>"),
        "<|channel|>commentary to=functions.",
        signs=("<|channel|>commentary",),
        others=("<|start|>", "<|end|>", "<|call|>"),
    ),
    "mistral_args": replace(
        _MISTRAL, call=CallForm(Style.NAMED, after="[ARGS]"), signs=("[ARGS]",), layout=_ONE
    ),
    "mistral": _MISTRAL,
    "seed_oss": ToolFormat(_FUNCTION, "<seed:tool_call>", "</seed:tool_call>", has_lines=True),
    "minimax_m2": ToolFormat(_INVOKE, "<minimax:tool_call>", "</minimax:tool_call>", _LINES, has_lines=True),
    "glm45": ToolFormat(
        CallForm(Style.TAGGED, argument=_ARG), "<tool_call>", "</tool_call>", signs=("<arg_key>",)
    ),
    "qwen3_coder": ToolFormat(_PADDED, "<tool_call>", "</tool_call>", signs=("<parameter=",), has_lines=True),
    "functionary": ToolFormat(CallForm(Style.NAMED, after=">"), "<function=", "</function>"),
    "minicpm5": ToolFormat(
        CallForm(Style.TAGGED, after='">', argument=_PARAM),
        '<function name="',
        "</function>",
        signs=('<param name="',),
        has_cdata=True,
    ),
    "gemma4": ToolFormat(_GEMMA, "<|tool_call>", "<tool_call|>", others=(QUOTE,)),
    "cohere2": ToolFormat(
        _COHERE, "<|START_ACTION|>", "<|END_ACTION|>", SectionLayout("[\n    ", ",\n    ", "\n]")
    ),
    "hunyuan": ToolFormat(
        _JSON, "<tool_calls>", "</tool_calls>", _LIST, signs=("<tool_calls>[",), has_lines=True
    ),
    "hunyuan_dense": ToolFormat(_FENCED, "<tool_calls>", "</tool_calls>", _LINES, signs=("```</tool_call>",)),
    "olmo3": ToolFormat(_PYTHON, "<function_calls>", "</function_calls>", _LINES, has_lines=True),
    "lfm2": ToolFormat(
        _PYTHON,
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        _LIST,
        signs=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
    ),
    "nemotron": ToolFormat(_JSON, "<TOOLCALL>", "</TOOLCALL>", _LIST),
    "functools": ToolFormat(_JSON, "functools", layout=_LIST, signs=("functools[",)),
    "phi4_mini": ToolFormat(
        _JSON, "<|tool_call|>", "<|/tool_call|>", _LIST, signs=("<|/tool_call|>", "<|/tool|>")
    ),
    "granite": ToolFormat(_JSON, "<|tool_call|>", layout=_LIST),
    "hermes": ToolFormat(_JSON, "<tool_call>", "</tool_call>", has_lines=True),
    "llama_pythonic": ToolFormat(
        _PYTHON, "", "<|python_end|>", _LIST, signs=("[func_name1(",), tag="<|python_start|>"
    ),
    "llama4_json": replace(
        _LLAMA_3, signs=("<|python_start|>",), tag="<|python_start|>", closing="<|python_end|>"
    ),
    "llama3_json": _LLAMA_3,
    "glm4": ToolFormat(CallForm(Style.NAMED, after="\n"), signs=("Json 格式表示调用的参数",)),
}
"""The formats of calls, in order: the first with a sign in a chat template is its format."""
