"""Translates the bodies of chat and text completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.gateway.errors import invalid
from penstock.gateway.limits import Limits
from penstock.gateway.wire.ask import Ask, Conversation, Kept, Shown, Texts
from penstock.gateway.wire.beams import width_field
from penstock.gateway.wire.completions import Extras
from penstock.gateway.wire.conversation import chat_tools
from penstock.gateway.wire.logprobs import Best
from penstock.gateway.wire.metadata import check_metadata
from penstock.gateway.wire.sampling import chat_tokens, completion_tokens
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, Sampled, check_chat, check_completion
from penstock.gateway.wire.structured import answer_form, form_of


def chat_ask(body: ChatBody, limits: Limits) -> Ask:
    check_chat(body, limits)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Ask(
        model=body.model,
        field="messages",
        input=Conversation(
            messages=body.messages,
            variables=body.chat_template_kwargs,
            documents=body.documents or (),
            opens_answer=body.add_generation_prompt is not False and not body.continue_final_message,
            continues=bool(body.continue_final_message),
        ),
        service_tier=body.service_tier,
        sampling=body,
        max_tokens=chat_tokens(body),
        num_logprobs=_compared(body, num_logprobs),
        num_prompt_logprobs=body.prompt_logprobs,
        tools=chat_tools(body),
        form=form_of(body, limits, answer_form(body.response_format)),
        reasoning=body,
        shows_reasoning=body.shows_reasoning,
        truncate=body.truncate_prompt_tokens,
        kept=Kept(resumable=_is_resumable(body), stored=_stored(body)),
        shown=_shown(body, num_logprobs, functions=body.functions is not None),
        ignored=("metadata",) if body.metadata and not body.store else (),
    )


def completion_ask(body: CompletionBody, limits: Limits) -> Ask:
    check_completion(body, limits)
    return text_ask(body, limits)


def text_ask(body: CompletionBody, limits: Limits) -> Ask:
    """Returns the ask of a body whose fields go together."""
    texts, token_ids = split_prompt(body.prompt)
    _check_prompts(body, len(texts) + len(token_ids), limits)
    if body.suffix is not None and token_ids:
        raise invalid("'suffix' needs a 'prompt' of text.", "suffix")
    shown = _shown(body, body.logprobs)
    prompts = Texts(
        field="prompt",
        texts=texts,
        token_ids=token_ids,
        add_special=body.add_special_tokens is not False,
        suffix=body.suffix or "",
    )
    # An echo has the log probabilities of the prompt as the answer has its own.
    in_prompt = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return Ask(
        model=body.model,
        field="prompt",
        input=(prompts,),
        service_tier=body.service_tier,
        sampling=body,
        max_tokens=completion_tokens(body),
        num_logprobs=_compared(body, body.logprobs),
        num_prompt_logprobs=max((num for num in in_prompt if num is not None), default=None),
        form=form_of(body, limits, answer_form(body.response_format)),
        truncate=None if body.suffix else body.truncate_prompt_tokens,
        kept=Kept(resumable=_is_resumable(body)),
        shown=replace(shown, echo=bool(body.echo)),
    )


def as_far_as_room(ask: Ask) -> Ask:
    """Returns an ask whose answers end where the context does, if it has no room for as many tokens as asked for."""
    return replace(ask, max_tokens=ask.max_tokens._replace(may_be_fewer=True))


def split_prompt(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[list[str], list[list[int]]]:
    """Splits the four forms of `prompt` into texts and lists of token ids."""
    if isinstance(prompt, str):
        return [prompt], []
    if prompt and isinstance(prompt[0], int):
        return [], [[token_id for token_id in prompt if isinstance(token_id, int)]]
    texts = [text for text in prompt if isinstance(text, str)]
    return texts, [token_ids for token_ids in prompt if isinstance(token_ids, list)]


def _check_prompts(body: CompletionBody, num_prompts: int, limits: Limits) -> None:
    if not 1 <= num_prompts <= limits.max_prompts:
        raise invalid(f"'prompt' must be 1 to {limits.max_prompts} prompts.", "prompt")
    if num_prompts * body.num_generated > limits.max_choices:
        name = width_field(body)
        raise invalid(f"'{name}' times the prompts must be at most {limits.max_choices}.", name)


def _compared(body: Sampled, num_logprobs: int | None) -> int | None:
    """Returns the log probabilities to compute: those asked for, or those by which the best choices are found."""
    is_compared = body.num_generated > (body.n or 1) and not body.use_beam_search
    return 0 if num_logprobs is None and is_compared else num_logprobs


def _is_resumable(body: Sampled) -> bool:
    return body.stream_options is not None and bool(body.stream_options.resumable)


def _stored(body: ChatBody) -> dict[str, Any] | None:
    """Returns the messages and metadata that a stored completion has of its request."""
    if not body.store:
        return None
    check_metadata(body.metadata)
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    return {"messages": messages, "metadata": body.metadata or {}}


def _shown(body: ChatBody | CompletionBody, num_logprobs: int | None, *, functions: bool = False) -> Shown:
    num, of, options = body.n or 1, body.num_generated, body.stream_options
    with_logprobs, usage = num_logprobs is not None, options is not None and bool(options.include_usage)
    return Shown(
        extras=Extras(
            num_top=num_logprobs or 0,
            best=Best(num, of, with_logprobs, bool(body.use_beam_search)) if of > num else None,
            num_prompt_top=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
            token_numbers=bool(body.return_tokens_as_token_ids),
            functions=functions,
        ),
        usage=usage,
        usage_so_far=usage and bool(options and options.continuous_usage_stats),
    )
