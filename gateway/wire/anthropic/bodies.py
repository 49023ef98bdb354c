"""The bodies of Anthropic's Messages API, and their translation to chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NotRequired

import orjson
from pydantic import BeforeValidator, Field, with_config
from typing_extensions import TypedDict

from penstock.gateway.errors import invalid
from penstock.gateway.limits import Limits
from penstock.gateway.wire.ask import Ask, as_far_as_room, chat_ask
from penstock.gateway.wire.conversation import thinking_switches
from penstock.gateway.wire.efforts import agreed, plain_effort
from penstock.gateway.wire.schemas import ChatBody
from penstock.gateway.wire.strict import STRICT, TOLERANT, Many, Most, StrictBody, TolerantBody, read

PARTS = Most("max_content_parts")


@with_config(TOLERANT)
class TextBlock(TypedDict):
    type: Literal["text"]
    text: str
    cache_control: NotRequired[object]
    citations: NotRequired[object]


@with_config(TOLERANT)
class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: NotRequired[object]


@with_config(TOLERANT)
class RedactedThinkingBlock(TypedDict):
    """Thoughts of another server, which nobody can read here."""

    type: Literal["redacted_thinking"]
    data: str


@with_config(TOLERANT)
class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]
    cache_control: NotRequired[object]
    caller: NotRequired[object]


@with_config(TOLERANT)
class TextSource(TypedDict):
    type: Literal["text"]
    data: str
    media_type: NotRequired[object]


@with_config(TOLERANT)
class ContentSource(TypedDict):
    type: Literal["content"]
    content: Annotated[str | Many[TextBlock], PARTS]


@with_config(TOLERANT)
class DocumentBlock(TypedDict):
    """A document of text; PDFs and documents elsewhere have other sources."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: NotRequired[str | None]
    context: NotRequired[str | None]
    cache_control: NotRequired[object]


@with_config(TOLERANT)
class SearchResultBlock(TypedDict):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[Many[TextBlock], PARTS]
    cache_control: NotRequired[object]


ShownBlock = Annotated[TextBlock | DocumentBlock | SearchResultBlock, Field(discriminator="type")]
"""What the model reads as text."""


@with_config(TOLERANT)
class ToolResultBlock(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[Annotated[str | Many[ShownBlock], PARTS]]
    is_error: NotRequired[bool | None]
    cache_control: NotRequired[object]


Block = Annotated[
    TextBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(TolerantBody):
    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Many[Block], PARTS]


@with_config(STRICT)
class AnthropicTool(TypedDict):
    """A tool of the client's own; those that Anthropic runs itself are not here."""

    type: NotRequired[Literal["custom"] | None]
    name: Annotated[str, Field(min_length=1)]
    description: NotRequired[str]
    input_schema: dict[str, object]
    strict: NotRequired[bool | None]
    cache_control: NotRequired[object]
    defer_loading: NotRequired[Literal[False] | None]
    eager_input_streaming: NotRequired[object]
    input_examples: NotRequired[object]
    allowed_callers: NotRequired[object]


def _own_tools(tools: object) -> object:
    """Refuses a tool that Anthropic runs, or knows how to describe, and names its kind."""
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            shown = f"'{kind}'" if len(kind) <= 64 and kind.isprintable() else "another one"
            message = (
                f"'tools[{i}].type' is {shown}: this server has no tools of its own, and takes those that a "
                "request describes by a name and an input_schema."
            )
            raise invalid(message, f"tools[{i}].type", "unsupported_value")
    return tools


class AnthropicToolChoice(StrictBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(StrictBody):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictBody):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, object], Field(alias="schema")]


class OutputConfig(StrictBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensBody(StrictBody):
    """`POST /v1/messages/count_tokens`: what becomes the prompt."""

    IGNORED = frozenset(
        {
            "context_management",
            "messages[].content[].citations.enabled",
            "messages[].content[].content[].citations.enabled",
            "user_profile_id",
            "workspace_id",
        }
    )

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[Many[AnthropicMessage], Field(min_length=1), Most("max_messages")]
    system: Annotated[str | Many[TextBlock] | None, PARTS] = None
    tools: Annotated[Many[AnthropicTool], BeforeValidator(_own_tools), Most("max_tools")] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older place of the format."""

    cache_control: dict[str, object] | None = None
    """Accepted: what is the same is found in the cache by itself."""


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    NOT_SUPPORTED = frozenset({"container", "mcp_servers"})
    IGNORED = CountTokensBody.IGNORED | {"diagnostics", "inference_geo"}

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[Many[Annotated[str, Field(min_length=1)]], Most("max_stop")] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard", "fast"] | None = None

    metadata: Annotated[dict[str, str | None], Most("max_metadata")] | None = None
    """Accepted: it is the client's own."""


# What of it chat completions are fields

_BILLING = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with a line of its own that is another in every request: no model has a use for
it, and no prefix of the prompt would ever be found in the cache."""


def message_ask(body: CountTokensBody, limits: Limits) -> Ask:
    return as_far_as_room(chat_ask(as_chat(body, limits), limits))


def as_chat(body: CountTokensBody, limits: Limits) -> ChatBody:
    """Returns the chat that a body asks for; raises 400 for what chat completions do not take."""
    messages = _conversation(body)
    values: dict[str, object] = {"model": body.model, "messages": messages}
    if messages[-1]["role"] == "assistant":
        values["continue_final_message"] = True
    if isinstance(body, MessagesBody):
        values |= _sampling(body)
    values |= _tools(body) | _thinking(body.thinking) | _output(body)
    return read(ChatBody, values, limits)


def _sampling(body: MessagesBody) -> dict[str, object]:
    tier = "default" if body.service_tier == "standard_only" else body.service_tier
    return {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "service_tier": "fast" if body.speed == "fast" else tier,
    }


def _thinking(thinking: ThinkingConfig | None) -> dict[str, object]:
    """Returns the fields that switch reasoning on, off or out of sight, and bound it."""
    if thinking is None:
        return {}
    fields: dict[str, object] = {"include_reasoning": False} if thinking.display == "omitted" else {}
    if thinking.type in ("enabled", "disabled"):
        fields["chat_template_kwargs"] = thinking_switches(thinking.type == "enabled")
    if thinking.type != "disabled":
        fields["thinking_token_budget"] = thinking.budget_tokens
    return fields


def _output(body: CountTokensBody) -> dict[str, object]:
    fields: dict[str, object] = {}
    config = body.output_config or OutputConfig()
    if config.effort is not None:
        fields["reasoning_effort"] = plain_effort(config.effort)
    format = agreed({"output_config.format": config.format, "output_format": body.output_format})
    if format is not None:
        schema = {"name": "format", "schema": format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _tools(body: CountTokensBody) -> dict[str, object]:
    choice = body.tool_choice
    asks_for_call = choice is not None and choice.type in ("any", "tool")
    if not (body.tools or asks_for_call):
        return {}
    named = None if choice is None else {"type": "function", "function": {"name": choice.name}}
    how = "auto" if choice is None else choice.type
    return {
        "tools": [_tool(tool) for tool in body.tools or ()],
        "tool_choice": {"any": "required", "tool": named}.get(how, how),
        "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
    }


def _tool(tool: AnthropicTool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _conversation(body: CountTokensBody) -> list[dict[str, object]]:
    """Returns the messages of a chat; turns of one role that follow each other are joined."""
    system = _system(body.system)
    turns = [_TurnParts("system", system)] if system else []
    for message in body.messages:
        content = message.content
        blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        for turn in _turns(message.role, blocks):
            if turns and turn.role == turns[-1].role in ("user", "assistant"):
                turns[-1].add(turn)
            else:
                turns.append(turn)
    return [turn.message() for turn in turns]


def _system(system: str | list[TextBlock] | None) -> list[str]:
    texts = [system] if isinstance(system, str) else [block["text"] for block in system or ()]
    if texts and texts[0].startswith(_BILLING):
        texts[0] = texts[0].partition("\n")[2]
    return [text for text in texts if text]


@dataclass(slots=True)
class _TurnParts:
    """One message of a chat as it is put together."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, object]] = field(default_factory=list)
    tool_call_id: str | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.texts or self.thoughts or self.calls)

    def add(self, other: _TurnParts) -> None:
        self.texts += other.texts
        self.thoughts += other.thoughts
        self.calls += other.calls

    def message(self) -> dict[str, object]:
        message: dict[str, object] = {"role": self.role, "content": "\n".join(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _turns(role: str, blocks: Sequence[Block]) -> Iterator[_TurnParts]:
    """Yields a message as turns of a chat; each result of a tool is one of its own."""
    turn, has_results = _TurnParts(role), False
    for block in blocks:
        if block["type"] == "tool_result":
            has_results = True
            if not turn.is_empty:
                yield turn
                turn = _TurnParts(role)
            yield _TurnParts("tool", [_result(block)], tool_call_id=block["tool_use_id"])
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": orjson.dumps(block["input"]).decode()}
            turn.calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] == "thinking":
            turn.thoughts.append(block["thinking"])
        elif block["type"] != "redacted_thinking":
            turn.texts.append(_text(block))
    if not (has_results and turn.is_empty):
        yield turn


def _result(block: ToolResultBlock) -> str:
    """Returns the result of a tool as the model reads it."""
    content = block.get("content", "")
    text = content if isinstance(content, str) else "\n".join(map(_text, content))
    return f"Error: {text}" if block.get("is_error") else text


def _text(block: TextBlock | DocumentBlock | SearchResultBlock) -> str:
    """Returns what the model reads of a block: of a document or a search result, where it is from as well."""
    if block["type"] == "text":
        return block["text"]
    if block["type"] == "search_result":
        return "\n".join((block["title"], block["source"], *map(_text, block["content"])))
    source = block["source"]
    content = source["data"] if source["type"] == "text" else source["content"]
    text = content if isinstance(content, str) else "\n".join(map(_text, content))
    return "\n".join(filter(None, (block.get("title"), block.get("context"), text)))
