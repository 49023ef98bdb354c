"""Translates the bodies of responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field

from penstock.gateway.limits import Limits
from penstock.gateway.sessions.responses.objects import Item, as_messages, input_items, response_tools
from penstock.gateway.sessions.responses.schemas import InputItems, ResponseBody, check_response, text_form
from penstock.gateway.wire.ask import Ask, Kept, Turn
from penstock.gateway.wire.efforts import REASONING_FIELDS
from penstock.gateway.wire.sampling import MaxTokens
from penstock.gateway.wire.structured import FORM_FIELDS, form_of


class InputTokensBody(ResponseBody):
    """The body of `POST /v1/responses/input_tokens`: that of a response, of which nothing is required."""

    IGNORED = ResponseBody.IGNORED | {"personality"}

    model: str = ""
    input: Annotated[str | InputItems, BeforeValidator(lambda given: [] if given is None else given)] = Field(
        default_factory=list
    )
    personality: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTurn(Turn):
    items: list[Item]
    """The messages as the API lists them."""


def turn_ask(body: ResponseBody, limits: Limits) -> Ask:
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
        kept=Kept(
            resumable=body.stream_options is not None and bool(body.stream_options.resumable),
            background=bool(body.background),
        ),
    )
