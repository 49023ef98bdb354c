"""Readers of recordings: which events a connection has had, and how those that it lacks are written."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.gateway.http.connections import EVENT_STREAM, Connection
from penstock.gateway.http.errors import ApiError, gone, log_fault
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.wire.frames import KEEPALIVE


class Format(Protocol):
    """The events of one kind of reply, on the wire."""

    num_opening: int
    """The number of events before the first one that the Script makes; they are numbered from 0."""
    tail: bytes
    """The frame that ends every connection, without a number."""

    def opening(self, recording: Recording) -> list[bytes]: ...

    def event(self, number: int, event: Any) -> bytes:
        """Returns the frame of an event that the recording's Script made."""

    def closing(self, recording: Recording, first: int) -> list[bytes]:
        """Returns the events after those of the Script, numbered from `first`."""

    def fault(self, recording: Recording, error: ApiError, number: int) -> list[bytes]:
        """Returns the events that stand in place of `closing` if the reply cannot be finished."""

    def body(self, recording: Recording) -> dict[str, object]:
        """Returns the reply in one piece."""


class Reader:
    """One connection that follows a recording, from any of its events on."""

    media_type = EVENT_STREAM

    def __init__(self, recording: Recording, format: Format, position: int = -1) -> None:
        """
        Args:
            position: number of the last event that the client has; -1 if none.

        Raises:
            ApiError: 410, if what comes next is no longer kept.
        """
        self.recording = recording
        self.connection: Connection
        """The connection, from the moment on in which the reader is attached."""
        self.position = position
        self._format = format
        self._began_at = position
        self.at_end = False
        """Whether nothing comes any more."""
        self._check_position()

    def tell(self, event: object) -> None:
        number = self._format.num_opening + self.recording.num_events - 1
        if self.position == number - 1 and self.connection.is_ready:
            self.connection.send_now(self._format.event(number, event))
            self.position = number
        else:
            self.connection.wake()

    async def news(self) -> None:
        """Returns when there is something to send, or the connection is gone."""
        while not (self._has_news or self.connection.gone or self.connection.overdue):
            await self.connection.sleep()

    def whole(self) -> dict[str, object]:
        return self._format.body(self.recording)

    async def end(self) -> None:
        """Returns when the recording has ended, or the connection is gone."""
        while not (self.recording.settled or self.connection.gone):
            await self.connection.sleep()

    @property
    def refusal(self) -> ApiError | None:
        """Whoever has some of the events is told of an error in another one."""
        return self.recording.error if self.recording.settled and self._began_at < 0 else None

    @property
    def _has_news(self) -> bool:
        if self.recording.settled:
            return True
        # How a reply opens is told with its first token, or when the client has waited for long enough.
        is_open = self.recording.started or self.connection.committed
        return is_open and self.position + 1 < self._format.num_opening + self.recording.num_events

    def take(self) -> bytes:
        """Returns the frames of all events that the client does not have."""
        try:
            return b"".join(self._frames())
        except ApiError as error:  # it was too slow: what it lacks is forgotten
            self.at_end = True
            fault = self._format.fault(self.recording, error, self.position + 1)
            return b"".join([*fault, self._format.tail])

    def keepalive(self) -> bytes:
        return KEEPALIVE

    def _frames(self) -> list[bytes]:
        recording, format = self.recording, self._format
        if not self._has_news:
            return []
        frames: list[bytes] = []
        if self.position + 1 < format.num_opening:
            frames += format.opening(recording)[self.position + 1 :]
            self.position = format.num_opening - 1
        self._check_position()
        for event in recording.events_from(self.position + 1 - format.num_opening):
            self.position += 1
            frames.append(format.event(self.position, event))
        if recording.settled:
            frames += [*self._closing(), format.tail]
            self.at_end = True
        return frames

    def _closing(self) -> list[bytes]:
        recording, first = self.recording, self._format.num_opening + self.recording.num_events
        if recording.error is None:
            frames = self._format.closing(recording, first)
        else:
            log_fault(recording.error)
            frames = self._format.fault(recording, recording.error, first)
        num_known = max(0, self.position - first + 1)
        return frames[num_known:]

    def _check_position(self) -> None:
        first = self._format.num_opening + self.recording.num_dropped
        if self.recording.num_dropped and self.position + 1 < first:
            message = f"Events up to {first - 1} are no longer kept; go on with starting_after={first - 1}."
            raise gone(message, "position_expired")
