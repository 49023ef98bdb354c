"""The bodies of Ollama's API, and their translation to chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import Field

from penstock.gateway.http.errors import invalid
from penstock.gateway.http.limits import Limits
from penstock.gateway.wire.ask import Ask, Conversation, Kept, Texts
from penstock.gateway.wire.conversation import thinking_switches
from penstock.gateway.wire.schemas import ChatBody
from penstock.gateway.wire.strict import Many, StrictBody, TolerantBody, read
from penstock.gateway.wire.translation import as_far_as_room, chat_ask

_Neutral = Annotated[float, Field(ge=1, le=1)]
"""A sampler that is not here, switched off."""


class Options(StrictBody):
    """The options by which tokens are chosen; those about loading a model are accepted and change nothing."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    num_predict: Annotated[int, Field(ge=-2)] | None = None
    """-1 and -2 are what the context has room for."""
    stop: str | Many[str] | None = None

    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    """0 penalizes nothing; whatever else it is, all tokens of the sequence are penalized, as -1 asks for."""
    tfs_z: _Neutral | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None

    num_ctx: int | None = None
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


class OfModel(StrictBody):
    """The fields of all bodies that ask the model for something."""

    MOST: ClassVar[Mapping[str, str | int]] = {"options.stop": "max_stop"}
    IGNORED = frozenset({"options.repeat_last_n"})
    NEUTRAL: ClassVar[Mapping[str, object]] = {"options.repeat_last_n": -1}

    model: Annotated[str, Field(min_length=1)]
    options: Options | None = None
    keep_alive: float | str | None = None
    """Accepted: the model stays."""


class Asked(OfModel):
    """The fields that chats and prompts share."""

    stream: bool | None = None
    """Unlike elsewhere, it is streamed unless it says no."""
    think: bool | Literal["low", "medium", "high"] | None = None
    format: Literal["", "json"] | dict[str, object] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class OllamaCalledFunction(TolerantBody):
    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, object]
    index: int | None = None
    description: str | None = None


class OllamaToolCall(TolerantBody):
    id: str | None = None
    type: Literal["function"] | None = None
    function: OllamaCalledFunction


class OllamaMessage(TolerantBody):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Many[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[list[object], Field(max_length=0)] | None = None


class OllamaChatBody(Asked):
    """`POST /api/chat`."""

    MOST: ClassVar[Mapping[str, str | int]] = {
        **Asked.MOST,
        "messages": "max_messages",
        "messages[].tool_calls": "max_tool_calls",
        "tools": "max_tools",
    }

    TOLERANT_AT: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "messages[]": (OllamaMessage,),
        "messages[].tool_calls[]": (OllamaToolCall,),
        "messages[].tool_calls[].function": (OllamaCalledFunction,),
    }

    messages: Many[OllamaMessage] | None = None
    tools: Many[dict[str, object]] | None = None


class OllamaGenerateBody(Asked):
    """`POST /api/generate`."""

    NOT_SUPPORTED = frozenset({"template", "images"})

    prompt: str | None = None
    suffix: str | None = None
    """The text after the answer."""
    system: str | None = None
    raw: bool | None = None
    """The prompt is not a turn of a conversation: it is taken as it is."""
    context: Many[Annotated[int, Field(ge=0)]] | None = None
    """The tokens of the conversation so far, as the reply before told them."""


class OllamaEmbedBody(OfModel):
    """`POST /api/embed`."""

    MOST: ClassVar[Mapping[str, str | int]] = {**OfModel.MOST, "input": "max_inputs", "dimensions": 2**20}

    input: str | Many[str] | None = None
    truncate: bool | None = None
    """Whether texts that are too long lose their end."""
    dimensions: Annotated[int, Field(ge=1)] | None = None


class OllamaEmbeddingBody(OfModel):
    """`POST /api/embeddings`, which older clients know."""

    prompt: str | None = None


class OllamaShowBody(StrictBody):
    """`POST /api/show`; `name` is what older clients call the model."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def ollama_chat_ask(body: OllamaChatBody, limits: Limits) -> Ask:
    messages = list(_conversation(body.messages or []))
    if not messages:
        return _loading(body, "messages")
    return as_far_as_room(chat_ask(_as_chat(body, messages, limits, tools=body.tools or None), limits))


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
        return replace(ask, field="prompt", input=(text,))
    assert isinstance(ask.input, Conversation)
    return replace(ask, input=replace(ask.input, before=body.context or ()), kept=Kept(output=True))


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


def _loading(body: OfModel, field: str) -> Ask:
    """Returns the ask of a body that only wants the model to be loaded."""
    return Ask(model=plain_name(body.model), field=field, input=())


def shown_name(body: OllamaShowBody) -> str:
    """Returns the name of the model that is asked about."""
    return plain_name(body.model or body.name or "")


def plain_name(model: str) -> str:
    """Removes the `:latest` that Ollama's clients write after the name of a model without another tag."""
    return model.removesuffix(":latest")


def _as_chat(body: Asked, messages: list[dict[str, object]], limits: Limits, **fields: object) -> ChatBody:
    options = body.options or Options()
    asked = options.num_predict
    values = {
        "model": plain_name(body.model),
        "messages": messages,
        "stream": body.stream is not False,
        "continue_final_message": messages[-1]["role"] == "assistant" or None,
        "max_tokens": None if asked is None or asked < 0 else asked,
        "repetition_penalty": 1.0 if options.repeat_last_n == 0 else options.repeat_penalty,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        "response_format": _response_format(body.format),
        **_thinking(body.think),
        **{name: getattr(options, name) for name in _SAME},
        **fields,
    }
    return read(ChatBody, {name: value for name, value in values.items() if value is not None}, limits)


_SAME = Options.model_fields.keys() & ChatBody.model_fields.keys()
"""Options that have the same name elsewhere."""


def _thinking(think: bool | str | None) -> dict[str, object]:
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {} if think is None else {"chat_template_kwargs": thinking_switches(think)}


def _response_format(format: str | dict[str, object] | None) -> dict[str, object] | None:
    if not format:
        return None
    if isinstance(format, str):
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": format, "strict": True}}


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
            found = next((call for call in waiting if message.tool_name in (None, call[1])), ("", ""))
            waiting = [call for call in waiting if call is not found]
            turn["tool_call_id"] = message.tool_call_id or found[0]
        yield turn


def _call(call: OllamaToolCall, id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": orjson.dumps(call.function.arguments).decode()}
    return {"id": call.id or id, "type": "function", "function": function}
