"""An Ask: the work that a body gives the model, whichever API it came by.

The bodies of chat and text completions are translated here, those of other APIs beside their schemas. Translations know
no HTTP and no service, so that a switch reads of a request what the replica will.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.gateway.errors import invalid
from penstock.gateway.limits import Limits
from penstock.gateway.wire.completions import NO_EXTRAS, Extras
from penstock.gateway.wire.conversation import TemplateMessage, chat_tools
from penstock.gateway.wire.efforts import REASONING_FIELDS, Reasoned
from penstock.gateway.wire.logprobs import Best
from penstock.gateway.wire.questions import Questions
from penstock.gateway.wire.sampling import NO_TOKENS, MaxTokens, chat_tokens, completion_tokens, width_field
from penstock.gateway.wire.schemas import (
    ChatBody,
    CompletionBody,
    Message,
    SamplingFields,
    check_chat,
    check_completion,
    check_metadata,
)
from penstock.gateway.wire.structured import FORM_FIELDS, Form, answer_form, form_of
from penstock.gateway.wire.tools.use import NO_TOOLS, ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Messages of which the chat template makes one prompt."""

    messages: Sequence[Message]
    variables: Mapping[str, Any] | None = None
    """Further variables of the chat template."""
    documents: Sequence[Mapping[str, Any]] = ()
    opens_answer: bool = True
    """Whether the prompt ends with the beginning of an answer."""
    continues: bool = False
    """Whether the answer continues the last message."""
    before: Sequence[int] = ()
    """The tokens of the conversation so far."""
    shortens: bool = False
    """Whether the oldest turns are left out where the context has no room for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """New messages of a thread that the server keeps."""

    messages: Sequence[TemplateMessage]
    variables: Mapping[str, Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | None = None
    shortens: bool = False
    """Whether the oldest turns are left out where the context has no room for them."""

    @property
    def continues(self) -> bool:
        return (self.previous_response_id or self.conversation) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Texts, or else lists of token ids, each of which is a prompt."""

    field: str
    """Their place in the body."""
    texts: Sequence[str] = ()
    token_ids: Sequence[list[int]] = ()
    add_special: bool = True
    parse_special: bool = False
    """Whether special tokens are read from texts."""
    suffix: str = ""
    """The text after the answer, if the prompt is the text before it."""
    cuts_end: bool = False
    """Whether texts that are too long lose their end."""

    def __len__(self) -> int:
        return len(self.texts) + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """The texts around one that is to be filled in, with its beginning."""

    prefix: str
    suffix: str
    middle: str = ""
    files: Sequence[tuple[str, str]] = ()
    """The names and texts of other files of the project."""


Input = ChatPrompt | Turn | Questions | Infill | tuple[Texts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The parts of a reply that are kept, and for how long its generation goes on."""

    resumable: bool = False
    """Whether the stream can be followed again, and goes on for a while without its client."""
    background: bool = False
    """Whether it goes on to its end without its client."""
    stored: dict[str, Any] | None = None
    """The request's part of the stored completion; None if the completion is not stored."""
    output: bool = False
    """Whether the end of the stream repeats the whole output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """The parts of a reply that are shown beside its answers."""

    extras: Extras = NO_EXTRAS
    usage: bool = False
    usage_so_far: bool = False
    """Whether every chunk has the usage."""
    echo: bool = False
    """Whether each choice begins with its prompt."""


NO_RETENTION, PLAIN_REPLY = Retention(), ReplyOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    model: str
    field: str
    """The place of the input in the body."""
    input: Input
    """An empty tuple asks for nothing but that the model be loaded."""
    service_tier: str | None = None

    sampling: SamplingFields | None = None
    """The choice of tokens; None if none are generated: texts are embedded, the answers of questions are scored."""
    max_tokens: MaxTokens = NO_TOKENS
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    tools: ToolUse = NO_TOOLS
    form: Form | None = None
    """The form that each answer has to match."""
    reasoning: Reasoned | None = None
    """How much the model may reason."""
    shows_reasoning: bool = True
    truncate: int | None = None
    """The number of tokens to keep of the end of each prompt; -1 keeps those that the context has room for."""
    cuts_start: bool = False
    """Whether prompts that the context has no room for lose their beginning."""
    dimensions: int | None = None
    """The number of dimensions of each embedding; None for all."""

    retention: Retention = NO_RETENTION
    reply_options: ReplyOptions = PLAIN_REPLY
    ignored: tuple[str, ...] = ()
    """The fields that were taken and change nothing."""

    @property
    def streams(self) -> bool:
        return self.sampling is not None and bool(self.sampling.stream)

    @property
    def is_cut(self) -> bool:
        """Whether prompts are cut to a length, so that they may be of any length."""
        return self.truncate is not None or self.cuts_start

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.input)) if isinstance(self.input, tuple) else 1

    @property
    def num_choices(self) -> int:
        """The number of choices of all prompts together."""
        return self.num_prompts * (1 if self.sampling is None else self.sampling.num_generated)


# Bodies of completions


def chat_ask(body: ChatBody, limits: Limits) -> Ask:
    check_chat(body, limits)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Ask(
        model=body.model,
        field="messages",
        input=ChatPrompt(
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
        form=_form(body, limits) if body.model_fields_set & FORM_FIELDS else None,
        reasoning=body if body.model_fields_set & REASONING_FIELDS else None,
        shows_reasoning=body.shows_reasoning,
        truncate=body.truncate_prompt_tokens,
        retention=Retention(resumable=_is_resumable(body), stored=_stored(body)),
        reply_options=_reply_options(body, num_logprobs, functions=body.functions is not None),
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
    options = _reply_options(body, body.logprobs)
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
        form=_form(body, limits) if body.model_fields_set & FORM_FIELDS else None,
        truncate=None if body.suffix else body.truncate_prompt_tokens,
        retention=Retention(resumable=_is_resumable(body)),
        reply_options=replace(options, echo=bool(body.echo)),
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


def _compared(body: SamplingFields, num_logprobs: int | None) -> int | None:
    """Returns the log probabilities to compute: those asked for, or those by which the best choices are found."""
    is_compared = body.num_generated > (body.n or 1) and not body.use_beam_search
    return 0 if num_logprobs is None and is_compared else num_logprobs


def _form(body: ChatBody | CompletionBody, limits: Limits) -> Form | None:
    return form_of(body, limits, answer_form(body.response_format))


def _is_resumable(body: SamplingFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.resumable)


def _stored(body: ChatBody) -> dict[str, Any] | None:
    """Returns the messages and metadata that a stored completion has of its request."""
    if not body.store:
        return None
    check_metadata(body.metadata)
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    return {"messages": messages, "metadata": body.metadata or {}}


def _reply_options(
    body: ChatBody | CompletionBody, num_logprobs: int | None, *, functions: bool = False
) -> ReplyOptions:
    num, of, options = body.n or 1, body.num_generated, body.stream_options
    with_logprobs, usage = num_logprobs is not None, options is not None and bool(options.include_usage)
    return ReplyOptions(
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
