"""Request bodies and queries of the Responses API, checked the way those of the other endpoints are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from penstock.gateway.errors import ApiError, invalid, unsupported
from penstock.gateway.limits import Limits
from penstock.gateway.wire.dialects import BUDGET_NAMES, NAMES, Arguments
from penstock.gateway.wire.efforts import Reasoned
from penstock.gateway.wire.mistakes import missing
from penstock.gateway.wire.schemas import (
    CHOICES,
    OPEN,
    Metadata,
    SamplingFields,
    Schema,
    ToolName,
    Variables,
    check_counts,
    check_metadata,
)
from penstock.gateway.wire.strict import (
    TOLERANT,
    Ignored,
    KnownKinds,
    Many,
    Most,
    StrictBody,
    TolerantBody,
    validated,
)
from penstock.gateway.wire.structured import ANY_OBJECT, Form, schema_grammar

MAX_LISTED = 100
DEFAULT_LISTED = 20

_MAX_SEQUENCE_DIGITS = 18

Role = Literal["user", "assistant", "system", "developer"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"

# What else could be included belongs to items that no reply of this server has.
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""The prefixes of ids by kind of item."""
ITEM_PREFIXES = tuple(_PREFIXES.values())
_PARTS = Most("max_content_parts")


# There may be thousands of them: each is a plain dict.
@with_config(TOLERANT)
class TextPart(TypedDict):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: NotRequired[list[object] | None]
    logprobs: NotRequired[list[object] | None]
    prompt_cache_breakpoint: NotRequired[None]


class InputMessage(TolerantBody):
    """A message of the client's, or one that this API returned and gets back."""

    type: Literal["message"] | None = None
    role: Role
    content: str | Annotated[Many[TextPart], Field(min_length=1), _PARTS]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class InputCall(TolerantBody):
    """A call of a tool that a response made, given back."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments
    id: str | None = None
    status: ItemStatus | None = None


class InputCallOutput(TolerantBody):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[Many[TextPart], _PARTS]
    id: str | None = None
    status: ItemStatus | None = None


@with_config(TOLERANT)
class SummaryText(TypedDict):
    type: Literal["summary_text"]
    text: str


@with_config(TOLERANT)
class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(TolerantBody):
    """Reasoning of a response, given back."""

    type: Literal["reasoning"]
    summary: Annotated[Many[SummaryText], _PARTS] = Field(default_factory=list)
    content: Annotated[Many[ReasoningText], _PARTS] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: ItemStatus | None = None


def _kind(item: object) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind or "message")


# The tags are capitalised: the path of a field does not show them.
InputItem = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[InputCall, Tag("Call")]
    | Annotated[InputCallOutput, Tag("Output")]
    | Annotated[InputReasoning, Tag("Reasoning")],
    Discriminator(lambda item: _TAGS.get(_kind(item), "Message")),
    KnownKinds(tuple(_PREFIXES)),
]
_TAGS = {"function_call": "Call", "function_call_output": "Output", "reasoning": "Reasoning"}
InputItems = Annotated[Many[InputItem], Most("max_messages")]


@with_config(OPEN)
class FunctionTool(TypedDict):
    type: Literal["function"]
    name: ToolName
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class NamedTool(StrictBody):
    type: Literal["function"]
    name: str


class AllowedTools(StrictBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[NamedTool]


class ReasoningConfig(StrictBody):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Taken: what is told is the reasoning itself."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(StrictBody):
    """The form of the answer. `strict` changes nothing: every answer is held to its schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(StrictBody):
    format: TextFormat | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Ignored(unless="medium")] = None


def _its_id(conversation: object) -> object:
    """Returns the id where an object has nothing else: OpenAI takes either."""
    if isinstance(conversation, dict) and conversation.keys() == {"id"}:
        return conversation["id"]
    return conversation


class ResponseBody(Reasoned, SamplingFields):
    """`POST /v1/responses`."""

    NOT_SUPPORTED = frozenset(
        {
            "access_programs",
            "background_options",
            "context_management",
            "image",
            "max_tokens",
            "moderation",
            "n",
            "prompt",
            "prompt_cache_options",
        }
    )
    ALIASES: ClassVar[Mapping[str, str]] = {**NAMES, **BUDGET_NAMES}
    KINDS: ClassVar[Mapping[str, frozenset[str]]] = {"tools": frozenset({"function"})}

    input: str | Annotated[InputItems, Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    previous_response_id: str | None = None
    conversation: Annotated[str, BeforeValidator(_its_id)] | None = None
    background: bool | None = None
    store: bool | None = None

    # Kept with the response, which must be text that can be written down.
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Accepted as long as they ask for nothing that this server does not do.
    include: Many[Includable] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool | AllowedTools | None, CHOICES] = (
        None
    )
    tools: Annotated[Many[FunctionTool], Most("max_tools")] | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: Variables | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Returns the number of likely tokens to report at each position; None without log probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def seals_reasoning(self) -> bool:
        return SEALED in (self.include or ())

    @property
    def stored(self) -> bool:
        """Returns whether the response is kept, so that it can be fetched and continued later."""
        return self.store is not False


class InputTokensBody(ResponseBody):
    """The body of `POST /v1/responses/input_tokens`: that of a response, of which nothing is required."""

    IGNORED = ResponseBody.IGNORED | {"personality"}

    model: str = ""
    input: Annotated[str | InputItems, BeforeValidator(lambda given: [] if given is None else given)] = Field(
        default_factory=list
    )
    personality: str | None = None


def check_response(body: ResponseBody, limits: Limits) -> None:
    """Raises 400 for fields that do not go together, or that this server does not honour."""
    _check_unsupported(body)
    check_counts(body, limits)
    check_metadata(body.metadata)
    _check_state(body)
    if not isinstance(body.input, str):
        check_items(body.input)


def _check_unsupported(body: ResponseBody) -> None:
    if body.top_logprobs and body.num_logprobs is None:
        raise invalid(f"'top_logprobs' is only allowed when 'include' has '{LOGPROBS}'.", "top_logprobs")
    if body.stream_options is not None and body.stream_options.include_usage is not None:
        raise unsupported("stream_options.include_usage")


def text_form(text: TextConfig | None) -> Form | None:
    """Returns the form that `text.format` asks for; raises 400 if it lacks something."""
    given = None if text is None else text.format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Form("text.format", ANY_OBJECT)
    if given.name is None:
        raise missing("text.format.name")
    return Form("text.format.schema", schema_grammar(given.schema_))


def _check_state(body: ResponseBody) -> None:
    if body.background and not body.stored:
        raise invalid("'background' needs 'store': what runs on its own must be kept.", "background")
    if body.stream_options is not None and body.stream_options.resumable and not body.stored:
        raise invalid("'stream_options.resumable' needs 'store'.", "stream_options.resumable")
    if body.previous_response_id is not None:
        if body.conversation is not None:
            message = "Give 'previous_response_id' or 'conversation', not both."
            raise invalid(message, "previous_response_id")
        check_id("previous_response_id", body.previous_response_id, "resp")
    if body.conversation is not None:
        check_id("conversation", body.conversation, "conv")


def check_items(items: list[InputItem], field: str = "input") -> None:
    """Raises 400 for parts that their role does not have, and for ids that are none or are there twice."""
    seen: set[str] = set()
    for i, item in enumerate(items):
        if isinstance(item, InputMessage) and not isinstance(item.content, str):
            _check_parts(f"{field}[{i}].content", item.role, item.content)
        if item.id is not None:
            check_id(f"{field}[{i}].id", item.id, _PREFIXES[_kind(item)])
            if item.id in seen:
                raise invalid(f"'{item.id}' is the id of another item, too.", f"{field}[{i}].id")
            seen.add(item.id)


def _check_parts(field: str, role: str, parts: list[TextPart]) -> None:
    for i, part in enumerate(parts):
        if part["type"] == "output_text" and role != "assistant":
            message = f"Invalid '{field}[{i}].type': only messages of the assistant have output_text."
            raise invalid(message, f"{field}[{i}].type")


def id_pattern(*prefixes: str) -> str:
    """Returns the pattern of this server's ids with one of these prefixes."""
    return f"^({'|'.join(prefixes)})_[A-Za-z0-9]{{1,64}}$"


def check_id(param: str, value: str, *prefixes: str) -> str:
    """Returns an id; raises 400 if it cannot be one of this server's with one of these prefixes."""
    if not re.fullmatch(id_pattern(*prefixes), value):
        begins = " or ".join(f"'{prefix}_'" for prefix in prefixes)
        raise invalid(f"Invalid '{param}': expected an id that begins with {begins}.", param)
    return value


def _whole_number(text: object) -> object:
    if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= _MAX_SEQUENCE_DIGITS:
        return int(text)
    return text


def _flag(text: object) -> object:
    return {"true": True, "false": False}.get(str(text), text)


WholeNumber = Annotated[int, BeforeValidator(_whole_number)]


class Query(StrictBody):
    """The parameters of an address; there is nothing more that could be included."""

    include: str | None = None
    include_more: Annotated[str | None, Field(alias="include[]")] = None


class StreamQuery(Query):
    """`GET /v1/responses/{id}`: as events, and after which one."""

    stream: Annotated[bool, BeforeValidator(_flag)] = False
    starting_after: Annotated[WholeNumber, Field(ge=0)] | None = None
    include_obfuscation: Annotated[bool, BeforeValidator(_flag)] = False


def read_stream_query(values: Mapping[str, str]) -> StreamQuery:
    """Returns the query; raises 400 that names the parameter that is wrong."""
    query = validated(StreamQuery, values)
    if query.starting_after is not None and not query.stream:
        raise invalid("'starting_after' is only allowed when 'stream' is true.", "starting_after")
    return query


class PageQuery(Query):
    """The part of a list that is asked for, and its order."""

    after: str | None = None
    limit: Annotated[WholeNumber, Field(ge=1, le=MAX_LISTED)] = DEFAULT_LISTED
    order: Literal["asc", "desc"] = "desc"


def response_not_found(response_id: str) -> ApiError:
    """Makes the same error whether the response never was, is gone, or is another tenant's."""
    return invalid(f"Response with id '{response_id}' not found.", None, None, HTTPStatus.NOT_FOUND)


def previous_not_found(response_id: str) -> ApiError:
    message = f"Previous response with id '{response_id}' not found."
    return invalid(message, "previous_response_id", "previous_response_not_found")
