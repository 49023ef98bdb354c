"""The bodies of Ollama's API, and their translation to chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field, model_validator

from penstock.gateway.errors import invalid
from penstock.gateway.limits import Limits
from penstock.gateway.wire.ask import Ask, ChatPrompt, Retention, Texts, as_far_as_room, chat_ask
from penstock.gateway.wire.conversation import thinking_switches
from penstock.gateway.wire.efforts import plain_effort
from penstock.gateway.wire.schemas import ChatBody, Dimensions, TokenChoice
from penstock.gateway.wire.strict import STRICT, Ignored, Many, Most, TolerantBody, read

_Neutral = Annotated[float, Field(ge=1, le=1)]
"""A sampler that is not here, switched off."""


class GoBody(TolerantBody):
    """A struct of Ollama's api/types.go: a field that is not set may be there with Go's zero of its type."""

    POINTERS: ClassVar[frozenset[str]] = frozenset()
    """Fields whose zeros say something, for those that are not set are null."""

    @model_validator(mode="before")
    @classmethod
    def without_zeros(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value or name in cls.POINTERS}


class Options(TokenChoice):
    """The options by which tokens are chosen; those about loading a model are accepted and change nothing."""

    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    num_predict: Annotated[int, Field(ge=-2)] | None = None
    """-1 and -2, and 0 as for none, are what the context has room for."""

    repeat_last_n: Annotated[Annotated[int, Field(ge=-1)] | None, Ignored(unless=-1)] = None
    """0 penalizes nothing; whatever else it is, all tokens of the sequence are penalized, as -1 asks for."""
    tfs_z: _Neutral | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None

    draft_num_predict: int | None = None
    num_ctx: int | None = None
    num_gqa: int | None = None
    rope_frequency_base: float | None = None
    rope_frequency_scale: float | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None
    penalize_newline: Literal[True] | None = None


class ModelBody(GoBody):
    """The fields of all bodies that ask the model for something."""

    model_config = STRICT
    POINTERS = frozenset({"stream", "think", "truncate", "shift", "keep_alive"})

    model: Annotated[str, Field(min_length=1)]
    options: Options | None = None
    keep_alive: float | str | None = None
    """Accepted: the model stays."""


class GenerationBody(ModelBody):
    """The fields that chats and prompts share."""

    stream: bool | None = None
    """Unlike elsewhere, it is streamed unless it says no."""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    format: Literal["", "json"] | dict[str, object] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate: bool | None = None
    """Whether what is too long loses its beginning: of a chat its oldest turns."""
    shift: bool | None = None
    """Accepted: an answer ends where the context does."""


class OllamaCalledFunction(GoBody):
    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, object] = Field(default_factory=dict)
    index: int | None = None
    description: str | None = None


class OllamaToolCall(GoBody):
    id: str | None = None
    type: Literal["function"] | None = None
    function: OllamaCalledFunction


def _lower(role: object) -> object:
    return role.lower() if isinstance(role, str) else role


class OllamaMessage(GoBody):
    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_lower)]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[Many[OllamaToolCall], Most("max_tool_calls")] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[list[object], Field(max_length=0)] | None = None


class OllamaChatBody(GenerationBody):
    """`POST /api/chat`."""

    NOT_SUPPORTED = frozenset({"_debug_render_only"})

    messages: Annotated[Many[OllamaMessage], Most("max_messages")] | None = None
    tools: Annotated[Many[dict[str, object]], Most("max_tools")] | None = None


class OllamaGenerateBody(GenerationBody):
    """`POST /api/generate`."""

    NOT_SUPPORTED = frozenset({"template", "images", "_debug_render_only"})

    prompt: str | None = None
    suffix: str | None = None
    """The text after the answer."""
    system: str | None = None
    raw: bool | None = None
    """The prompt is not a turn of a conversation: it is taken as it is."""
    context: Many[Annotated[int, Field(ge=0)]] | None = None
    """The tokens of the conversation so far, as the reply before told them."""


class OllamaEmbedBody(ModelBody):
    """`POST /api/embed`."""

    input: Annotated[str | Many[str] | None, Most("max_inputs")] = None
    truncate: bool | None = None
    """Whether texts that are too long lose their end."""
    dimensions: Dimensions | None = None


class OllamaEmbeddingBody(ModelBody):
    """`POST /api/embeddings`, which older clients know."""

    prompt: str | None = None


class NamedModelBody(GoBody):
    """The fields of bodies about a model; `name` is what older clients call it."""

    model_config = STRICT
    POINTERS = frozenset({"stream"})

    model: str | None = None
    name: str | None = None


class OllamaShowBody(NamedModelBody):
    """`POST /api/show`."""

    IGNORED = frozenset({"options", "system", "template"})

    verbose: bool | None = None


class OllamaPullBody(NamedModelBody):
    """`POST /api/pull`."""

    IGNORED = frozenset({"insecure", "password", "username"})

    stream: bool | None = None


class OllamaCreateBody(NamedModelBody):
    """`POST /api/create`: of a model that is there, without anything that would make it another one."""

    NOT_SUPPORTED = frozenset(
        {
            *("adapters", "draft_files", "draft_quantize", "files", "info", "license", "messages"),
            *("modelfile", "parameters", "parser", "path", "quantization", "quantize", "remote_host"),
            *("renderer", "requires", "system", "template"),
        }
    )

    from_: Annotated[str | None, Field(alias="from")] = None
    stream: bool | None = None


class OllamaCopyBody(GoBody):
    """`POST /api/copy`."""

    model_config = STRICT

    source: str
    destination: str


def ollama_chat_ask(body: OllamaChatBody, limits: Limits) -> Ask:
    messages = list(_conversation(body.messages or []))
    if not messages:
        return _loading(body, "messages")
    tools = [_tool(tool) for tool in body.tools or ()] or None
    ask = as_far_as_room(chat_ask(_as_chat(body, messages, limits, tools=tools), limits))
    assert isinstance(ask.input, ChatPrompt)
    return replace(ask, input=replace(ask.input, shortens=body.truncate is not False))


def prompt_ask(body: OllamaGenerateBody, limits: Limits) -> Ask:
    """Returns a prompt as a conversation, or as it is; the end of a conversation's reply has its tokens."""
    if not body.prompt:
        return _loading(body, "prompt")
    messages: list[dict[str, object]] = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    ask = as_far_as_room(chat_ask(_as_chat(body, messages, limits), limits))
    if body.raw or body.suffix:
        if body.context:
            raise invalid("'context' cannot be used together with 'raw' or 'suffix'.", "context")
        text = Texts(field="prompt", texts=[body.prompt], suffix=body.suffix or "")
        cuts_start = body.truncate is not False and not body.suffix
        return replace(ask, field="prompt", input=(text,), cuts_start=cuts_start)
    assert isinstance(ask.input, ChatPrompt)
    return replace(
        ask,
        input=replace(ask.input, before=body.context or ()),
        cuts_start=body.truncate is not False,
        retention=Retention(output=True),
    )


def embed_ask(body: OllamaEmbedBody, _: Limits) -> Ask:
    given = body.input or []
    if not given:
        return _loading(body, "input")
    texts = [given] if isinstance(given, str) else given
    inputs = Texts(field="input", texts=texts, cuts_end=body.truncate is not False)
    return Ask(model=plain_name(body.model), field="input", input=(inputs,), dimensions=body.dimensions)


def embedding_ask(body: OllamaEmbeddingBody, _: Limits) -> Ask:
    if not body.prompt:
        return _loading(body, "prompt")
    inputs = Texts(field="prompt", texts=[body.prompt], cuts_end=True)
    return Ask(model=plain_name(body.model), field="prompt", input=(inputs,))


def _loading(body: ModelBody, field: str) -> Ask:
    """Returns the ask of a body that only wants the model to be loaded."""
    return Ask(model=plain_name(body.model), field=field, input=())


def shown_name(body: NamedModelBody) -> str:
    """Returns the name of the model that is asked about."""
    return plain_name(body.model or body.name or "")


def plain_name(model: str) -> str:
    """Removes the `:latest` that Ollama's clients write after the name of a model without another tag."""
    return model.removesuffix(":latest")


def _as_chat(
    body: GenerationBody, messages: list[dict[str, object]], limits: Limits, **fields: object
) -> ChatBody:
    options = body.options or Options()
    values = {
        "model": plain_name(body.model),
        "messages": messages,
        "stream": body.stream is not False,
        "continue_final_message": messages[-1]["role"] == "assistant" or None,
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
        "repetition_penalty": 1.0 if options.repeat_last_n == 0 else options.repeat_penalty,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        "response_format": _response_format(body.format),
        **_thinking(body.think),
        **{name: getattr(options, name) for name in TokenChoice.model_fields},
        **fields,
    }
    return read(ChatBody, {name: value for name, value in values.items() if value is not None}, limits)


def _thinking(think: bool | str | None) -> dict[str, object]:
    if isinstance(think, str):
        return {"reasoning_effort": plain_effort(think)}
    return {} if think is None else {"chat_template_kwargs": thinking_switches(think)}


def _response_format(format: str | dict[str, object] | None) -> dict[str, object] | None:
    if not format:
        return None
    if isinstance(format, str):
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": format, "strict": True}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool without the zeros of its fields."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return {**tool, "type": tool.get("type") or "function"}
    parameters = function.get("parameters")
    if isinstance(parameters, dict):
        set_ = {name: value for name, value in parameters.items() if value is not None and value != ""}
        function = {**function, "parameters": set_}
    return {"type": tool.get("type") or "function", "function": function}


def _conversation(messages: list[OllamaMessage]) -> Iterator[dict[str, object]]:
    """Yields the messages of a chat. Calls without ids get some, which their results find by the tool's name."""
    waiting: list[tuple[str, str]] = []
    """Calls without a result: id and name."""
    for number, message in enumerate(messages):
        turn: dict[str, object] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [_call(call, f"call_{number}_{i}") for i, call in enumerate(message.tool_calls)]
            waiting = [(call["id"], call["function"]["name"]) for call in calls]
            turn["tool_calls"] = calls
        if message.role == "tool":
            answered = next((call for call in waiting if message.tool_name in (None, call[1])), ("", ""))
            waiting = [call for call in waiting if call is not answered]
            turn["tool_call_id"] = message.tool_call_id or answered[0]
        yield turn


def _call(call: OllamaToolCall, id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": orjson.dumps(call.function.arguments).decode()}
    return {"id": call.id or id, "type": "function", "function": function}
