"""Request bodies and queries of the Responses API, checked the way those of the other endpoints are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, Field, with_config
from typing_extensions import TypedDict

from gateway.http.errors import ApiError, invalid, unsupported
from gateway.http.limits import Limits
from gateway.wire.schemas import STRICT, Many, Sampled, Schema, StrictBody, check_counts, validated
from gateway.wire.structured import ANY_OBJECT, Form, missing, schema_grammar

MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_LISTED = 100
DEFAULT_LISTED = 20

_MAX_SEQUENCE_DIGITS = 18

ItemStatus = Literal["in_progress", "completed", "incomplete"]

# What else could be included belongs to items that no reply of this server has.
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


def _known_items(items: object) -> object:
    """Clients are told which kind of item it is that this server does not know."""
    for i, item in enumerate(items if isinstance(items, list) else ()):
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind != "message":
            raise _unsupported_value(f"input[{i}].type", kind)
    return items


def _unsupported_value(param: str, value: object) -> ApiError:
    shown = f" '{value}'" if isinstance(value, str) and len(value) <= 64 and value.isprintable() else ""
    message = f"The value{shown} of '{param}' is not supported by this server."
    return invalid(message, param, "unsupported_value")


# There may be thousands of them: each is a plain dict.
@with_config(STRICT)
class TextPart(TypedDict):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: NotRequired[list[object] | None]
    logprobs: NotRequired[list[object] | None]
    prompt_cache_breakpoint: NotRequired[None]


class InputMessage(StrictBody):
    """A message of the client's, or one that this API returned and gets back."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[Many[TextPart], Field(min_length=1)]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class TextFormat(StrictBody):
    """The form of the answer. `strict` changes nothing: every answer is held to its schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(StrictBody):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


def _its_id(conversation: object) -> object:
    """OpenAI takes an id, or an object with nothing but an id."""
    if isinstance(conversation, dict) and conversation.keys() == {"id"}:
        return conversation["id"]
    return conversation


class ResponseBody(Sampled):
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
            "reasoning",
        }
    )
    MOST: ClassVar[Mapping[str, str | int]] = {
        **Sampled.MOST,
        "input": "max_messages",
        "input[].content": "max_content_parts",
    }

    input: Annotated[str | Annotated[Many[InputMessage], Field(min_length=1)], BeforeValidator(_known_items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    previous_response_id: str | None = None
    conversation: Annotated[str, BeforeValidator(_its_id)] | None = None
    background: bool | None = None
    store: bool | None = None  # type: ignore[assignment]

    # Kept with the response, which must be text that can be written down.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Accepted as long as they ask for nothing that this server does not do.
    include: Many[Includable] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    tool_choice: object = None
    tools: list[object] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def stored(self) -> bool:
        """The response can be asked for, and continued, after it has ended."""
        return self.store is not False


def check_response(body: ResponseBody, limits: Limits) -> None:
    """Raises 400 for what is wrong although each field by itself is well formed, or for what is not done here."""
    _check_unsupported(body)
    check_counts(body, limits)
    check_metadata(body.metadata)
    _check_state(body)
    if not isinstance(body.input, str):
        check_items(body.input)


def _check_unsupported(body: ResponseBody) -> None:
    if body.tools:
        raise unsupported("tools")
    if body.top_logprobs:
        raise unsupported("top_logprobs")
    if body.tool_choice not in (None, "auto", "none"):
        raise _unsupported_value("tool_choice", body.tool_choice)
    if body.truncation == "auto":
        raise _unsupported_value("truncation", body.truncation)
    if body.stream_options is not None and body.stream_options.include_usage is not None:
        raise unsupported("stream_options.include_usage")


def text_form(text: TextConfig | None) -> Form | None:
    """What `text.format` asks for.

    Raises:
        ApiError: 400, if it lacks something.
    """
    given = None if text is None else text.format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Form("text.format", ANY_OBJECT)
    if given.name is None:
        raise missing("text.format.name")
    return Form("text.format.schema", schema_grammar(given.schema_))


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raises 400 for metadata beyond OpenAI's bounds."""
    for key, value in (metadata or {}).items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            message = f"A key of 'metadata' may have at most {MAX_METADATA_KEY_CHARS} characters."
            raise invalid(message, "metadata")
        if len(value) > MAX_METADATA_VALUE_CHARS:
            message = f"A value of 'metadata' may have at most {MAX_METADATA_VALUE_CHARS} characters."
            raise invalid(message, "metadata")


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


def check_items(items: list[InputMessage], field: str = "input") -> None:
    """Raises 400 for parts that their role does not have, and for ids that are none or are there twice."""
    seen: set[str] = set()
    for i, item in enumerate(items):
        if not isinstance(item.content, str):
            _check_parts(f"{field}[{i}].content", item.role, item.content)
        if item.id is not None:
            check_id(f"{field}[{i}].id", item.id, "msg")
            if item.id in seen:
                raise invalid(f"'{item.id}' is the id of another item, too.", f"{field}[{i}].id")
            seen.add(item.id)


def _check_parts(field: str, role: str, parts: list[TextPart]) -> None:
    for i, part in enumerate(parts):
        if part["type"] == "output_text" and role != "assistant":
            message = f"Invalid '{field}[{i}].type': only messages of the assistant have output_text."
            raise invalid(message, f"{field}[{i}].type")


def id_pattern(prefix: str) -> str:
    """What this server's ids with that prefix look like."""
    return f"^{prefix}_[A-Za-z0-9]{{1,64}}$"


def check_id(param: str, value: str, prefix: str) -> str:
    """
    Raises:
        ApiError: 400, if it cannot be one of this server's ids with that prefix.
    """
    if not re.fullmatch(id_pattern(prefix), value):
        raise invalid(f"Invalid '{param}': expected an id that begins with '{prefix}_'.", param)
    return value


def _whole_number(text: object) -> object:
    if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= _MAX_SEQUENCE_DIGITS:
        return int(text)
    return text


def _flag(text: object) -> object:
    return {"true": True, "false": False}.get(str(text), text)


WholeNumber = Annotated[int, BeforeValidator(_whole_number)]


class Query(StrictBody):
    """What is asked for in an address; this server has nothing more to include."""

    include: str | None = None
    include_more: Annotated[str | None, Field(alias="include[]")] = None


class StreamQuery(Query):
    """`GET /v1/responses/{id}`: as events, and after which one."""

    stream: Annotated[bool, BeforeValidator(_flag)] = False
    starting_after: Annotated[WholeNumber, Field(ge=0)] | None = None
    include_obfuscation: Literal["false"] = "false"


def read_stream_query(values: Mapping[str, str]) -> StreamQuery:
    """
    Raises:
        ApiError: 400 that names the parameter that is wrong.
    """
    query = validated(StreamQuery, values)
    if query.starting_after is not None and not query.stream:
        raise invalid("'starting_after' is only allowed when 'stream' is true.", "starting_after")
    return query


class PageQuery(Query):
    """Which part of a list, and in which order."""

    after: str | None = None
    limit: Annotated[WholeNumber, Field(ge=1, le=MAX_LISTED)] = DEFAULT_LISTED
    order: Literal["asc", "desc"] = "desc"


def read_page_query(values: Mapping[str, str]) -> PageQuery:
    """
    Raises:
        ApiError: 400 that names the parameter that is wrong.
    """
    return validated(PageQuery, values)


def response_not_found(response_id: str) -> ApiError:
    """The same whether it never was, is gone, or is another tenant's."""
    return invalid(f"Response with id '{response_id}' not found.", None, None, HTTPStatus.NOT_FOUND)


def previous_not_found(response_id: str) -> ApiError:
    message = f"Previous response with id '{response_id}' not found."
    return invalid(message, "previous_response_id", "previous_response_not_found")
