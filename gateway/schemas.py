"""Request bodies: what clients may send, and the first thing that is wrong with what they did send.

OpenAI's names and ranges, strictly typed. A field is either honoured, or known to be harmless, or refused by name:
none is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from gateway.errors import ApiError, invalid, unsupported
from gateway.limits import Limits

ServiceTier = Literal["auto", "default", "flex", "priority", "fast"]

_INT64 = 2**63


def _whole(text: str) -> str:
    """JSON can spell half a character ("\\ud800"); no tokenizer can take it."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("there is half a surrogate pair in it") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]


class StrictBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    resumable: bool | None = None


class Sampled(StrictBody):
    """What chat and text completions share: how tokens are chosen, and fields that change nothing here."""

    NOT_SUPPORTED: ClassVar[frozenset[str]] = frozenset()
    """Fields of OpenAI's that are refused by name unless they are null."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Text | list[Text] | None = None
    service_tier: ServiceTier | None = None

    # Not OpenAI's, but what clients of open models send.
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None

    # Accepted: they ask for nothing that could be seen in the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ContentPart(StrictBody):
    type: Literal["text"]
    text: Text


class Message(StrictBody):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[ContentPart]
    name: Text | None = None
    refusal: None = None
    audio: None = None
    annotations: list[object] | None = None
    tool_calls: None = None
    function_call: None = None


class ResponseFormat(StrictBody):
    type: Literal["text"]


class ChatBody(Sampled):
    """`POST /v1/chat/completions`."""

    NOT_SUPPORTED = frozenset(
        {
            "audio",
            "function_call",
            "functions",
            "moderation",
            "parallel_tool_calls",
            "prediction",
            "reasoning_effort",
            "tool_choice",
            "tools",
            "verbosity",
            "web_search_options",
        }
    )

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionBody(Sampled):
    """`POST /v1/completions`."""

    NOT_SUPPORTED = frozenset({"suffix"})

    prompt: Text | list[Text] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None


class TokenizeBody(StrictBody):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class LocateBody(StrictBody):
    """`/v1/prefixes/locate`: the prompt, as tokens or as messages."""

    tokens: list[Annotated[int, Field(ge=0)]] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None


Body = TypeVar("Body", bound=StrictBody)

# Refused for their value, not for their type: clients are told that the feature is missing.
_MISSING_FEATURES = frozenset(
    {"echo", "best_of", "store", "response_format", "modalities", "include_obfuscation"}
)


def read(kind: type[Body], values: Mapping[str, object]) -> Body:
    """A checked request body.

    Raises:
        ApiError: 400 that names the first field that is wrong.
    """
    for name in sorted(getattr(kind, "NOT_SUPPORTED", frozenset()) & values.keys()):
        if values[name] is not None:
            raise unsupported(name)
    accepted = {
        name: value for name, value in values.items() if name not in getattr(kind, "NOT_SUPPORTED", ())
    }
    try:
        return kind.model_validate(accepted)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> ApiError:
    details = max(error.errors(include_url=False, include_context=False), key=lambda found: len(found["loc"]))
    path = _path(details["loc"])
    field = str(details["loc"][0]) if details["loc"] else None
    if details["type"] == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {path}.", path, "unknown_parameter")
    if details["type"] == "missing":
        return invalid(f"You must provide the parameter '{path}'.", path, "missing_required_parameter")
    if _MISSING_FEATURES & {field, path.rpartition(".")[2]} and details["type"] == "literal_error":
        return invalid(f"This value of '{path}' is not supported by this server.", path, "unsupported_value")
    return invalid(f"Invalid '{path}': {details['msg']}.", path)


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`: pydantic's location without the names it gives the branches of a union."""
    path = ""
    for number, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif number == 0 or (
            not part.startswith(("list[", "constrained", "function-"))
            and part
            not in (
                "str",
                "int",
                "none",
            )
        ):
            path += f".{part}" if path else part
    return path


def check_counts(body: Sampled, limits: Limits) -> None:
    """Raises 400 for a list that is longer than this server takes."""
    _check_stop(body.stop, limits)
    at_most("logit_bias", len(body.logit_bias or ()), limits.max_logit_bias)
    at_most("stop_token_ids", len(body.stop_token_ids or ()), limits.max_stop_token_ids)
    at_most("n", body.n or 1, limits.max_choices)
    if body.stream_options is not None and not body.stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")


def check_chat(body: ChatBody, limits: Limits) -> None:
    check_counts(body, limits)
    check_messages(body.messages, limits)
    at_most("top_logprobs", body.top_logprobs or 0, limits.max_top_logprobs)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise invalid("Give 'max_tokens' or 'max_completion_tokens', not both.", "max_tokens")


def check_completion(body: CompletionBody, limits: Limits) -> None:
    check_counts(body, limits)
    if body.stream_options is not None and body.stream_options.resumable:
        raise unsupported("stream_options.resumable")
    at_most("logprobs", body.logprobs or 0, limits.max_top_logprobs)


def check_messages(messages: list[Message], limits: Limits) -> None:
    at_most("messages", len(messages), limits.max_messages)
    for i, message in enumerate(messages):
        if not isinstance(message.content, str):
            at_most(f"messages[{i}].content", len(message.content), limits.max_content_parts)


def _check_stop(stop: str | list[str] | None, limits: Limits) -> None:
    strings = [stop] if isinstance(stop, str) else stop or []
    at_most("stop", len(strings), limits.max_stop)
    if not all(strings):
        raise invalid("'stop' must not contain an empty string.", "stop")
    if any(len(string) > limits.max_stop_chars for string in strings):
        raise invalid(f"A stop string may have at most {limits.max_stop_chars} characters.", "stop")


def at_most(name: str, number: int, most: int) -> None:
    if number > most:
        raise invalid(f"'{name}' is {number}, but this server takes at most {most}.", name)


def as_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def as_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates know it: parts of text are joined."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return {"role": message.role, "content": text} | ({"name": message.name} if message.name else {})
