"""The objects of the Responses API as JSON: items, lists of items, and the response in each of its states."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from engine.planning.request import FinishReason
from gateway.http.errors import ApiError, invalid
from gateway.sessions.recordings.recording import Recording
from gateway.sessions.responses.schemas import InputMessage, PageQuery, ResponseBody, TextConfig
from gateway.sessions.responses.threads import Message
from gateway.wire.frames import usage_of
from gateway.wire.sampling import tier_of
from priority.lanes import Lane

JsonObject = dict[str, Any]


class Part(TypedDict):
    """A text of an item."""

    type: str
    text: str
    annotations: NotRequired[list[object]]
    logprobs: NotRequired[list[object]]


class Item(TypedDict):
    """A message, as the API lists it."""

    id: str
    type: str
    status: str
    role: str
    content: list[Part]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


# Items


def input_items(body_input: str | list[InputMessage]) -> list[Item]:
    """What a client sent, as the API lists it: every item has an id, every text is a part."""
    if isinstance(body_input, str):
        return [_item(new_id("msg"), "user", [body_input], "completed")]
    return [
        _item(item.id or new_id("msg"), item.role, _texts(item), item.status or "completed")
        for item in body_input
    ]


def _texts(item: InputMessage) -> list[str]:
    return [item.content] if isinstance(item.content, str) else [part["text"] for part in item.content]


def _item(item_id: str, role: str, texts: Sequence[str], status: str) -> Item:
    part = text_part if role == "assistant" else _input_part
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": role,
        "content": [part(text) for text in texts],
    }


def text_part(text: str) -> Part:
    """A part that the model said."""
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _input_part(text: str) -> Part:
    return {"type": "input_text", "text": text}


def as_messages(items: Sequence[Item]) -> list[Message]:
    """Items as chat templates know them: parts of text are joined."""
    return [
        {"role": item["role"], "content": "\n".join(part["text"] for part in item["content"])}
        for item in items
    ]


def page(items: Sequence[Mapping[str, Any]], query: PageQuery) -> JsonObject:
    """One page of a list of items that is in the order in which they came.

    Raises:
        ApiError: 400, if there is no item to go on after.
    """
    found = list(items) if query.order == "asc" else list(reversed(items))
    if query.after is not None:
        ids = [item["id"] for item in found]
        if query.after not in ids:
            raise invalid(f"There is no item '{query.after}' in this list.", "after")
        found = found[ids.index(query.after) + 1 :]
    shown = found[: query.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else "",
        "last_id": shown[-1]["id"] if shown else "",
        "has_more": len(found) > len(shown),
    }


# Responses


def about(body: ResponseBody, lane: Lane, items: list[Item], history: Sequence[Message]) -> JsonObject:
    """What is written down with a recording, so that all of its objects can be made from it at any time.

    Args:
        items: of this request, as `input_items` made them.
        history: the messages before them, without the instructions of any turn.
    """
    return {
        "item_id": new_id("msg"),
        "input": items,
        "history": list(history),
        "store": body.stored,
        "background": bool(body.background),
        "conversation": body.conversation,
        "echo": _echo(body, lane),
    }


def _echo(body: ResponseBody, lane: Lane) -> JsonObject:
    """The fields of a response that are the same from its beginning to its end."""
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
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": tier_of(lane),
        "store": body.stored,
        "text": {"format": _format(body.text), "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": body.user,
    }


def _format(text: TextConfig | None) -> JsonObject:
    if text is None or text.format is None:
        return {"type": "text"}
    return text.format.model_dump(by_alias=True, exclude_unset=True)


def status_of(recording: Recording) -> str:
    if not recording.ended or recording.is_interrupted:
        return "queued" if recording.about["background"] and not recording.started else "in_progress"
    if recording.cancelled:
        return "cancelled"
    if recording.error is not None or recording.finish_reason is None:
        return "failed"
    return "incomplete" if recording.finish_reason is FinishReason.LENGTH else "completed"


def beginning(recording: Recording, status: str) -> JsonObject:
    """The response before anything came of it, whatever did since."""
    sampling = recording.request.sampling
    return {
        "id": recording.id,
        "object": "response",
        "created_at": recording.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **recording.about["echo"],
    }


def response(recording: Recording) -> JsonObject:
    """The response as it is now; its output is there when it has ended."""
    status = status_of(recording)
    found = beginning(recording, status)
    if status in ("queued", "in_progress"):
        return found
    found["output"] = _output(recording, status)
    if status == "failed":
        return found | {"error": _error(recording.error)}
    found["usage"] = _usage(recording)
    if status == "incomplete":
        found["incomplete_details"] = {"reason": "max_output_tokens"}
    return found if recording.timings_json is None else found | {"timings": recording.timings_json}


def output_item(recording: Recording, status: str, texts: Sequence[str]) -> Item:
    """The one message of a response; it is complete only if the response is."""
    item_status = status if status in ("in_progress", "completed") else "incomplete"
    return _item(recording.about["item_id"], "assistant", texts, item_status)


def _output(recording: Recording, status: str) -> list[Item]:
    """Nothing, if it ended before its time and before anything was said."""
    if not recording.num_texts and status in ("failed", "cancelled"):
        return []
    return [output_item(recording, status, [recording.text])]


def _error(error: ApiError | None) -> JsonObject:
    if error is None:
        return {"code": "server_error", "message": "The server ended the request."}
    code = "rate_limit_exceeded" if error.type == "rate_limit_error" else "server_error"
    return {"code": code, "message": error.message}


def _usage(recording: Recording) -> JsonObject:
    usage = usage_of(recording)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def deleted(response_id: str) -> JsonObject:
    return {"id": response_id, "object": "response", "deleted": True}
