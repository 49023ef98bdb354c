"""Chat completions that clients had stored: their records, and how chunks of a stream are put together again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.store.records import Records

KIND = "chat_completion"
KEPT_S = 24 * 3600.0
"""A completion is kept for so long after it was stored or asked for."""
_HEAD = ("id", "created", "model", "service_tier", "system_fingerprint")
_TEXTS = ("content", "reasoning_content")


@dataclass(slots=True, kw_only=True)
class StoredChat:
    """The record of a chat completion."""

    completion: dict[str, Any]
    messages: list[dict[str, Any]]
    metadata: dict[str, str] = field(default_factory=dict)
    num_bytes: int

    def as_json(self) -> dict[str, Any]:
        """The completion as OpenAI's API shows it."""
        return {**self.completion, "metadata": self.metadata}

    def messages_as_json(self) -> list[dict[str, Any]]:
        """The messages that it answers as OpenAI's API shows them."""
        return [_message(f"{self.completion['id']}-{i}", message) for i, message in enumerate(self.messages)]


CHATS = Records(KIND, StoredChat, KEPT_S, lambda chat: chat.num_bytes)


def _message(id: str, message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    is_text = content is None or isinstance(content, str)
    return {
        **message,
        "id": id,
        "content": content if is_text else None,
        "content_parts": None if is_text else content,
    }


class Chunks:
    """Puts the chunks of a streamed chat completion together."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}
        self.is_failed = False

    def add(self, chunk: Mapping[str, Any]) -> None:
        self.is_failed = self.is_failed or "error" in chunk
        if self.is_failed:
            return
        self._head |= {name: chunk[name] for name in _HEAD if name in chunk}
        self._head |= {name: chunk[name] for name in ("usage", "timings") if chunk.get(name)}
        for choice in chunk["choices"]:
            self._choices.setdefault(choice["index"], _Choice()).add(choice)

    def completion(self) -> dict[str, Any]:
        choices = [{"index": index, **choice.as_json()} for index, choice in sorted(self._choices.items())]
        return {**self._head, "object": "chat.completion", "choices": choices}


class _Choice:
    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}
        self._logprobs: list[Any] | None = None
        self._finish_reason: str | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        for name in _TEXTS:
            if text := choice["delta"].get(name):
                self._texts.setdefault(name, []).append(text)
        for call in choice["delta"].get("tool_calls", ()):
            self._add_call(call["index"], call)
        if (logprobs := choice.get("logprobs")) is not None:
            self._logprobs = [*(self._logprobs or ()), *logprobs["content"]]
        self._finish_reason = choice["finish_reason"] or self._finish_reason

    def _add_call(self, index: int, call: Mapping[str, Any]) -> None:
        if "id" in call:
            self._calls[index] = {"id": call["id"], "type": call["type"], "name": call["function"]["name"]}
        self._arguments.setdefault(index, []).append(call["function"]["arguments"])

    def as_json(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        message |= {name: "".join(texts) for name, texts in self._texts.items()}
        if self._calls:
            message["tool_calls"] = [self._call(index, call) for index, call in sorted(self._calls.items())]
        elif message["content"] is None:
            message["content"] = ""
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {"message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}

    def _call(self, index: int, call: Mapping[str, str]) -> dict[str, Any]:
        function = {"name": call["name"], "arguments": "".join(self._arguments[index])}
        return {"id": call["id"], "type": call["type"], "function": function}


def fits(chat: StoredChat, model: str | None, metadata: Mapping[str, str]) -> bool:
    """Whether a completion is of a model, and has all of the metadata."""
    is_of_model = model in (None, chat.completion["model"])
    return is_of_model and metadata.items() <= chat.metadata.items()
