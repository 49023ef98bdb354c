"""The translation of bodies of responses, and the objects that the API shows of them: items, lists, responses."""

from __future__ import annotations

import secrets
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from penstock.gateway.errors import invalid
from penstock.gateway.limits import Limits
from penstock.gateway.sessions.responses.schemas import (
    AllowedTools,
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    ItemStatus,
    NamedTool,
    PageQuery,
    ReasoningText,
    ResponseBody,
    Role,
    TextConfig,
    TextPart,
    check_response,
    text_form,
)
from penstock.gateway.wire.ask import Ask, Retention, Turn
from penstock.gateway.wire.conversation import TemplateMessage, as_call
from penstock.gateway.wire.efforts import REASONING_FIELDS
from penstock.gateway.wire.parsing import Call
from penstock.gateway.wire.reading import PLAIN, Reading
from penstock.gateway.wire.sampling import MaxTokens
from penstock.gateway.wire.strict import StrictBody
from penstock.gateway.wire.structured import FORM_FIELDS, form_of
from penstock.gateway.wire.tools.use import ToolUse, tool_use

JsonObject = dict[str, Any]

_SEAL = "penstock1."


class InputText(TypedDict):
    """A text that a client sent."""

    type: Literal["input_text"]
    text: str


class OutputText(TypedDict):
    """A text that the model said."""

    type: Literal["output_text"]
    text: str
    annotations: list[object]
    logprobs: list[Any]
    """OpenAI's entries of its tokens."""


class MessageItem(TypedDict):
    """A message, as the API lists it."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Role
    content: list[InputText | OutputText]


class CallItem(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CallOutputItem(TypedDict):
    """The output of a tool."""

    id: str
    type: Literal["function_call_output"]
    status: ItemStatus
    call_id: str
    output: str


class ReasoningItem(TypedDict):
    """The reasoning of the model."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[object]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


Item = Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


# Items


def input_items(body_input: str | Sequence[InputItem]) -> list[Item]:
    """Returns a client's input as the API lists it: every item has an id, every text of a message is a part."""
    if isinstance(body_input, str):
        return [message_item(new_id("msg"), "user", [body_input], "completed")]
    return list(map(_listed, body_input))


def _listed(item: InputItem) -> Item:
    status = item.status or "completed"
    if isinstance(item, InputMessage):
        return message_item(item.id or new_id("msg"), item.role, _texts(item.content), status)
    if isinstance(item, InputCall):
        return call_item(item.id or new_id("fc"), Call(item.call_id, item.name, item.arguments), status)
    if isinstance(item, InputCallOutput):
        return {
            "id": item.id or new_id("fco"),
            "type": "function_call_output",
            "status": status,
            "call_id": item.call_id,
            "output": "\n".join(_texts(item.output)),
        }
    texts = [part["text"] for part in item.content or ()]
    if not texts and (unsealed := _unsealed(item.encrypted_content)) is not None:
        texts = [unsealed]
    return reasoning_item(item.id or new_id("rs"), texts, status)


def _texts(content: str | Sequence[TextPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def message_item(
    item_id: str, role: Role, texts: Sequence[str], status: ItemStatus, logprobs: Sequence[Any] = ()
) -> MessageItem:
    """`logprobs` are those of an assistant's only text."""
    said = role == "assistant"
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": role,
        "content": [text_part(text, logprobs) if said else _input_part(text) for text in texts],
    }


def call_item(item_id: str, call: Call, status: ItemStatus) -> CallItem:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def reasoning_item(
    item_id: str, texts: Sequence[str], status: ItemStatus, *, seals: bool = False
) -> ReasoningItem:
    """Returns an item of reasoning; with `seals`, it has its texts as one opaque string, too."""
    item: ReasoningItem = {
        "id": item_id,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [reasoning_part(text) for text in texts],
    }
    if seals and texts:
        item["encrypted_content"] = _sealed("\n".join(texts))
    return item


def _sealed(text: str) -> str:
    """Returns reasoning as one opaque string; it is no cipher, for its client may read it anyway."""
    return _SEAL + b64encode(text.encode(errors="replace")).decode("ascii")


def _unsealed(text: str | None) -> str | None:
    """Returns the text that was sealed; None if another server did it."""
    if text is None or not text.startswith(_SEAL):
        return None
    try:
        return b64decode(text.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        return None


def text_part(text: str, logprobs: Sequence[Any] = ()) -> OutputText:
    return {"type": "output_text", "annotations": [], "logprobs": list(logprobs), "text": text}


def reasoning_part(text: str) -> ReasoningText:
    return {"type": "reasoning_text", "text": text}


def _input_part(text: str) -> InputText:
    return {"type": "input_text", "text": text}


def texts_of(item: Item) -> list[str]:
    """Returns all texts of an item."""
    if item["type"] == "function_call":
        return [item["arguments"]]
    if item["type"] == "function_call_output":
        return [item["output"]]
    return [part["text"] for part in item["content"]]


def as_messages(items: Sequence[Item]) -> list[TemplateMessage]:
    """Returns items as chat templates know them: texts are joined, an assistant's message has reasoning and calls."""
    messages: list[TemplateMessage] = []
    for item in items:
        said = "\n".join(texts_of(item))
        if item["type"] == "function_call_output":
            messages.append({"role": "tool", "content": said, "tool_call_id": item["call_id"]})
        elif item["type"] == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = as_call(item["call_id"], item["name"], item["arguments"])
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item["type"] == "reasoning":
            messages.append({"role": "assistant", "content": "", "reasoning_content": said})
        elif item["role"] == "assistant" and messages and _only_reasons(messages[-1]):
            messages[-1]["content"] = said
        else:
            messages.append({"role": item["role"], "content": said})
    return messages


def _only_reasons(message: TemplateMessage) -> bool:
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def response_tools(body: ResponseBody) -> ToolUse:
    """Returns the tools of a turn; raises 400 if the choice and the tools do not fit each other."""
    tools = [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        for tool in body.tools or ()
    ]
    choice, one_call = body.tool_choice, body.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        return tool_use(tools, "required", [choice.name], one_call=True)
    if isinstance(choice, AllowedTools):
        return tool_use(tools, choice.mode, [tool.name for tool in choice.tools], one_call=one_call)
    return tool_use(tools, choice or "auto", one_call=one_call)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTurn(Turn):
    items: list[Item]
    """The messages as the API lists them."""


def turn_ask(body: ResponseBody, limits: Limits) -> Ask:
    """Translates the body of a response."""
    check_response(body, limits)
    items = input_items(body.input)
    return Ask(
        model=body.model,
        field="input",
        input=ResponseTurn(
            messages=as_messages(items),
            items=items,
            variables=body.chat_template_kwargs,
            instructions=body.instructions,
            previous_response_id=body.previous_response_id,
            conversation=body.conversation,
            shortens=body.truncation == "auto",
        ),
        service_tier=body.service_tier,
        sampling=body,
        max_tokens=MaxTokens("max_output_tokens", body.max_output_tokens),
        num_logprobs=body.num_logprobs,
        tools=response_tools(body),
        form=form_of(body, limits, text_form(body.text)) if body.model_fields_set & FORM_FIELDS else None,
        reasoning=body if body.model_fields_set & REASONING_FIELDS else None,
        retention=Retention(
            resumable=body.stream_options is not None and bool(body.stream_options.resumable),
            background=bool(body.background),
        ),
    )


def place_after(ids: Sequence[str], after: str | None) -> int:
    """Returns where a list goes on after an item, or begins.

    Raises:
        ApiError: 400, if there is no item to go on after.
    """
    if after is None:
        return 0
    if after not in ids:
        raise invalid(f"There is no item '{after}' in this list.", "after")
    return ids.index(after) + 1


def page(items: Sequence[Mapping[str, Any]], query: PageQuery) -> JsonObject:
    """Returns one page of a list of items that is in the order in which they came.

    Raises:
        ApiError: 400, if there is no item to go on after.
    """
    ordered = list(items) if query.order == "asc" else list(reversed(items))
    left = ordered[place_after([item["id"] for item in ordered], query.after) :]
    shown = left[: query.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else "",
        "last_id": shown[-1]["id"] if shown else "",
        "has_more": len(left) > len(shown),
    }


# Responses


def details_of(
    body: ResponseBody, items: list[Item], history: Sequence[TemplateMessage], reading: Reading = PLAIN
) -> JsonObject:
    """Returns the details stored with a recording, from which all of its objects can be made at any time.

    Args:
        items: of this request, as `input_items` made them.
        history: the messages before them, without the instructions of any turn.
    """
    return {
        "reading": asdict(reading),
        "input": items,
        "history": list(history),
        "store": body.stored,
        "seals": body.seals_reasoning,
        "background": bool(body.background),
        "conversation": body.conversation,
        "echo": _echo(body),
    }


def _echo(body: ResponseBody) -> JsonObject:
    """Returns the fields of a response that are the same from its beginning to its end."""
    return {
        "background": bool(body.background),
        "conversation": None if body.conversation is None else {"id": body.conversation},
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": body.reasoning and body.reasoning.effort,
            "summary": body.reasoning and body.reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "store": body.stored,
        "tool_choice": _plain(body.tool_choice) or "auto",
        "tools": [_TOOL | tool for tool in body.tools or ()],
        "text": {"format": _format(body.text), "verbosity": (body.text and body.text.verbosity) or "medium"},
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


_TOOL = {"description": None, "parameters": None, "strict": None}


def _plain(choice: str | StrictBody | None) -> str | JsonObject | None:
    return choice.model_dump() if isinstance(choice, StrictBody) else choice


def _format(text: TextConfig | None) -> JsonObject:
    if text is None or text.format is None:
        return {"type": "text"}
    return text.format.model_dump(by_alias=True, exclude_unset=True)


def deleted(response_id: str) -> JsonObject:
    return {"id": response_id, "object": "response", "deleted": True}
