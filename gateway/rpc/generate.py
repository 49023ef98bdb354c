"""Penstock's own service: a request for text as a body of completions, and the stream of its replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.gateway.errors import invalid
from penstock.gateway.limits import Limits
from penstock.gateway.rpc.schema import PENSTOCK, values_of
from penstock.gateway.wire.frames import ReplyWriter, StreamedChoice, timings_of
from penstock.gateway.wire.parsing import Piece, joined
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.schemas import ChatBody, CompletionBody
from penstock.gateway.wire.writing import Delta, Head, Outputs, Reply


def generate_body(
    message: Any, model: str, limits: Limits
) -> tuple[type[ChatBody | CompletionBody], dict[str, Any]]:
    """Returns the kind of body that a GenerateRequest is, and its fields.

    Args:
        model: is meant where the request names none.

    Raises:
        ApiError: 400, if it has a prompt and messages, or too many messages.
    """
    if message.messages and message.HasField("prompt"):
        raise invalid("Give 'prompt' or 'messages', not both.", "prompt")
    if len(message.messages) > limits.max_messages:
        raise invalid(f"'messages' may be at most {limits.max_messages}.", "messages")
    values = {"model": model, **values_of(message), "stream": True}
    if not message.messages:
        return CompletionBody, values
    values["messages"] = [
        {"role": one.role, "content": one.content, **values_of(one)} for one in message.messages
    ]
    return ChatBody, values


class GenerateWriter(ReplyWriter[StreamedChoice]):
    """The `gateway.wire.writing.Writer` of a stream of GenerateReplies; an error is the status of the call."""

    def __init__(self, head: Head, reading: Reading) -> None:
        self._choices = (StreamedChoice(parser=reading.parser(head.id)),)
        self._finish_reason = ""

    def more(self, reply: Reply, index: int, delta: Delta) -> list[bytes]:  # noqa: ARG002
        parser = self._choices[index].parser
        pieces = parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.finish()
            self._finish_reason = str(delta.finish_reason)
        return self._chunks(self._choices[index], pieces)

    def _chunks(self, choice: StreamedChoice, pieces: Sequence[Piece]) -> list[bytes]:  # noqa: ARG002
        answer = joined(pieces)
        if not (answer.text or answer.reasoning):
            return []
        reply = PENSTOCK.GenerateReply(text=answer.text, reasoning=answer.reasoning)
        return [reply.SerializeToString()]

    def end(self, reply: Reply) -> list[bytes]:
        if reply.error is not None:
            return []
        usage = {
            "prompt_tokens": reply.num_prompt_tokens,
            "completion_tokens": reply.num_output_tokens,
            "cached_tokens": reply.num_cached_tokens,
            "reasoning_tokens": reply.num_reasoning_tokens,
        }
        known, names = timings_of(reply) or {}, PENSTOCK.Timings.DESCRIPTOR.fields_by_name
        timings = {name: known[name] for name in names if known.get(name) is not None}
        last = PENSTOCK.GenerateReply(finish_reason=self._finish_reason, usage=usage, timings=timings)
        return [last.SerializeToString()]

    def whole(self, reply: Reply, outputs: Outputs) -> dict[str, object]:
        raise NotImplementedError("a GenerateRequest is always streamed")
