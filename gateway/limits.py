"""Bounds on one request, checked before any work is done for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.gateway.errors import ApiError, invalid

_STRING = re.compile(rb'"[^"]*"?')
_PIECE_BYTES = 64 * 1024
_CONTAINERS = frozenset({dict, list})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one request. Beyond them it is refused with a 4xx that names the field."""

    max_body_bytes: int = 4 * 1024 * 1024
    max_bodies_bytes: int = 256 * 1024 * 1024
    """The bytes of all bodies together, each from its arrival until its answer begins; uploads do not count."""
    max_upload_bytes: int = 100 * 1024 * 1024
    """The bytes of an upload, which is not kept in memory."""
    max_header_bytes: int = 32 * 1024
    max_headers: int = 100
    max_json_depth: int = 32
    max_json_containers: int = 16_384
    """The arrays and objects of a body: each takes far more memory than its two brackets did."""
    max_json_strings: int = 65_536
    """The strings of a body, names of members included."""
    max_json_values: int = 262_144
    """The values of a body, by the commas between them: numbers cost time long before they fill a body."""
    max_json_members: int = 2048
    """The members of one object."""
    max_messages: int = 2048
    max_content_parts: int = 256
    max_tools: int = 512
    max_tool_calls: int = 128
    """The calls of one message."""
    max_template_variables: int = 32
    max_prompts: int = 64
    max_inputs: int = 1024
    """The texts of one request for embeddings."""
    max_branches: int = 8192
    """The questions of one request for decisions, and the tokens of their answers but for each first one."""
    max_choices: int = 128
    """The choices of one request, those of all its prompts together."""
    max_beams: int = 16
    max_stop: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024
    max_bad_words: int = 64
    max_bad_word_chars: int = 256
    max_allowed_token_ids: int = 16_384
    max_metadata: int = 16
    max_grammar_bytes: int = 64 * 1024
    """The bytes of a schema, regular expression or grammar that an answer has to match."""
    max_grammar_choices: int = 1024
    max_top_logprobs: int = 20
    max_logprobs: int = 2**20
    """The log probabilities of a reply in one piece: all are kept until it is complete, at about 100 bytes each."""
    max_bytes_per_token: int = 16
    """A prompt of more bytes than the context times this is too long whatever its tokens are."""


def parse_object(body: bytes, limits: Limits) -> dict[str, object]:
    """Returns the JSON object in a request body.

    Raises:
        ApiError: 400, if it is none, or larger or nested deeper than `limits` allow.
    """
    _check_counts(body, limits)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if error.msg.startswith("depth limit"):
            raise _too_deep(limits) from None
        message = f"The request body could not be parsed as JSON: {error}."
        raise invalid(message, None, "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("The request body must be a JSON object.", None, "invalid_json")
    _check_nesting(value, limits)
    return value


def parse_messages(text: str, limits: Limits) -> object:
    """Returns the value of a query's `messages`; raises 400 if it is not JSON."""
    return parse_object(b'{"messages":' + text.encode() + b"}", limits).get("messages")


def _check_counts(body: bytes, limits: Limits) -> None:
    """Raises 400 for more containers, values or strings than `limits` allow, before any is made."""
    bounds = (
        ("arrays and objects", limits.max_json_containers),
        ("values", limits.max_json_values),
        ("strings", limits.max_json_strings),
    )
    if all(number <= most for number, (_, most) in zip(_count(body), bounds, strict=True)):
        return
    # Most of them may stand inside strings. Without escaped ones, every quote opens or closes a string; a piece at a
    # time, for a search holds the interpreter until it is over.
    body = body.replace(rb"\\", b"  ").replace(rb"\"", b"  ")
    containers = values = num_quotes = 0
    for start in range(0, len(body), _PIECE_BYTES):
        piece = body[start : start + _PIECE_BYTES]
        found, commas, _ = _count(_STRING.sub(b"", b'"' + piece if num_quotes % 2 else piece))
        containers += found
        values += commas
        num_quotes += piece.count(b'"')
        for number, (what, most) in zip((containers, values, num_quotes / 2), bounds, strict=True):
            if number > most:
                raise _too_many(what, most)


def _count(text: bytes) -> tuple[int, int, float]:
    """Returns the number of opening brackets, of commas and of pairs of quotes."""
    return text.count(b"[") + text.count(b"{"), text.count(b","), text.count(b'"') / 2


def _check_nesting(value: dict[str, object], limits: Limits) -> None:
    level: list[dict[str, Any] | list[Any]] = [value]
    for _ in range(limits.max_json_depth):
        below: list[dict[str, Any] | list[Any]] = []
        for node in level:
            if isinstance(node, dict) and len(node) > limits.max_json_members:
                raise _too_many("members in one object", limits.max_json_members)
            items = node.values() if isinstance(node, dict) else node
            if not _CONTAINERS.isdisjoint(map(type, items)):
                below += [item for item in items if type(item) in _CONTAINERS]
        if not below:
            return
        level = below
    raise _too_deep(limits)


def _too_deep(limits: Limits) -> ApiError:
    message = f"The JSON body is nested deeper than {limits.max_json_depth} levels."
    return invalid(message, None, "json_too_deep")


def _too_many(what: str, most: int) -> ApiError:
    return invalid(f"The JSON body has more than {most} {what}.", None, "json_too_large")
