"""Request bodies about tokens alone: texts to tokens and back, and where a prompt is cached."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from penstock.gateway.wire.schemas import MOST_MESSAGES, TOLERANT_IN_MESSAGES, Message, Tool, known_tools
from penstock.gateway.wire.strict import Many, StrictBody


class TokenizeBody(StrictBody):
    """`POST /tokenize`: a prompt or messages or, as llama.cpp has it, a content."""

    MOST = MOST_MESSAGES
    TOLERANT_AT = TOLERANT_IN_MESSAGES

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    tools: Annotated[Many[Tool], BeforeValidator(known_tools)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(StrictBody):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Many[Annotated[int, Field(ge=0)]]


class LocateBody(StrictBody):
    """`/v1/prefixes/locate`: the prompt, as tokens or as messages."""

    MOST = MOST_MESSAGES
    TOLERANT_AT = TOLERANT_IN_MESSAGES

    tokens: Many[Annotated[int, Field(ge=0)]] | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
