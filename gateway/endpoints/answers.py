"""The JSON that the server answers with, as types: what `/openapi.json` says of it is made from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import Field
from typing_extensions import TypedDict

from gateway.sessions.batches.batch import Endpoint, Status
from gateway.sessions.responses.objects import Item, OutputText
from gateway.sessions.responses.schemas import ReasoningText
from gateway.wire.shapes import ChosenLogprob

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


class AnthropicFault(TypedDict):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
    ]
    message: str


class AnthropicError(TypedDict):
    """Every refusal and every fault of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicFault
    request_id: str | None


# Completions


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class DraftTimings(TypedDict):
    draft_tokens: int
    accepted_tokens: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]


class Timeline(TypedDict):
    """When what happened to the choice that had the first token, in milliseconds since the request's arrival.

    Each list has the first 256 entries.
    """

    prefills: list[tuple[float, int]]
    """Steps that computed prompt tokens: the end, and how many they were."""
    preempted_ms: list[float]
    resumed_ms: list[float]
    drafts: list[tuple[float, int, int]]
    """Steps with drafts: the end, how many, and how many were right."""
    ended_ms: float


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
    timeline: Timeline
    lane: Lane


class Reply(TypedDict):
    """What all replies and chunks of completions have."""

    id: str
    created: int
    model: str
    service_tier: Tier


class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None
    """Among the most likely tokens; null for a token of the prompt that is none of them."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By place in the prompt, tokens by their ids; null for the first place."""


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
    token_ids: NotRequired[list[int]]
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
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
    token_ids: NotRequired[list[int]]
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(Reply):
    """The last one that has a choice has the timings; a last one of all has the usage, if it was asked for."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[int]]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]


class ChatDeleted(TypedDict):
    id: str
    object: Literal["chat.completion.deleted"]
    deleted: Literal[True]


class EmbeddingEntry(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or float32 in little-endian order as base64."""


class ReadDocument(TypedDict):
    text: str


class RerankResult(TypedDict):
    index: int
    document: NotRequired[ReadDocument]
    relevance_score: float
    """The cosine of the angle between the embeddings of query and document."""


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage


class Reranked(TypedDict):
    """The best first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class Score(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class Scores(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


# Files and batches


class File(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileDeleted(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(TypedDict):
    code: str
    message: str
    param: str | None
    line: int | None
    """Of the input, from 1; null for what is wrong with all of it."""


class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class Batch(TypedDict):
    """The times are in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: Endpoint
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


# Text completions


class TextLogprobs(TypedDict):
    """Null for the first token of a prompt that is echoed."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class WholeTextChoice(TextChoice):
    prompt_logprobs: NotRequired[PromptLogprobs]


class TextCompletion(Reply):
    object: Literal["text_completion"]
    choices: list[WholeTextChoice]
    usage: Usage
    timings: Timings | None


class TextDeleted(TypedDict):
    id: str
    object: Literal["text_completion.deleted"]
    deleted: Literal[True]


class TextChunk(Reply):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]


# Anthropic's messages


class TextContent(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingContent(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any


Content = TextContent | ThinkingContent | ToolUseContent
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokens(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """Tokens that were found in the cache are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[ThinkingTokens]
    service_tier: NotRequired[Literal["standard", "priority", "batch"]]


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    timings: NotRequired[Timings]


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: AnthropicMessage


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: Content


class MessagePing(TypedDict):
    type: Literal["ping"]


class TextAdded(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingAdded(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class InputAdded(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: TextAdded | ThinkingAdded | InputAdded


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class StopDelta(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage
    timings: Timings


class MessageStop(TypedDict):
    type: Literal["message_stop"]


MESSAGE_EVENTS = (
    MessageStart,
    BlockStart,
    MessagePing,
    BlockDelta,
    BlockStop,
    MessageDelta,
    MessageStop,
    AnthropicError,
)


class InputTokens(TypedDict):
    input_tokens: int


# Ollama's lines


class OllamaError(TypedDict):
    """Every refusal and every fault of Ollama's API."""

    error: str


class OllamaEnding(TypedDict, total=False):
    """What the last line says; durations in nanoseconds."""

    done_reason: Literal["stop", "length", "load"]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int
    timings: Timings


class OllamaEmbeddings(TypedDict):
    """Durations in nanoseconds; none without any input."""

    model: str
    embeddings: list[list[float]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]


class OllamaEmbedding(TypedDict):
    embedding: list[float]


class OllamaFunction(TypedDict):
    name: str
    arguments: Any


class OllamaCall(TypedDict):
    id: str
    function: OllamaFunction


class OllamaMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class OllamaChat(OllamaEnding):
    model: Required[str]
    created_at: Required[str]
    message: Required[OllamaMessage]
    done: Required[bool]


class OllamaText(OllamaEnding):
    model: Required[str]
    created_at: Required[str]
    response: Required[str]
    thinking: NotRequired[str]
    done: Required[bool]


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    name: str
    model: str
    size: int
    digest: Hash
    details: OllamaDetails


class OllamaListed(OllamaModel):
    modified_at: str


class OllamaLoaded(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaModels(TypedDict):
    models: list[OllamaListed]


class OllamaLoadedModels(TypedDict):
    models: list[OllamaLoaded]


class OllamaShown(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[Literal["completion", "tools", "thinking"]]
    modified_at: str


# Responses and conversations


class Page(TypedDict):
    object: Literal["list"]
    first_id: str
    last_id: str
    has_more: bool


class ItemPage(Page):
    data: list[Item]


class FilePage(Page):
    data: list[File]


class BatchPage(Page):
    data: list[Batch]


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
    truncation: Literal["auto", "disabled"]
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
    logprobs: list[ChosenLogprob]


class TextEvent(PlaceEvent):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChosenLogprob]


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


class Defaults(TypedDict):
    """What a request that does not say gets."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    defaults: Defaults


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


class Load(TypedDict):
    server_load: int


class Version(TypedDict):
    version: str


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


class Steps(TypedDict):
    """Of the last steps, at most 256, each a place in every list."""

    started_ms: list[float]
    duration_ms: list[float]
    prefill: list[int]
    """Prompt tokens."""
    decode: list[int]
    """Sequences that went on."""
    drafts: list[int]
    """Guessed tokens beside those."""
    accepted: list[int]
    """The right ones."""


class StepsStatus(TypedDict):
    """Of the event `steps`: what happened since the one before. Instants are milliseconds since the events began."""

    at_ms: float
    num_steps: int
    busy_ms: float
    """That the steps took."""
    loop_lag_ms: float
    """How late the event loop ran a timer, at worst."""
    output_tokens: int
    prefill_tokens: int
    decode_tokens: int
    draft_tokens: int
    accepted_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    steps: Steps


class BlocksStatus(TypedDict):
    """Of the event `kv`, which comes when something has changed: the pool of KV blocks in at most 1,024 cells.

    The strings are base64 with one byte for each cell.
    """

    num_blocks: int
    blocks_per_cell: int
    held: str
    """The part of the cell that sequences hold, of 255; at least 1 if they hold any of it."""
    shared: str
    """The part of the cell that several sequences hold, likewise."""
    cached: str
    """The part of the cell that nobody holds and that a prompt may find again, likewise."""
    holders: str
    """The most sequences that hold one block of the cell."""
    num_held: int
    num_shared: int
    num_cached: int
    num_saved: int
    """Blocks that would be taken beside those that are, if nothing were shared."""


class QueueStatus(TypedDict):
    """Of the event `request`: where the request that was asked for stands, while it waits."""

    request_id: str
    position: int
    waited_ms: int
    first_token_in_ms: int | None
