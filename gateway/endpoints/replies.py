"""The endpoints whose replies the model makes, but for responses: the body, the writer and the recorder of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.access.idempotency import not_here
from penstock.gateway.endpoints.answering import (
    ModelEndpoints,
    RecordedSender,
    Recorder,
    Sender,
    position_asked,
)
from penstock.gateway.endpoints.intake import Inbound, Intake
from penstock.gateway.endpoints.operation import BY_ID, BY_PROMPT, LINED, STREAMED, answers, follows, serves
from penstock.gateway.endpoints.requests import RequestGroup
from penstock.gateway.errors import invalid, not_found
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.reply.whole import whole_json
from penstock.gateway.service import Service
from penstock.gateway.sessions.chats import keep
from penstock.gateway.sessions.recordings.kinds import CHAT, IDS, LINES, MESSAGE, PREFIXES, TEXT, details_of
from penstock.gateway.sessions.recordings.recording import Reader, Recording
from penstock.gateway.sessions.responses.threads import Thread
from penstock.gateway.wire.anthropic.bodies import MessagesBody
from penstock.gateway.wire.anthropic.messages import MessageWriter
from penstock.gateway.wire.completions import ChatWriter, CompletionWriter, TextWriter
from penstock.gateway.wire.decided import DecisionsWriter, SystemOneWriter
from penstock.gateway.wire.decisions import DecisionsBody, SystemOneBody
from penstock.gateway.wire.embeddings import (
    EmbeddingsBody,
    EmbeddingWriter,
    RerankBody,
    RerankWriter,
    ScoreBody,
    ScoreWriter,
)
from penstock.gateway.wire.labels import LabelSteps
from penstock.gateway.wire.llama.bodies import InfillBody, LlamaBody
from penstock.gateway.wire.llama.replies import LlamaWriter
from penstock.gateway.wire.ollama.bodies import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingBody,
    OllamaGenerateBody,
)
from penstock.gateway.wire.ollama.lines import (
    LineWriter,
    NormalEmbeddingWriter,
    PlainEmbeddingWriter,
    unasked,
)
from penstock.gateway.wire.questions import Question, Questions
from penstock.gateway.wire.schemas import ChatBody, CompletionBody
from penstock.gateway.wire.writing import Head, Reply, WholeWriter


class ReplyRecorder(Recorder):
    """Records the replies of one kind."""

    num_digits = 32

    def __init__(
        self,
        service: Service,
        intake: Intake,
        kind: str,
        deleted: Mapping[str, object],
    ) -> None:
        """`deleted` is what is said of a reply that was forgotten, beside its id."""
        self._service = service
        self._intake = intake
        self._deleted = deleted
        self.kind, self.prefix = kind, PREFIXES[kind]

    def details(self, inbound: Inbound, group: RequestGroup, thread: Thread, head: Head) -> dict[str, Any]:  # noqa: ARG002
        ask, stored = inbound.ask, inbound.ask.retention.stored
        return details_of(
            head,
            group.reading,
            stream=ask.streams,
            include_usage=ask.reply_options.usage,
            max_tokens=ask.max_tokens.number,
            is_chat=_is_chat(inbound),
            tells_context=ask.retention.output,
            **({} if stored is None else {"stored": stored}),
        )

    def reply(self, recording: Recording, _: Any) -> Response:
        return self._follow(recording, -1)

    async def repeat(self, tenant: str, reply_id: str, _: Any) -> Response:
        recording = await self._intake.find_recording(tenant, reply_id)
        if recording is None:
            raise not_here()
        return self._follow(recording, -1)

    async def show(self, http: HttpRequest) -> Response:
        """Follows a reply again."""
        position = position_asked(http)
        return self._follow(await self._recording(http), position)

    async def discard(self, http: HttpRequest) -> Response:
        """Stops and forgets a reply."""
        recording = await self._recording(http)
        await self._service.recordings.discard(recording)
        return JsonResponse({"id": recording.id, **self._deleted})

    def _follow(self, recording: Recording, position: int) -> Sender:
        return RecordedSender(self._service, Reader(recording, position), streamed=recording.is_streamed)

    async def _recording(self, http: HttpRequest) -> Recording:
        client, recording_id = self._intake.client(http), http.path_params["id"]
        if not IDS[self.kind].fullmatch(recording_id):
            raise invalid(f"The id must be '{self.prefix}' and 32 hexadecimal digits.", "id")
        recording = await self._intake.find_recording(client.tenant.name, recording_id)
        if recording is None:
            self._service.dispatch.check_open()  # what was interrupted is known when the model is loaded
            raise not_found(f"There is no reply '{recording_id}'.", "id")
        if recording.kind != self.kind:
            raise invalid("The id is that of another kind of reply.", "id")
        return recording


class RepliesApi(ModelEndpoints):
    """The replies of one service's model."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._chats = chat_recorder(service, intake)
        self._texts = ReplyRecorder(service, intake, TEXT, _deleted("text_completion"))
        self._messages = ReplyRecorder(service, intake, MESSAGE, {"type": "message_deleted"})
        self._lines = ReplyRecorder(service, intake, LINES, {"deleted": True})
        service.recordings.on_end[CHAT] = self._keep_recorded

    # OpenAI's completions

    @answers("/v1/chat/completions", ChatBody)
    async def chat(self, http: HttpRequest) -> Response:
        """Answer a conversation, streamed or whole."""
        return await self._answer(http, ChatBody, partial(self._completion_writer, ChatWriter), self._chats)

    @answers("/v1/completions", CompletionBody)
    async def complete(self, http: HttpRequest) -> Response:
        """Continue texts, streamed or whole."""
        return await self._answer(
            http, CompletionBody, partial(self._completion_writer, TextWriter), self._texts
        )

    @follows("/v1/completions/{id}")
    async def follow_text(self, http: HttpRequest) -> Response:
        """Follow a resumable continuation, after the event that was seen last."""
        return await self._texts.show(http)

    @serves("DELETE /v1/completions/{id}", BY_ID)
    async def forget_text(self, http: HttpRequest) -> Response:
        """Stop and forget a resumable continuation."""
        return await self._texts.discard(http)

    def _completion_writer(
        self, make: type[CompletionWriter], head: Head, inbound: Inbound, group: RequestGroup
    ) -> CompletionWriter:
        options = inbound.ask.reply_options
        return make(
            self._service.tokenizer,
            head,
            options.extras,
            reading=group.reading,
            include_usage=options.usage,
            usage_so_far=options.usage_so_far,
        )

    async def _keep_recorded(self, recording: Recording) -> None:
        stored = recording.details.get("stored")
        if stored is not None and recording.error is None:
            body, completion = await whole_json(recording.writer, recording, recording.outputs())
            await keep(self._service.store, recording.tenant, stored, completion, len(body))

    # Anthropic's messages

    @answers("/v1/messages", MessagesBody)
    async def create(self, http: HttpRequest) -> Response:
        """Answer a conversation in Anthropic's format, streamed or whole."""
        return await self._answer(http, MessagesBody, _message_writer, self._messages)

    @follows("/v1/messages/{id}")
    async def follow_message(self, http: HttpRequest) -> Response:
        """Follow a resumable message, after the event that was seen last."""
        return await self._messages.show(http)

    @serves("DELETE /v1/messages/{id}", BY_ID)
    async def forget_message(self, http: HttpRequest) -> Response:
        """Stop and forget a resumable message."""
        return await self._messages.discard(http)

    # Ollama's chats and prompts

    @answers("/api/chat", OllamaChatBody, LINED)
    async def chat_in_lines(self, http: HttpRequest) -> Response:
        """Answer a conversation in Ollama's format, streamed or whole."""
        return await self._answer(http, OllamaChatBody, self._line_writer, self._lines, load=_loaded)

    @answers("/api/generate", OllamaGenerateBody, LINED)
    async def continue_in_lines(self, http: HttpRequest) -> Response:
        """Answer a prompt in Ollama's format, streamed or whole."""
        return await self._answer(http, OllamaGenerateBody, self._line_writer, self._lines, load=_loaded)

    @serves("POST /api/embed", BY_PROMPT, OllamaEmbedBody)
    async def embed_in_batch(self, http: HttpRequest) -> Response:
        """Turn texts into vectors, for Ollama's clients."""
        return await self._answer(
            http,
            OllamaEmbedBody,
            lambda _, inbound, __: NormalEmbeddingWriter(inbound.ask),
            load=lambda inbound: {"model": inbound.ask.model, "embeddings": []},
        )

    @serves("POST /api/embeddings", BY_PROMPT, OllamaEmbeddingBody)
    async def embed_prompt(self, http: HttpRequest) -> Response:
        """Turn a text into a vector, for Ollama's older clients."""
        return await self._answer(
            http, OllamaEmbeddingBody, lambda *_: PlainEmbeddingWriter(), load=lambda _: {"embedding": []}
        )

    @follows("/api/chat/{id} /api/generate/{id}", LINED)
    async def follow_lines(self, http: HttpRequest) -> Response:
        """Follow a resumable answer, after the line that was seen last."""
        return await self._lines.show(http)

    @serves("DELETE /api/chat/{id} /api/generate/{id}", BY_ID)
    async def forget_lines(self, http: HttpRequest) -> Response:
        """Stop and forget a resumable answer."""
        return await self._lines.discard(http)

    def _line_writer(self, head: Head, inbound: Inbound, group: RequestGroup) -> LineWriter:
        ask = inbound.ask
        return LineWriter(
            head,
            is_chat=_is_chat(inbound),
            tells_context=ask.retention.output,
            reading=group.reading,
            tokens=None if ask.num_logprobs is None else self._service.tokenizer,
            num_top=ask.reply_options.extras.num_top,
        )

    # llama.cpp's completions

    @serves("POST /completion", BY_PROMPT, LlamaBody, answers=STREAMED, json_types=("object", "array"))
    async def complete_for_llama(self, http: HttpRequest) -> Response:
        """Continue texts, for llama.cpp's clients."""
        return await self._answer(http, LlamaBody, self._llama_writer)

    @serves("POST /infill", BY_PROMPT, InfillBody, answers=STREAMED, json_types=("object", "array"))
    async def fill(self, http: HttpRequest) -> Response:
        """Fill in the text between two others, for llama.cpp's clients."""
        return await self._answer(http, InfillBody, self._llama_writer)

    def _llama_writer(self, head: Head, inbound: Inbound, _: RequestGroup) -> LlamaWriter:
        return LlamaWriter(head, inbound.body, self._service.tokenizer, self._service.dispatch.context_length)

    # Embeddings and the scores made of them are hidden states; decisions are the log probabilities of possible answers

    @serves("POST /v1/embeddings", BY_PROMPT, EmbeddingsBody)
    async def embed(self, http: HttpRequest) -> Response:
        """Turn texts into vectors."""
        is_normalised = self._service.options.embedding.is_normalised
        return await self._answer(
            http,
            EmbeddingsBody,
            lambda _, inbound, __: EmbeddingWriter(inbound.body, is_normalised=is_normalised),
        )

    @serves("POST /rerank /v1/rerank /v2/rerank", BY_PROMPT, RerankBody)
    async def rerank(self, http: HttpRequest) -> Response:
        """Order documents by how like a query they are."""
        return await self._answer(
            http, RerankBody, lambda head, inbound, _: RerankWriter(head.id, inbound.body), prefix="rerank-"
        )

    @serves("POST /score /v1/score", BY_PROMPT, ScoreBody)
    async def score(self, http: HttpRequest) -> Response:
        """Say how alike texts are."""
        return await self._answer(
            http,
            ScoreBody,
            lambda head, inbound, _: ScoreWriter(
                head.id, head.created, head.model, len(inbound.body.sides()[0])
            ),
            prefix="score-",
        )

    @serves("POST /v1/decisions", BY_PROMPT, DecisionsBody)
    async def decide(self, http: HttpRequest) -> Response:
        """Answer questions about an input with probabilities.

        The format is OpenAI's.
        """
        return await self._answer(http, DecisionsBody, partial(_decisions_writer, DecisionsWriter))

    @serves("POST /v1/systemone", BY_PROMPT, SystemOneBody)
    async def decide_systems(self, http: HttpRequest) -> Response:
        """Answer questions about a state with probabilities.

        The format is TypeSafe's.
        """
        return await self._answer(http, SystemOneBody, partial(_decisions_writer, SystemOneWriter))


def chat_recorder(service: Service, intake: Intake) -> ReplyRecorder:
    return ReplyRecorder(service, intake, CHAT, _deleted("chat.completion"))


def _deleted(name: str) -> dict[str, object]:
    return {"object": f"{name}.deleted", "deleted": True}


def _message_writer(head: Head, inbound: Inbound, group: RequestGroup) -> MessageWriter:
    return MessageWriter(head, inbound.body.max_tokens, group.reading)


def _loaded(inbound: Inbound) -> dict[str, object]:
    return unasked(inbound.ask.model, int(time.time()), is_chat=_is_chat(inbound))


def _is_chat(inbound: Inbound) -> bool:
    return isinstance(inbound.body, OllamaChatBody)


def _decisions_writer(
    make: Callable[[str, Sequence[Question], Sequence[Sequence[LabelSteps]]], WholeWriter[Reply]],
    head: Head,
    inbound: Inbound,
    group: RequestGroup,
) -> WholeWriter[Reply]:
    assert isinstance(inbound.ask.input, Questions)
    return make(head.model, inbound.ask.input.questions, group.steps)
