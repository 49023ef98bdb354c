"""`/v1/responses`: a turn of a conversation, run while its client waits or in the background, kept and gone on from."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.access.idempotency import idempotency_key, not_here
from penstock.gateway.endpoints.intake import Endpoints, Intake, as_sent, route
from penstock.gateway.endpoints.params import GenerationParams
from penstock.gateway.endpoints.prompting import Prompting
from penstock.gateway.endpoints.replies import Attached
from penstock.gateway.endpoints.shortening import answer_room, shortened
from penstock.gateway.http.errors import ApiError, gone, invalid
from penstock.gateway.service import Service
from penstock.gateway.sessions import conversations
from penstock.gateway.sessions.conversations import ConversationLocks
from penstock.gateway.sessions.owners import owned_id
from penstock.gateway.sessions.recordings.reader import Reader
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses import records
from penstock.gateway.sessions.responses.events import ResponseFormat
from penstock.gateway.sessions.responses.objects import (
    Item,
    as_messages,
    deleted,
    details_of,
    input_items,
    output_items,
    page,
    response,
    response_tools,
)
from penstock.gateway.sessions.responses.records import KIND, Record
from penstock.gateway.sessions.responses.schemas import (
    PageQuery,
    ResponseBody,
    check_id,
    check_response,
    previous_not_found,
    read_stream_query,
    response_not_found,
    text_form,
)
from penstock.gateway.sessions.responses.script import script
from penstock.gateway.sessions.responses.threads import Thread, since, turns
from penstock.gateway.store.interface import Key, StoreUnavailable
from penstock.gateway.wire.frames import Json
from penstock.gateway.wire.sampling import MaxTokens
from penstock.gateway.wire.strict import validated
from penstock.gateway.wire.structured import form_of

_APPEND_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class _Turn:
    """One request for a response, after it was checked."""

    params: GenerationParams
    body: ResponseBody
    id: str
    resumable: bool
    """Whether it continues for a while after its client has gone."""


class ResponsesApi(Endpoints):
    """The responses of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._locks = ConversationLocks()
        service.recordings.on_end[KIND] = self.on_end
        service.recordings.scripts[KIND] = partial(script, service.tokenizer)

    def routes(self) -> list[Route]:
        return [
            route("/v1/responses", POST=self.create),
            route("/v1/responses/{id}", GET=self.show, DELETE=self.delete),
            route("/v1/responses/{id}/cancel", POST=self.cancel),
            route("/v1/responses/{id}/input_items", GET=self.list_input),
        ]

    # A new response

    async def create(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, ResponseBody, as_sent)
        client, body = came.client, came.body
        limits = self._service.options.limits
        check_response(body, limits)
        self._intake.check_model(body.model)
        params = GenerationParams(
            body=body,
            prompt_field="input",
            asked=MaxTokens("max_output_tokens", body.max_output_tokens),
            num_logprobs=body.num_logprobs,
            is_recorded=True,
            num_choices=1,
            client=client,
            urgency=self._intake.urgency(came, body),
            arrival_s=came.at_s,
            grammar=await self._intake.grammar(client.tenant, form_of(body, limits, text_form(body.text))),
        )
        key = idempotency_key(http)
        asked_to_resume = body.stream_options is not None and bool(body.stream_options.resumable)
        response_id = owned_id("resp_", self._service.tag, 48)
        turn = _Turn(params, body, response_id, asked_to_resume or key is not None)
        tenant, start = client.tenant.name, partial(self._start, turn)
        made = await self._service.idempotency.once(tenant, key, body, turn.id, start)
        return await self._repeat(tenant, made, body) if isinstance(made, str) else self._reply(made, body)

    async def _start(self, turn: _Turn) -> Recording:
        self._intake.check_room(turn.params, self._service.dispatch.context_length)
        items = input_items(turn.body.input)
        tenant, conversation_id = turn.params.tenant.name, turn.body.conversation
        if conversation_id is None:
            thread = await self._previous(tenant, turn.body.previous_response_id)
            return await self._submit(turn, items, thread)
        store = self._service.store
        self._locks.take(tenant, conversation_id)
        try:
            conversation = await conversations.find(store, tenant, conversation_id, "conversation")
            thread = conversation.thread()
            conversation.add(items, "input")
            return await self._submit(turn, items, thread)
        except BaseException:
            self._locks.release(tenant, conversation_id)
            raise

    async def _submit(self, turn: _Turn, items: list[Item], thread: Thread) -> Recording:
        body, use = turn.body, response_tools(turn.body)
        prompt = await self.prompt(
            body, items, thread, self._intake.prompting(turn.params.tenant, turn.params.urgency.lane)
        )
        params = await self._intake.with_tools(turn.params, prompt, use)
        [request] = await self._intake.requests(params, {turn.id: prompt})
        outlives = bool(body.background) or turn.resumable
        return await self._service.recordings.start(
            request,
            kind=KIND,
            details=details_of(body, items, thread.messages, params.reading)
            | {"shared_tokens": records.shared_tokens(thread, prompt)},
            created=int(time.time()),
            detachable=outlives,
            journalled=outlives,
            max_detached_s=None if body.background else self._service.options.timeouts.detached_s,
            reservation=await self._intake.reserve(params.client, [request]),
        )

    async def prompt(
        self, body: ResponseBody, items: list[Item], thread: Thread, prompting: Prompting
    ) -> list[int]:
        """Returns the tokens of a turn that goes on from a thread with these items."""
        encode, new = prompting.turn(body), as_messages(items)
        if body.truncation != "auto":
            return await encode(thread, new)
        messages, context_length = (*thread.messages, *new), self._service.dispatch.context_length
        asked = body.max_output_tokens
        return await shortened(
            lambda start: encode(replace(thread, messages=since(messages, start)), ()),
            turns(messages),
            context_length,
            least_room=asked or 1,
            room=asked or answer_room(context_length),
        )

    async def thread(self, tenant: str, body: ResponseBody) -> Thread:
        """Returns the thread that a turn goes on from."""
        if body.conversation is None:
            return await self._previous(tenant, body.previous_response_id)
        store = self._service.store
        return (await conversations.find(store, tenant, body.conversation, "conversation")).thread()

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

    def _reply(self, recording: Recording, body: ResponseBody) -> Response:
        if body.background and not body.stream:
            return Json(response(recording))
        reader, at_once = Reader(recording, ResponseFormat()), bool(body.background)
        return Attached(self._service, reader, streamed=bool(body.stream), at_once=at_once)

    async def _repeat(self, tenant: str, response_id: str, body: ResponseBody) -> Response:
        """Returns the answer to a request that was sent before."""
        recording = await self._recording(tenant, response_id)
        if recording is not None:
            return self._reply(recording, body)
        record = None if body.stream else await self._record(tenant, response_id)
        if record is None:
            raise not_here()
        return Json(record.object)

    # Those there are

    async def show(self, http: HttpRequest) -> Response:
        tenant, response_id = self._asked(http)
        query = read_stream_query(http.query_params)
        if query.include_obfuscation:
            self._intake.ignore("include_obfuscation")
        if query.stream:
            recording = await self._visible(tenant, response_id)
            if recording is not None:
                after = -1 if query.starting_after is None else query.starting_after
                reader = Reader(recording, ResponseFormat(), after)
                return Attached(self._service, reader, at_once=True)
            if await self._record(tenant, response_id) is not None:
                raise gone(f"The events of '{response_id}' are no longer kept.", "stream_expired")
            raise self._unknown(response_id)
        found = await self._found(tenant, response_id)
        return Json(found.object if isinstance(found, Record) else response(found))

    async def list_input(self, http: HttpRequest) -> Response:
        tenant, response_id = self._asked(http)
        query = validated(PageQuery, http.query_params)
        found = await self._found(tenant, response_id)
        return Json(page(found.input if isinstance(found, Record) else found.details["input"], query))

    async def cancel(self, http: HttpRequest) -> Response:
        """Once a response has ended, this is as good as asking for it."""
        asked = self._asked(http)
        found = await self._visible(*asked) or await self._found(*asked)
        if isinstance(found, Record):
            _check_background(bool(found.object.get("background")))
            return Json(found.object)
        _check_background(found.details["background"])
        self._service.recordings.cancel(found)
        return Json(response(found))

    async def delete(self, http: HttpRequest) -> Response:
        """Ends a running response; its conversation keeps the output so far."""
        tenant, response_id = self._asked(http)
        recording = await self._visible(tenant, response_id)
        if recording is not None:
            await self._service.recordings.discard(recording)
        with records.answering():
            was_kept = await self._service.store.delete(Key(KIND, tenant, response_id))
        if recording is None and not was_kept:
            raise self._unknown(response_id)
        return Json(deleted(response_id))

    def _asked(self, http: HttpRequest) -> tuple[str, str]:
        """Returns whose response it would be, and its id."""
        tenant = self._intake.tenant(http)
        return tenant, check_id("response_id", http.path_params["id"], "resp")

    async def _found(self, tenant: str, response_id: str) -> Recording | Record:
        """Finds a response in this process, or else in the store, or else in the journal of another process.

        Raises:
            ApiError: 404, if there is none; 503, if that cannot be said now.
        """
        found = self._here(tenant, response_id) or await self._record(tenant, response_id)
        found = found or await self._visible(tenant, response_id)
        if found is None:
            raise self._unknown(response_id)
        return found

    async def _record(self, tenant: str, response_id: str) -> Record | None:
        return await records.find(self._service.store, tenant, response_id)

    def _here(self, tenant: str, response_id: str) -> Recording | None:
        """Returns one that can be asked for and whose text this process has, whether or not there is a store to ask."""
        found = self._service.recordings.here(tenant, response_id)
        is_whole = (
            found is not None and found.kind == KIND and found.details["store"] and not found.num_dropped
        )
        return found if is_whole else None

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
        output = output_items(recording)
        store, items = self._service.store, recording.details["input"]
        for attempt in range(_APPEND_ATTEMPTS):
            try:
                await conversations.append(store, recording.tenant, conversation_id, items, output, thread)
                return
            except StoreUnavailable:
                if attempt == _APPEND_ATTEMPTS - 1:
                    raise


def _check_background(background: bool) -> None:
    if not background:
        raise invalid("Cannot cancel a synchronous response.", None, None)


def _cannot_continue(response_id: str, why: str) -> ApiError:
    message = f"The response '{response_id}' {why}, so that nothing can follow it."
    return invalid(message, "previous_response_id", "previous_response_not_ready")
