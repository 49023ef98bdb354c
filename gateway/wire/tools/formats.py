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


class Layout(NamedTuple):
    """The texts before the first call of a section, between two of them, and after the last."""

    start: str = ""
    between: str = ""
    """The text between two calls; without it a section is one call."""
    end: str = ""


_ONE = Layout()


class Tags(NamedTuple):
    """The texts before and after each part of a tagged call, and `pad` on both sides of an argument's value."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    pad: str = ""


@dataclass(frozen=True, slots=True)
class Format:
    """A section of calls stands between an opening and its closing; a reply may have several."""

    style: Style
    signs: tuple[str, ...]
    """A chat template that has one of these in it speaks of this format."""
    opening: str = ""
    """The marker of a section; without it calls are all of a reply, and only names of the request's tools make one."""
    closing: str = ""
    layout: Layout = _ONE
    _: KW_ONLY
    has_lines: bool = False
    """Newlines may stand inside the opening and the closing."""
    tag: str = ""
    """The marker that may stand before calls that are all of a reply, in JSON or as Python writes them."""
    lead: str = ""
    """The members of a call's object before the name."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    after_name: str = ""
    around: tuple[str, ...] = ()
    """The texts before a call's name and after its arguments."""
    tags: Tags | None = None
    has_cdata: bool = False
    """A value between tags may stand between the markers of XML's CDATA, and then end at these only."""
    others: tuple[str, ...] = ()
    """Further markers that models write."""
    has_short_ids: bool = False
    """Templates take ids of nine letters and digits only."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that the format is written with; some vocabularies have special tokens for them."""
        tags = self.tags
        of_tags = () if tags is None else (*tags.name, *tags.key, *tags.value, tags.end)
        texts = (
            *(self.opening, self.closing, self.tag, self.after_name),
            *(*self.around, *of_tags, *self.others),
        )
        return tuple(filter(None, texts))


_LIST = Layout("[", ", ", "]")
_ACTIONS = Layout("[\n    ", ",\n    ", "\n]")
_SEED = Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>")
_QWEN = _SEED._replace(pad="\n")
_INVOKE = Tags(('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), "</invoke>")
_PARAM = Tags(("", '">'), ('<param name="', '">'), ("", "</param>"))
_GLM = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))
_MISTRAL = Format(
    Style.JSON,
    ("[TOOL_CALLS]",),
    "[TOOL_CALLS]",
    layout=_LIST,
    after_name="[ARGS]",
    others=("[CALL_ID]",),
    has_short_ids=True,
)
_LLAMA_3 = Format(
    Style.JSON,
    ('{"name": function name, "parameters": ', "<|python_tag|>"),
    layout=Layout(between="; "),
    tag="<|python_tag|>",
    arguments_key="parameters",
)

TOOL_FORMATS: Mapping[str, Format] = {
    HARMONY: Format(
        Style.HARMONY,
        ("<|channel|>commentary",),
        "<|channel|>commentary to=functions.",
        after_name=" <|constrain|>json<|message|>",
        others=("<|start|>", "<|end|>", "<|call|>"),
    ),
    "mistral_args": replace(_MISTRAL, style=Style.NAMED, signs=("[ARGS]",), layout=_ONE),
    "mistral": _MISTRAL,
    "seed_oss": Format(
        Style.TAGGED,
        ("<seed:tool_call>",),
        "<seed:tool_call>",
        "</seed:tool_call>",
        has_lines=True,
        tags=_SEED,
    ),
    "minimax_m2": Format(
        Style.TAGGED,
        ("<minimax:tool_call>",),
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        Layout(between="\n"),
        has_lines=True,
        tags=_INVOKE,
    ),
    "glm45": Format(Style.TAGGED, ("<arg_key>",), "<tool_call>", "</tool_call>", tags=_GLM),
    "qwen3_coder": Format(
        Style.TAGGED, ("<parameter=",), "<tool_call>", "</tool_call>", has_lines=True, tags=_QWEN
    ),
    "functionary": Format(Style.NAMED, ("<function=",), "<function=", "</function>", after_name=">"),
    "minicpm5": Format(
        Style.TAGGED, ('<param name="',), '<function name="', "</function>", tags=_PARAM, has_cdata=True
    ),
    "gemma4": Format(Style.GEMMA, ("<|tool_call>",), "<|tool_call>", "<tool_call|>", others=(QUOTE,)),
    "cohere2": Format(
        Style.JSON,
        ("<|START_ACTION|>",),
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        _ACTIONS,
        lead='"tool_call_id": "0", ',
        name_key="tool_name",
        arguments_key="parameters",
    ),
    "hunyuan": Format(Style.JSON, ("<tool_calls>[",), "<tool_calls>", "</tool_calls>", _LIST, has_lines=True),
    "hunyuan_dense": Format(
        Style.FENCED,
        ("```</tool_call>",),
        "<tool_calls>",
        "</tool_calls>",
        Layout(between="\n"),
        after_name="\n```json\n",
        around=("<tool_call>", "\n```", "</tool_call>"),
    ),
    "olmo3": Format(
        Style.PYTHON,
        ("<function_calls>",),
        "<function_calls>",
        "</function_calls>",
        Layout(between="\n"),
        has_lines=True,
    ),
    "lfm2": Format(
        Style.PYTHON,
        ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        _LIST,
    ),
    "nemotron": Format(Style.JSON, ("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>", _LIST),
    "functools": Format(Style.JSON, ("functools[",), "functools", layout=_LIST),
    "phi4_mini": Format(
        Style.JSON, ("<|/tool_call|>", "<|/tool|>"), "<|tool_call|>", "<|/tool_call|>", _LIST
    ),
    "granite": Format(Style.JSON, ("<|tool_call|>",), "<|tool_call|>", layout=_LIST),
    "hermes": Format(Style.JSON, ("<tool_call>",), "<tool_call>", "</tool_call>", has_lines=True),
    "llama_pythonic": Format(
        Style.PYTHON,
        ("[func_name1(",),
        closing="<|python_end|>",
        layout=_LIST,
        tag="<|python_start|>",
    ),
    "llama4_json": replace(
        _LLAMA_3, signs=("<|python_start|>",), tag="<|python_start|>", closing="<|python_end|>"
    ),
    "llama3_json": _LLAMA_3,
    "glm4": Format(Style.NAMED, ("Json 格式表示调用的参数",), after_name="\n"),
}
"""The formats of calls, in order: the first with a sign in a chat template is its format."""
