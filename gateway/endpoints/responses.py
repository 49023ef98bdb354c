"""`/v1/responses`: a turn of a conversation, run while its client waits or in the background, kept and gone on from."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.access.idempotency import not_here
from penstock.gateway.endpoints.answering import ModelEndpoints, RecordedSender, Recorder
from penstock.gateway.endpoints.intake import Inbound, Intake
from penstock.gateway.endpoints.operation import ANY, BY_ID, RECORDED, STREAMED, answers, looks_up, serves
from penstock.gateway.endpoints.requests import RequestGroup
from penstock.gateway.errors import ApiError, gone, invalid
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.off_loop import off_loop
from penstock.gateway.service import Service
from penstock.gateway.sessions import conversations
from penstock.gateway.sessions.conversations import Conversation, ConversationLocks
from penstock.gateway.sessions.recordings.recording import Reader, Recording
from penstock.gateway.sessions.responses import records
from penstock.gateway.sessions.responses.objects import JsonObject, ResponseTurn, deleted, details_of, page
from penstock.gateway.sessions.responses.records import KIND, StoredResponse
from penstock.gateway.sessions.responses.schemas import (
    InputTokensBody,
    PageQuery,
    ResponseBody,
    StreamQuery,
    check_id,
    previous_not_found,
    read_stream_query,
    response_not_found,
)
from penstock.gateway.sessions.responses.threads import Thread
from penstock.gateway.sessions.responses.writer import output_items, plain, response
from penstock.gateway.store.interface import Key, StoreUnavailable
from penstock.gateway.wire.ask import Ask
from penstock.gateway.wire.strict import validated
from penstock.gateway.wire.writing import Head, Reply, WholeWriter

_APPEND_ATTEMPTS = 3


class ResponsesApi(ModelEndpoints, Recorder):
    """The responses of one service."""

    kind, prefix, num_digits, always = KIND, "resp_", 48, True

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._locks = ConversationLocks()
        service.recordings.on_end[KIND] = self.on_end

    # A new response

    @answers("/v1/responses", ResponseBody)
    async def create(self, http: HttpRequest) -> Response:
        """Take a turn of a conversation, waited for or in the background."""
        return await self._answer(http, ResponseBody, _no_writer, self)

    @serves("POST /v1/responses/input_tokens", ANY, InputTokensBody, statuses=(404, 429, 503))
    async def count(self, http: HttpRequest) -> Response:
        """Count the tokens of a turn."""
        _, [prompt], headers = await self._intake.counted_prompts(http, InputTokensBody, self._thread_of)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": len(prompt)}, headers=headers)

    @contextlib.asynccontextmanager
    async def thread(self, inbound: Inbound) -> AsyncIterator[Thread]:
        """Locks the conversation that a response belongs to, until it has ended or does not begin."""
        turn, tenant = inbound.ask.input, inbound.tenant.name
        assert isinstance(turn, ResponseTurn)
        if turn.conversation is None:
            yield await self._previous(tenant, turn.previous_response_id)
            return
        self._locks.take(tenant, turn.conversation)
        try:
            conversation = await self._conversation(tenant, turn.conversation)
            thread = conversation.thread()
            conversation.add(turn.items, "input")
            yield thread
        except BaseException:
            self._locks.release(tenant, turn.conversation)
            raise

    def details(self, inbound: Inbound, group: RequestGroup, thread: Thread, head: Head) -> JsonObject:  # noqa: ARG002
        turn, [request] = inbound.ask.input, group.requests
        assert isinstance(turn, ResponseTurn)
        details = details_of(inbound.body, turn.items, thread.messages, group.reading)
        return {**details, "shared_tokens": records.shared_tokens(thread, request.prompt_token_ids)}

    def reply(self, recording: Recording, body: ResponseBody) -> Response:
        if body.background and not body.stream:
            return JsonResponse(response(recording))
        at_once = bool(body.background)
        return RecordedSender(self._service, Reader(recording), streamed=bool(body.stream), at_once=at_once)

    async def repeat(self, tenant: str, reply_id: str, body: ResponseBody) -> Response:
        recording = await self._recording(tenant, reply_id)
        if recording is not None:
            return self.reply(recording, body)
        record = None if body.stream else await self._record(tenant, reply_id)
        if record is None:
            raise not_here()
        return JsonResponse(record.object)

    async def _thread_of(self, tenant: str, ask: Ask) -> Thread:
        """Returns the thread that a turn continues."""
        turn = ask.input
        assert isinstance(turn, ResponseTurn)
        if turn.conversation is None:
            return await self._previous(tenant, turn.previous_response_id)
        return (await self._conversation(tenant, turn.conversation)).thread()

    async def _conversation(self, tenant: str, conversation_id: str) -> Conversation:
        return await conversations.find(self._service.store, tenant, conversation_id, "conversation")

    async def _previous(self, tenant: str, response_id: str | None) -> Thread:
        """Returns the thread that the response with that id ends."""
        if response_id is None:
            return Thread()
        recording = self._here(tenant, response_id)
        record = await self._record(tenant, response_id) if recording is None else None
        if record is not None:
            thread = record.thread
            if record.is_broken:
                raise _cannot_continue(response_id, "has lost its history")
        else:
            recording = recording or await self._visible(tenant, response_id)
            if recording is None:
                raise previous_not_found(response_id)
            if not recording.settled or recording.is_interrupted:
                raise _cannot_continue(response_id, "has not ended yet")
            thread = records.continued(recording)
        if thread is None:
            raise _cannot_continue(response_id, "came to no answer")
        return thread

    # Those there are

    @looks_up("/v1/responses/{id}", BY_ID | RECORDED, query=StreamQuery, answers=STREAMED, statuses=(410,))
    async def show(self, http: HttpRequest) -> Response:
        """Show a response as it is now, or its events."""
        tenant, response_id = self._named(http)
        query = read_stream_query(http.query_params)
        if query.include_obfuscation:
            self._intake.ignore("include_obfuscation")
        if query.stream:
            recording = await self._visible(tenant, response_id)
            if recording is not None:
                after = -1 if query.starting_after is None else query.starting_after
                return RecordedSender(self._service, Reader(recording, after), at_once=True)
            if await self._record(tenant, response_id) is not None:
                raise gone(f"The events of '{response_id}' are no longer kept.", "stream_expired")
            raise self._unknown(response_id)
        existing = await self._existing(tenant, response_id)
        return JsonResponse(existing.object if isinstance(existing, StoredResponse) else response(existing))

    @looks_up("/v1/responses/{id}/input_items", BY_ID, query=PageQuery)
    async def list_input(self, http: HttpRequest) -> Response:
        """List what a response was given."""
        tenant, response_id = self._named(http)
        query = validated(PageQuery, http.query_params)
        existing = await self._existing(tenant, response_id)
        return JsonResponse(
            page(existing.input if isinstance(existing, StoredResponse) else existing.details["input"], query)
        )

    @serves("POST /v1/responses/{id}/cancel", BY_ID)
    async def cancel(self, http: HttpRequest) -> Response:
        """End a response in the background.

        Once a response has ended, this is as good as asking for it.
        """
        named = self._named(http)
        existing = await self._visible(*named) or await self._existing(*named)
        if isinstance(existing, StoredResponse):
            _check_background(bool(existing.object.get("background")))
            return JsonResponse(existing.object)
        _check_background(existing.details["background"])
        self._service.recordings.cancel(existing)
        return JsonResponse(response(existing))

    @serves("DELETE /v1/responses/{id}", BY_ID)
    async def delete(self, http: HttpRequest) -> Response:
        """End and forget a response.

        Ends a running response; its conversation keeps the output so far.
        """
        tenant, response_id = self._named(http)
        recording = await self._visible(tenant, response_id)
        if recording is not None:
            await self._service.recordings.discard(recording)
        with records.answering():
            was_kept = await self._service.store.delete(Key(KIND, tenant, response_id))
        if recording is None and not was_kept:
            raise self._unknown(response_id)
        return JsonResponse(deleted(response_id))

    def _named(self, http: HttpRequest) -> tuple[str, str]:
        """Returns whose response it would be, and its id."""
        tenant = self._intake.tenant(http)
        return tenant, check_id("response_id", http.path_params["id"], "resp")

    async def _existing(self, tenant: str, response_id: str) -> Recording | StoredResponse:
        """Finds a response in this process, or else in the store, or else in the journal of another process.

        Raises:
            ApiError: 404, if there is none; 503, if that cannot be said now.
        """
        existing = self._here(tenant, response_id) or await self._record(tenant, response_id)
        existing = existing or await self._visible(tenant, response_id)
        if existing is None:
            raise self._unknown(response_id)
        return existing

    async def _record(self, tenant: str, response_id: str) -> StoredResponse | None:
        return await records.find(self._service.store, tenant, response_id)

    def _here(self, tenant: str, response_id: str) -> Recording | None:
        """Returns one that can be asked for and whose text this process has, whether or not there is a store to ask."""
        recording = self._service.recordings.here(tenant, response_id)
        is_visible = recording is not None and recording.kind == KIND and recording.details["store"]
        return recording if is_visible else None

    async def _visible(self, tenant: str, response_id: str) -> Recording | None:
        """Finds a stored response; others cannot be requested."""
        recording = await self._recording(tenant, response_id)
        return recording if recording is not None and recording.details["store"] else None

    async def _recording(self, tenant: str, response_id: str) -> Recording | None:
        recording = await self._intake.find_recording(tenant, response_id)
        return recording if recording is not None and recording.kind == KIND else None

    def _unknown(self, response_id: str) -> ApiError:
        self._service.dispatch.check_open()  # what was interrupted is known when the model is loaded
        return response_not_found(response_id)

    # The end of one

    async def on_end(self, recording: Recording) -> None:
        """Keeps a response that has ended, here or in a process before this one."""
        try:
            await self._add_to_conversation(recording)
            await records.keep(self._service.store, recording)
        finally:
            if (conversation_id := recording.details["conversation"]) is not None:
                self._locks.release(recording.tenant, conversation_id)

    async def _add_to_conversation(self, recording: Recording) -> None:
        conversation_id, thread = recording.details["conversation"], records.continued(recording)
        if conversation_id is None or thread is None:
            return
        output = await off_loop(recording.num_bytes, plain, output_items(recording))
        store, items = self._service.store, recording.details["input"]
        for attempt in range(_APPEND_ATTEMPTS):
            try:
                await conversations.append(store, recording.tenant, conversation_id, items, output, thread)
                return
            except StoreUnavailable:
                if attempt == _APPEND_ATTEMPTS - 1:
                    raise


def _no_writer(_: Head, __: Inbound, ___: RequestGroup) -> WholeWriter[Reply]:
    raise AssertionError("every response is recorded")


def _check_background(background: bool) -> None:
    if not background:
        raise invalid("Cannot cancel a synchronous response.", None, None)


def _cannot_continue(response_id: str, why: str) -> ApiError:
    message = f"The response '{response_id}' {why}, so that nothing can follow it."
    return invalid(message, "previous_response_id", "previous_response_not_ready")
