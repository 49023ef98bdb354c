"""Bodies as Asks, and the inputs of Asks as prompts: tokens, bounded before any work and made off the event loop.

Replicas and switches do this alike.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.http.fair_threads import FairThreads
from penstock.gateway.limits import Limits
from penstock.gateway.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.sessions.responses.objects import turn_ask
from penstock.gateway.sessions.responses.schemas import InputTokensBody, ResponseBody
from penstock.gateway.sessions.responses.threads import NO_THREAD, Thread, extend, num_chars, since, turns
from penstock.gateway.wire import decisions, embeddings, inference, schemas
from penstock.gateway.wire.anthropic import bodies as anthropic
from penstock.gateway.wire.ask import Ask, ChatPrompt, Infill, Texts, Turn, chat_ask, completion_ask
from penstock.gateway.wire.conversation import as_dict, check_messages, num_chars_of, thinking_switches
from penstock.gateway.wire.efforts import Reasoned
from penstock.gateway.wire.llama import bodies as llama
from penstock.gateway.wire.ollama import bodies as ollama
from penstock.gateway.wire.prompts import Prompts, check_token_ids
from penstock.gateway.wire.questions import LEAD, Questions
from penstock.gateway.wire.sampling import MaxTokens, context_exceeded
from penstock.gateway.wire.schemas import Message
from penstock.gateway.wire.strict import BodyT, StrictBody, read
from penstock.gateway.wire.tools.use import NO_TOOLS, ToolUse

MESSAGE_CHARS = 100
"""A template's work per message, in characters of text."""
TEXT_CHARS = 80
"""The tokenizer's work per text, in characters."""
_FREED_TOKENS = 64 * 1024

_Result = TypeVar("_Result")
_ANSWER_SHARE = 8
"""An answer gets at least this part of the context where a prompt is shortened."""

_TRANSLATORS: Mapping[type[StrictBody], Callable[[Any, Limits], Ask]] = {
    schemas.ChatBody: chat_ask,
    schemas.CompletionBody: completion_ask,
    ResponseBody: turn_ask,
    InputTokensBody: turn_ask,
    anthropic.MessagesBody: anthropic.message_ask,
    anthropic.CountTokensBody: anthropic.message_ask,
    ollama.OllamaChatBody: ollama.ollama_chat_ask,
    ollama.OllamaGenerateBody: ollama.prompt_ask,
    ollama.OllamaEmbedBody: ollama.embed_ask,
    ollama.OllamaEmbeddingBody: ollama.embedding_ask,
    llama.LlamaBody: llama.llama_ask,
    llama.InfillBody: llama.infill_ask,
    llama.TemplateBody: chat_ask,
    embeddings.EmbeddingsBody: embeddings.embeddings_ask,
    inference.InferTextBody: inference.infer_text_ask,
    inference.InferEmbeddingsBody: embeddings.embeddings_ask,
    embeddings.RerankBody: embeddings.rerank_ask,
    embeddings.ScoreBody: embeddings.score_ask,
    decisions.DecisionsBody: decisions.decisions_ask,
    decisions.SystemOneBody: decisions.system_ask,
}


def read_ask(
    kind: type[BodyT],
    values: Mapping[str, object],
    limits: Limits,
    ignore: Callable[[str], None] = lambda _: None,
) -> tuple[BodyT, Ask]:
    """Returns a checked body, and its translation; raises 400 that names the first field that is wrong."""
    body = read(kind, values, limits, ignore)
    ask = _TRANSLATORS[kind](body, limits)
    for field in ask.ignored:
        ignore(field)
    return body, ask


class Prompting:
    """Makes the prompts of one tenant's requests."""

    def __init__(
        self,
        prompts: Prompts,
        limits: Limits,
        threads: FairThreads,
        tenant: str,
        *,
        context_length: int = sys.maxsize,
        vocab_size: int | None = None,
        ignore: Callable[[str], None] = lambda _: None,
        note_refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            threads: long texts are tokenised there.
            vocab_size: of the model, whose tokenizer may have more tokens.
            ignore: is called with each field that was taken and changes nothing.
            note_refused: is called with the reason, if too much of the tenant's work waits.
        """
        self._prompts = prompts
        self._limits = limits
        self._threads = threads
        self._tenant = tenant
        self._context_length = context_length
        self._vocab_size = vocab_size or prompts.tokenizer.vocab_size
        self._ignore = ignore
        self._note_refused = note_refused

    async def run(self, size: int, work: Callable[[], _Result]) -> _Result:
        """Returns the result of work on texts of about `size` characters.

        Raises:
            ApiError: 429, if too much of the tenant's work waits already.
        """
        try:
            return await self._threads.run(self._tenant, size, work)
        except ApiError as error:
            if error.status == HTTPStatus.TOO_MANY_REQUESTS:
                self._note_refused(str(error.code))
            raise

    async def prompts(self, ask: Ask, thread: Thread = NO_THREAD) -> list[list[int]]:
        """Returns the prompts of an ask; of questions, the first one's, and what each further one adds to it.

        Args:
            thread: the one that a turn continues.
        """
        match ask.input:
            case ChatPrompt() as conversation:
                return [await self._conversation(ask, conversation)]
            case Turn() as turn:
                return [await self._turn(ask, turn, thread)]
            case Questions() as questions:
                shared, rests = await self.branched(questions, ask.field)
                return [shared + rests[0], *rests[1:]]
            case Infill() as infill:
                return [await self._infill(infill, ask.field)]
        return [prompt for texts in ask.input for prompt in await self._texts(ask, texts)]

    # Conversations

    async def encode_chat(
        self,
        messages: Sequence[Message],
        use: ToolUse = NO_TOOLS,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continues: bool = False,
        is_cut: bool = False,
    ) -> list[int]:
        """Returns the tokens of a conversation.

        Args:
            continues: its last message has no end.
            is_cut: as much of it as fits will be taken, however long it is.
        """
        check_messages(messages)
        num_chars = num_chars_of(messages, use)
        if not is_cut:
            self.check_length(num_chars, "messages")

        def encode() -> list[int]:
            return self._prompts.chat(
                [as_dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                continues=continues,
                tools=use.tools,
                variables=variables,
                owner=self._tenant,
            )

        return await self.run(num_chars + MESSAGE_CHARS * len(messages), encode)

    async def _conversation(self, ask: Ask, conversation: ChatPrompt) -> list[int]:
        messages, before = conversation.messages, conversation.before
        if ask.cuts_start:
            before = before[-(self._context_length - 1) :]
        if before:
            self.check_prompt_ids(before, "context")
        variables = self.variables(conversation.variables, ask.reasoning)
        if conversation.documents:
            self._check_documents(conversation.documents)
            variables["documents"] = conversation.documents

        async def encode(start: int = 0) -> list[int]:
            prompt = await self.encode_chat(
                since(messages, start, _role) if start else messages,
                ask.tools,
                variables,
                add_generation_prompt=conversation.opens_answer,
                continues=conversation.continues,
                is_cut=ask.is_cut,
            )
            return self._truncated(self._prompts.behind(before, prompt) if before else prompt, ask)

        if not conversation.shortens:
            return await encode()
        return await _shortened(encode, turns(messages, _role), ask.max_tokens, self._context_length)

    def _check_documents(self, documents: Sequence[Mapping[str, Any]]) -> None:
        if "documents" not in self._prompts.variables:
            message = "This model's chat template takes no documents."
            raise invalid(message, "documents", "unsupported_value")
        self.check_length(sum(len(str(document)) for document in documents), "documents")

    def variables(self, given: Mapping[str, Any] | None, body: Reasoned | None = None) -> dict[str, Any]:
        """Returns the variables of the chat template other than messages and tools.

        Args:
            body: says how much the model may reason.

        Raises:
            ApiError: 400 for a variable that the client may not set.
        """
        variables = dict(given or {})
        self._prompts.check_variables(variables, "chat_template_kwargs")
        return variables if body is None else self._reasoning(body) | variables

    def _reasoning(self, body: Reasoned) -> dict[str, Any]:
        """Returns the variables that say how much the model may reason."""
        readable, effort, number, is_on = self._prompts.variables, body.effort, body.num_thinking, body.is_on
        budget = body.budget(readable, self._context_length) if self._prompts.reasons else None
        variables: dict[str, Any] = {"thinking_budget": budget}
        if number == 0:
            variables |= thinking_switches(False)
        elif effort is not None and "reasoning_effort" in readable:
            variables["reasoning_effort"] = effort
        elif effort is not None:
            variables |= thinking_switches(effort != "none")
        if is_on and number != 0:
            variables |= thinking_switches(True)
        settings = {
            name: value for name, value in variables.items() if name in readable and value is not None
        }
        field = body.asked_by
        if budget is None and not settings and number != -1 and is_on is not False and field is not None:
            self._ignore(field)
        return settings

    # Turns of threads

    async def _turn(self, ask: Ask, turn: Turn, thread: Thread) -> list[int]:
        """Returns the tokens of a thread with new messages, without its oldest turns if they may be left out."""
        variables = self.variables(turn.variables, ask.reasoning)
        longer = replace(thread, messages=(*thread.messages, *turn.messages))

        async def encode(start: int = 0) -> list[int]:
            return await self._extended(
                ask, turn, replace(longer, messages=since(longer.messages, start)), variables
            )

        if not turn.shortens:
            return await encode()
        return await _shortened(encode, turns(longer.messages), ask.max_tokens, self._context_length)

    async def _extended(
        self, ask: Ask, turn: Turn, thread: Thread, variables: Mapping[str, Any]
    ) -> list[int]:
        num_said = sum(map(num_chars, thread.messages)) + len(turn.instructions or "") + ask.tools.num_chars
        self.check_length(num_said, ask.field)
        make = partial(
            extend,
            self._prompts,
            thread,
            (),
            instructions=turn.instructions,
            tools=ask.tools.tools,
            variables=variables,
            owner=self._tenant,
        )
        with _naming(ask.field, instead_of="messages"):
            return await self.run(
                num_said + MESSAGE_CHARS * len(thread.messages) + len(thread.token_ids), make
            )

    # Questions

    async def branched(self, questions: Questions, field: str) -> tuple[list[int], list[list[int]]]:
        """Returns the tokens that all questions share, and the further ones of each."""
        messages, texts = questions.messages, [question.text for question in questions.questions]
        num_shared = sum(len(message["content"]) for message in messages)
        self.check_length(num_shared + max(map(len, texts)), field)
        num_texts = len(messages) + len(texts)
        branched = partial(self._prompts.branched, messages, LEAD, texts, thinking_switches(False))
        return await self.run(num_shared + sum(map(len, texts)) + MESSAGE_CHARS * num_texts, branched)

    # Texts

    async def _infill(self, given: Infill, field: str) -> list[int]:
        """Returns the tokens that ask for the text between two others; raises 400 if the model has none for that."""
        texts = given.prefix, given.suffix, given.middle
        size = sum(map(len, texts)) + sum(len(name) + len(text) for name, text in given.files)
        self.check_length(size, field)
        with _naming("input_suffix", instead_of="suffix"):
            prompt = await self.run(size, partial(self._prompts.infill, *texts, given.files))
        self.check_prompt_ids(prompt, field)
        return prompt

    async def _texts(self, ask: Ask, given: Texts) -> list[list[int]]:
        longest = self._context_length - 1 if given.cuts_end else None
        encoded = [] if given.token_ids else await self._encoded(given, longest, is_cut=ask.is_cut)
        prompts = given.token_ids or encoded

        def checked() -> list[list[int]]:
            cut = [self._truncated(prompt[:longest], ask) for prompt in prompts]
            try:
                for prompt in cut:
                    self.check_prompt_ids(prompt, given.field)
            except ApiError:
                for prompt in cut:
                    _empty(prompt)
                raise
            finally:
                for prompt in encoded:
                    _empty(prompt)
            return cut

        return await off_loop(TOKEN_BYTES * sum(map(len, prompts)), checked)

    async def encode_text(self, text: str, field: str, *, add_special: bool = True) -> list[int]:
        (token_ids,) = await self._encoded(Texts(field=field, texts=[text], add_special=add_special))
        return token_ids

    async def _encoded(
        self, given: Texts, longest: int | None = None, *, is_cut: bool = False
    ) -> list[list[int]]:
        """Returns the tokens of each text, with its suffix if there is one; all of them are one piece of work.

        Args:
            longest: about as many tokens of each text are enough.
            is_cut: as much of each text as fits will be taken, however long it is.

        Raises:
            ApiError: 400, if a text is empty or too long.
        """
        texts, suffix, field = given.texts, given.suffix, given.field
        if longest is not None:
            texts = [text[: longest * self._limits.max_bytes_per_token] for text in texts]
        for text in () if is_cut else texts:
            self.check_length(len(text) + len(suffix), field)
            if not text.isascii():
                self.check_length(len(text.encode(errors="replace")), field, "bytes")
        encode = partial(self._prompts.text, add_special=given.add_special, parse_special=given.parse_special)
        if suffix:
            encode = partial(self._prompts.around, suffix=suffix)
        size = sum(map(len, texts)) + len(texts) * (len(suffix) + TEXT_CHARS)
        prompts = await self.run(size, lambda: list(map(encode, texts)))
        if not all(prompts):
            raise invalid(f"'{field}' must not be empty.", field)
        return prompts

    def _truncated(self, prompt: list[int], ask: Ask) -> list[int]:
        """Returns the last tokens of a prompt: as many as the ask has or, for -1, as leave room to answer."""
        num = ask.truncate
        if ask.cuts_start and len(prompt) >= self._context_length:
            num = self._context_length - _answer_room(ask.max_tokens, self._context_length)
        if num is None:
            return prompt
        return prompt[-(num if num > 0 else max(1, self._context_length - ask.max_tokens.least)) :]

    def check_prompt_ids(self, prompt: Sequence[int], field: str = "prompt") -> None:
        if not prompt:
            raise invalid(f"'{field}' must not have an empty list of tokens.", field)
        if len(prompt) >= self._context_length:
            raise context_exceeded(self._context_length, f"{len(prompt)} tokens", field, len(prompt))
        check_token_ids(prompt, self._vocab_size, field)

    def check_length(self, number: int, field: str, what: str = "characters") -> None:
        """Refuses a text that is too long whatever its tokens are, before it is tokenised."""
        most = self._limits.max_bytes_per_token
        if number > self._context_length * most:
            raise context_exceeded(self._context_length, f"{number} {what}", field, -(-number // most))


def _empty(token_ids: list[int]) -> None:
    """Frees the tokens of a long prompt in pieces: to free them together holds the interpreter."""
    while token_ids:
        del token_ids[-_FREED_TOKENS:]


@contextmanager
def _naming(field: str, *, instead_of: str) -> Iterator[None]:
    """Names the field of a mistake as the body has it."""
    try:
        yield
    except ApiError as error:
        if error.param != instead_of:
            raise
        raise invalid(error.message, field, error.code) from None


def _role(message: Message) -> str:
    return message.role


def _answer_room(max_tokens: MaxTokens, context_length: int) -> int:
    """Returns the tokens of the answer that a shortened prompt leaves room for."""
    share = max(1, context_length // _ANSWER_SHARE)
    if max_tokens.number is None:
        return share
    return max(1, min(share, max_tokens.number) if max_tokens.may_be_fewer else max_tokens.number)


async def _shortened(
    encode: Callable[[int], Awaitable[list[int]]],
    starts: Sequence[int],
    max_tokens: MaxTokens,
    context_length: int,
) -> list[int]:
    """Returns the prompt without as many of the oldest turns as it takes to fit, but with the last one.

    Args:
        encode: returns the prompt that begins with the turn at a place.
        starts: the places at which turns begin.
    """

    async def fitting(start: int, room: int) -> list[int] | None:
        try:
            prompt = await encode(start)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        return prompt if len(prompt) + room <= context_length else None

    if (prompt := await fitting(0, max_tokens.least)) is not None:
        return prompt
    later, room = [start for start in starts if start], _answer_room(max_tokens, context_length)
    longest, low, high = None, 0, len(later)
    while low < high:
        middle = (low + high) // 2
        prompt = await fitting(later[middle], room)
        if prompt is None:
            low = middle + 1
        else:
            longest, high = prompt, middle
    return longest or await encode(max(later, default=0))
