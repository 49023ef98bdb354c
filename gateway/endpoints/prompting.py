"""Prompts: what a request says as tokens, bounded before any work and tokenised off the event loop."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from penstock.gateway.http.errors import ApiError, invalid
from penstock.gateway.http.limits import Limits
from penstock.gateway.http.off_loop import FairThreads, off_loop
from penstock.gateway.sessions.responses.objects import response_tools
from penstock.gateway.sessions.responses.schemas import ResponseBody
from penstock.gateway.sessions.responses.threads import Message as ThreadMessage
from penstock.gateway.sessions.responses.threads import Thread, extend, num_chars
from penstock.gateway.wire.beams import width_field
from penstock.gateway.wire.conversation import (
    as_dict,
    chat_tools,
    check_messages,
    num_chars_of,
    thinking_switches,
)
from penstock.gateway.wire.decisions import LEAD, Decisions
from penstock.gateway.wire.efforts import Reasoned
from penstock.gateway.wire.embeddings import Embedded, EmbeddingsBody
from penstock.gateway.wire.llama.bodies import InfillBody
from penstock.gateway.wire.prompts import Prompts, check_token_ids
from penstock.gateway.wire.sampling import context_exceeded
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, Message, Sampled
from penstock.gateway.wire.tools.use import NO_TOOLS, ToolUse

MESSAGE_CHARS = 100
"""A template's work per message, in characters of text."""
TEXT_CHARS = 80
"""The tokenizer's work per text, in characters."""

_Result = TypeVar("_Result")


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
            ignore: is told of each field of which nothing comes.
            note_refused: is told why, if too much of the tenant's work waits.
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
        """Returns the result of work with the tokenizer on texts of about `size` characters.

        Raises:
            ApiError: 429, if too much of the tenant's work waits already.
        """
        try:
            return await self._threads.run(self._tenant, size, work)
        except ApiError as error:
            if error.status == HTTPStatus.TOO_MANY_REQUESTS:
                self._note_refused(str(error.code))
            raise

    async def encode_chat(
        self,
        messages: list[Message],
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
            )

        return await self.run(num_chars + MESSAGE_CHARS * len(messages), encode)

    async def conversation(self, body: ChatBody, before: Sequence[int] = ()) -> tuple[list[int], ToolUse]:
        """Returns the tokens of a conversation, and the tools that it may call.

        Args:
            before: the tokens of what was said before.
        """
        if before:
            self.check_prompt_ids(before, "context")
        use, continues = chat_tools(body), bool(body.continue_final_message)
        variables = self.variables(body.chat_template_kwargs, body)
        if body.documents:
            if "documents" not in self._prompts.variables:
                message = "This model's chat template takes no documents."
                raise invalid(message, "documents", "unsupported_value")
            self.check_length(sum(len(str(document)) for document in body.documents), "documents")
            variables["documents"] = body.documents
        prompt = await self.encode_chat(
            body.messages,
            use,
            variables,
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continues=continues,
            is_cut=body.truncate_prompt_tokens is not None,
        )
        return self._truncated(self._prompts.behind(before, prompt) if before else prompt, body), use

    def turn(self, body: ResponseBody) -> Callable[[Thread, Sequence[ThreadMessage]], Awaitable[list[int]]]:
        """Returns a function that makes the tokens of a response's turn, which continues a thread with new messages."""
        variables = self.variables(body.chat_template_kwargs, body)
        make = partial(extend, self._prompts, instructions=body.instructions, variables=variables)
        use = response_tools(body)

        async def encode(thread: Thread, new: Sequence[ThreadMessage]) -> list[int]:
            messages = (*thread.messages, *new)
            num_said = sum(map(num_chars, messages)) + len(body.instructions or "") + use.num_chars
            self.check_length(num_said, "input")
            size = num_said + MESSAGE_CHARS * len(messages) + len(thread.token_ids)
            try:
                return await self.run(size, partial(make, thread, new, tools=use.tools))
            except ApiError as error:
                param = "input" if error.param == "messages" else error.param
                raise invalid(error.message, param, error.code) from None

        return encode

    async def branched(self, asked: Decisions) -> tuple[list[int], list[list[int]]]:
        """Returns the tokens that all questions share, and the further ones of each."""
        messages, texts = asked.messages, [question.text for question in asked.questions]
        num_shared = sum(len(message["content"]) for message in messages)
        self.check_length(num_shared + max(map(len, texts)), asked.field)
        num_texts = len(messages) + len(texts)
        branched = partial(self._prompts.branched, messages, LEAD, texts, thinking_switches(False))
        return await self.run(num_shared + sum(map(len, texts)) + MESSAGE_CHARS * num_texts, branched)

    def variables(self, given: Mapping[str, Any] | None, body: Reasoned | None = None) -> dict[str, Any]:
        """Returns the variables of the chat template other than messages and tools.

        Args:
            body: says how much the model may reason.

        Raises:
            ApiError: 400 for what is not the client's to tell.
        """
        variables = dict(given or {})
        self._prompts.check_variables(variables, "chat_template_kwargs")
        return variables if body is None else self._reasoning(body) | variables

    def _reasoning(self, body: Reasoned) -> dict[str, Any]:
        """Returns the variables that say how much the model may reason."""
        known, effort, number, is_on = self._prompts.variables, body.effort, body.num_thinking, body.is_on
        budget = body.budget(known, self._context_length) if self._prompts.reasons else None
        variables: dict[str, Any] = {"thinking_budget": budget}
        if number == 0:
            variables |= thinking_switches(False)
        elif effort is not None and "reasoning_effort" in known:
            variables["reasoning_effort"] = effort
        elif effort is not None:
            variables |= thinking_switches(effort != "none")
        if is_on and number != 0:
            variables |= thinking_switches(True)
        found = {name: value for name, value in variables.items() if name in known and value is not None}
        field = body.asked_by
        if budget is None and not found and number != -1 and is_on is not False and field is not None:
            self._ignore(field)
        return found

    async def encode_prompts(self, body: CompletionBody, *, parse_special: bool = False) -> list[list[int]]:
        texts, token_ids = await off_loop(4 * len(body.prompt), _split_prompt, body.prompt)
        limits, num_prompts = self._limits, len(texts) + len(token_ids)
        if not num_prompts or num_prompts > limits.max_prompts:
            raise invalid(f"'prompt' must be 1 to {limits.max_prompts} prompts.", "prompt")
        if num_prompts * body.num_generated > limits.max_choices:
            name = width_field(body)
            raise invalid(f"'{name}' times the prompts must be at most {limits.max_choices}.", name)
        if body.suffix is not None and token_ids:
            raise invalid("'suffix' needs a 'prompt' of text.", "suffix")
        if token_ids:
            return await self._checked(token_ids, "prompt", body)
        if body.suffix:
            return await self._encoded(texts, "prompt", self._prompts.around, body.suffix)
        add_special = body.add_special_tokens is not False
        encode = partial(self._prompts.text, add_special=add_special, parse_special=parse_special)
        prompts = await self._encoded(texts, "prompt", encode, is_cut=body.truncate_prompt_tokens is not None)
        return [self._truncated(prompt, body) for prompt in prompts]

    async def infill(self, body: InfillBody) -> list[int]:
        """Returns the tokens that ask for the text between two others; raises 400 if the model has none for that."""
        files = [(extra.filename or "file", extra.text) for extra in body.input_extra or ()]
        texts = (body.input_prefix, body.input_suffix, body.prompt)
        size = sum(map(len, texts)) + sum(len(name) + len(text) for name, text in files)
        self.check_length(size, "input_prefix")
        try:
            prompt = await self.run(size, partial(self._prompts.infill, *texts, files))
        except ApiError as error:
            if error.param != "suffix":
                raise
            raise invalid(error.message, "input_suffix", error.code) from None
        self.check_prompt_ids(prompt, "input_prefix")
        return prompt

    async def encode_inputs(self, body: EmbeddingsBody) -> list[list[int]]:
        texts, token_ids = await off_loop(4 * len(body.input), _split_prompt, body.input)
        most, add_special = self._limits.max_inputs, body.add_special_tokens is not False
        if not 1 <= len(texts) + len(token_ids) <= most:
            raise invalid(f"'input' must be 1 to {most} texts.", "input")
        if texts:
            return await self.encode_texts(texts, "input", body, add_special=add_special)
        return await self._checked(token_ids, "input", body)

    async def encode_texts(
        self,
        texts: Sequence[str],
        field: str,
        body: Embedded,
        *,
        add_special: bool = True,
        longest: int | None = None,
    ) -> list[list[int]]:
        """Returns the tokens of texts to be embedded; at most the first `longest` of each, if it is given."""
        if longest is not None:
            texts = [text[: longest * self._limits.max_bytes_per_token] for text in texts]
        encode = partial(self._prompts.text, add_special=add_special)
        prompts = await self._encoded(texts, field, encode, is_cut=body.truncate_prompt_tokens is not None)
        return await self._checked([prompt[:longest] for prompt in prompts], field, body)

    async def _checked(
        self, prompts: list[list[int]], field: str, body: Sampled | Embedded
    ) -> list[list[int]]:
        def check() -> list[list[int]]:
            cut = [self._truncated(prompt, body) for prompt in prompts]
            for prompt in cut:
                self.check_prompt_ids(prompt, field)
            return cut

        return await off_loop(4 * sum(map(len, prompts)), check)

    async def encode_text(
        self, text: str, field: str, *, add_special: bool = True, suffix: str = "", is_cut: bool = False
    ) -> list[int]:
        """Returns the tokens of a text; with a `suffix`, those that ask for the text between the two."""
        encode = partial(self._prompts.text, add_special=add_special)
        around = self._prompts.around
        (token_ids,) = await self._encoded([text], field, around if suffix else encode, suffix, is_cut=is_cut)
        return token_ids

    async def _encoded(
        self,
        texts: Sequence[str],
        field: str,
        encode: Callable[..., list[int]],
        suffix: str = "",
        *,
        is_cut: bool = False,
    ) -> list[list[int]]:
        """Returns the tokens of each text, with its suffix if there is one; all of them are one piece of work.

        Raises:
            ApiError: 400, if a text is empty or, unless it `is_cut` to what fits, too long.
        """
        for text in () if is_cut else texts:
            self.check_length(len(text) + len(suffix), field)

        def encode_all() -> list[list[int]]:
            return [encode(text, *([suffix] if suffix else ())) for text in texts]

        size = sum(map(len, texts)) + len(texts) * (len(suffix) + TEXT_CHARS)
        prompts = await self.run(size, encode_all)
        if not all(prompts):
            raise invalid(f"'{field}' must not be empty.", field)
        return prompts

    def _truncated(self, prompt: list[int], body: Sampled | Embedded) -> list[int]:
        """Returns the last tokens of a prompt: as many as the body asks for or, for -1, as leave room to answer."""
        num = body.truncate_prompt_tokens
        if num is None:
            return prompt
        if num < 0:
            num = max(1, self._context_length - (body.num_output if isinstance(body, Sampled) else 1))
        return prompt[-num:]

    def check_prompt_ids(self, prompt: Sequence[int], field: str = "prompt") -> None:
        if not prompt:
            raise invalid(f"'{field}' must not have an empty list of tokens.", field)
        if len(prompt) >= self._context_length:
            raise context_exceeded(self._context_length, f"{len(prompt)} tokens", field, len(prompt))
        check_token_ids(prompt, self._vocab_size, field)

    def check_length(self, num_chars: int, field: str) -> None:
        """Refuses a text that is too long whatever its tokens are, before it is tokenised."""
        most = self._limits.max_bytes_per_token
        if num_chars > self._context_length * most:
            least = -(-num_chars // most)
            raise context_exceeded(self._context_length, f"{num_chars} characters", field, least)


def _split_prompt(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[list[str], list[list[int]]]:
    """Splits the four forms of `prompt` into texts and lists of token ids."""
    if isinstance(prompt, str):
        return [prompt], []
    if prompt and isinstance(prompt[0], int):
        return [], [[token_id for token_id in prompt if isinstance(token_id, int)]]
    texts = [text for text in prompt if isinstance(text, str)]
    return texts, [token_ids for token_ids in prompt if isinstance(token_ids, list)]
