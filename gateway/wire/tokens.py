"""Request bodies about tokens alone: texts to tokens and back, and where a prompt is cached."""

from __future__ import annotations

from penstock.gateway.wire.schemas import Messages, TokenIds, Tools, Variables
from penstock.gateway.wire.strict import StrictBody


class TokenizeBody(StrictBody):
    """`POST /tokenize`: a prompt or messages or, as llama.cpp has it, a content."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: Variables | None = None
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
    tokens: TokenIds


class LocateBody(StrictBody):
    """`/v1/prefixes/locate`: the prompt, as tokens or as messages."""

    tokens: TokenIds | None = None
    messages: Messages | None = None
