"""The JSON that the server answers with, as types: what `/openapi.json` says of it is made from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from gateway.sessions.responses.schemas import ItemStatus

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
Lane = Literal["interactive", "standard", "batch"]
Tier = Literal["default", "flex", "priority"]
Hash = Annotated[str, Field(pattern="^[0-9a-f]+$")]


class Fault(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Every refusal and every fault."""

    error: Fault


# Completions


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class DraftTimings(TypedDict):
    draft_tokens: int
    accepted_tokens: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]


class Timings(TypedDict):
    """Where the time went: milliseconds and counts."""

    queue_ms: float
    ttft_ms: float
    tpot_ms: float | None
    cached_tokens: int
    prompt_tokens: int
    predicted_ttft_ms: float | None
    preemptions: int
    draft_tokens: int
    accepted_tokens: int
    drafts: dict[str, DraftTimings]
    lane: Lane


class Reply(TypedDict):
    """What all replies and chunks of completions have."""

    id: str
    created: int
    model: str
    service_tier: Tier


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChosenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | None


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The first of a call has its id, its type and its name; the others have more of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(Reply):
    """The last one that has a choice has the timings; a last one of all has the usage, if it was asked for."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]


class ChatDeleted(TypedDict):
    id: str
    object: Literal["chat.completion.deleted"]
    deleted: Literal[True]


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(Reply):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage
    timings: Timings


class TextChunk(Reply):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]


# Responses and conversations


class InputText(TypedDict):
    type: Literal["input_text"]
    text: str


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class MessageItem(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText]


class CallItem(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CallOutputItem(TypedDict):
    id: str
    type: Literal["function_call_output"]
    status: ItemStatus
    call_id: str
    output: str


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class Page(TypedDict):
    object: Literal["list"]
    first_id: str
    last_id: str
    has_more: bool


class ItemPage(Page):
    data: list[Item]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ConversationId(TypedDict):
    id: str


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[Literal["code", "message"], str] | None
    incomplete_details: dict[Literal["reason"], str] | None
    output: list[Item]
    usage: ResponseUsage | None
    timings: NotRequired[Timings]
    temperature: float
    top_p: float
    background: bool
    conversation: ConversationId | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[Literal["effort", "summary"], str | None]
    safety_identifier: str | None
    service_tier: Tier
    store: bool
    text: dict[str, Any]
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    truncation: Literal["disabled"]
    user: str | None


class ResponseDeleted(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseEvent(TypedDict):
    """The response as it begins, goes on and ends."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: Response


class ItemEvent(TypedDict):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: Item


class PlaceEvent(TypedDict):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int


class PartEvent(PlaceEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class DeltaEvent(PlaceEvent):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[Any]


class TextEvent(PlaceEvent):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[Any]


class ReasoningDeltaEvent(PlaceEvent):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextEvent(PlaceEvent):
    type: Literal["response.reasoning_text.done"]
    text: str


class CallEvent(TypedDict):
    sequence_number: int
    item_id: str
    output_index: int


class ArgumentsDeltaEvent(CallEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsEvent(CallEvent):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


class ErrorEvent(TypedDict):
    """This connection has failed; the response goes on elsewhere."""

    type: Literal["error"]
    sequence_number: int
    code: str | None
    message: str
    param: str | None


RESPONSE_EVENTS = (
    ResponseEvent,
    ItemEvent,
    PartEvent,
    DeltaEvent,
    TextEvent,
    ReasoningDeltaEvent,
    ReasoningTextEvent,
    ArgumentsDeltaEvent,
    ArgumentsEvent,
    ErrorEvent,
)


class Conversation(TypedDict):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class TitledConversation(Conversation):
    title: str


class ConversationPage(Page):
    data: list[TitledConversation]


class ConversationDeleted(TypedDict):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


# Models, tokens, prefixes


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    prompt: str


class Prefix(TypedDict):
    object: Literal["prefix"]
    id: Hash
    num_tokens: int
    hits: int
    last_used_at: int


class Prefixes(TypedDict):
    object: Literal["list"]
    data: list[Prefix]


class Replica(TypedDict):
    replica: str
    num_cached_tokens: int
    this: bool


class Location(TypedDict):
    object: Literal["prefix.location"]
    block_size: int
    num_tokens: int
    replicas: list[Replica]


class Blocks(TypedDict):
    """Of the events `stored` and `removed`: at most a thousand in one."""

    blocks: list[Hash]


# The server


class Health(TypedDict):
    status: Literal["ok", "stalled", "failed"]


class Readiness(TypedDict):
    status: Literal["ready", "draining", "loading", "stalled", "failed"]


class LaneStatus(TypedDict):
    waiting: int
    forecast_ttft_ms: int | None
    promised_ttft_ms: int | None
    attainment: float | None


class EngineStatus(TypedDict):
    running: int
    waiting: int
    steps: int
    preemptions: int
    output_tokens: int
    kv_blocks: int
    kv_free_blocks: int
    kv_cached_blocks: int


class ServerStatus(TypedDict):
    """Of the event `server`."""

    state: Literal["ready", "draining", "loading", "stalled", "failed"]
    streams: int
    lanes: dict[Lane, LaneStatus]
    engine: EngineStatus


class QueueStatus(TypedDict):
    """Of the event `request`: where the request that was asked for stands, while it waits."""

    request_id: str
    position: int
    waited_ms: int
    first_token_in_ms: int | None
