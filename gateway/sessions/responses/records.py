"""Responses that have ended, kept in the store for those who ask for them or go on from them."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from gateway.http.errors import unavailable
from gateway.sessions.recordings.recording import Recording
from gateway.sessions.responses.objects import JsonObject, as_messages, response, status_of
from gateway.sessions.responses.threads import Thread
from gateway.store.interface import Key, Store, StoreUnavailable

log = logging.getLogger("penstock.gateway")

KIND = "response"
KEPT_S = 24 * 3600.0
"""Since it was made, or last asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is kept of one response."""

    object: JsonObject
    input: list[JsonObject]
    thread: Thread | None
    """To go on with; None, if the response came to no answer."""

    def to_bytes(self) -> bytes:
        thread = None if self.thread is None else self.thread.to_json()
        return json.dumps({"object": self.object, "input": self.input, "thread": thread}).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Record:
        """
        Raises:
            ValueError: this was not made by `to_bytes`.
        """
        try:
            found = json.loads(value)
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        if not isinstance(found, dict) or found.keys() != {"object", "input", "thread"}:
            raise ValueError("a response has an object, its input and a thread")
        if not isinstance(found["object"], dict) or not isinstance(found["input"], list):
            raise ValueError("an object is an object, and the input is a list")
        thread = None if found["thread"] is None else Thread.from_json(found["thread"])
        return cls(object=found["object"], input=found["input"], thread=thread)


def record_of(recording: Recording) -> Record:
    """What is to be kept of a response that has ended."""
    return Record(
        object=response(recording),
        input=recording.about["input"],
        thread=continued(recording),
    )


def continued(recording: Recording) -> Thread | None:
    """The thread with this turn in it; None, if the turn came to no answer."""
    if status_of(recording) not in ("completed", "incomplete"):
        return None
    messages = [*recording.about["history"], *as_messages(recording.about["input"])]
    prompt = recording.request.prompt_token_ids
    return Thread().answered(messages, prompt, recording.token_ids, recording.text)


async def keep(store: Store, recording: Recording) -> None:
    if recording.about["store"]:
        value = record_of(recording).to_bytes()
        await store.put(Key(KIND, recording.tenant, recording.id), value, KEPT_S)


async def find(store: Store, tenant: str, response_id: str) -> Record | None:
    """One of the tenant's own that has ended; from now on it is kept as long as a new one.

    Raises:
        ApiError: 503, if the store does not answer: nobody knows then.
    """
    try:
        value = await store.get(Key(KIND, tenant, response_id), KEPT_S)
    except StoreUnavailable:
        raise unavailable("Kept responses cannot be read now.", "store_unavailable") from None
    if value is None:
        return None
    try:
        return Record.from_bytes(value)
    except ValueError as error:
        log.warning("the kept response %s is passed over: %s", response_id, error)
        return None
