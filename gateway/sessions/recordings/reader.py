"""Readers of recordings: which events a connection has had, and which it lacks."""

from __future__ import annotations

from penstock.gateway.errors import ApiError, gone
from penstock.gateway.http.connections import Connection
from penstock.gateway.http.correlation import log_fault
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.wire.writing import Outputs, Writer

_BATCH = 256
"""The events that are sent at once; other work of the event loop has its turn between two batches."""


class Reader:
    """One connection that follows a recording, from any of its events on."""

    def __init__(self, recording: Recording, position: int = -1) -> None:
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
        self._began_at = position
        self.at_end = False
        """Whether the reader has everything."""
        self._check_position()

    @property
    def reply(self) -> Recording:
        return self.recording

    @property
    def writer(self) -> Writer[Recording]:
        return self.recording.writer

    @property
    def finished(self) -> bool:
        return self.recording.settled

    @property
    def refusal(self) -> ApiError | None:
        """The error that is the whole reply; a reader that has some events gets it as another event instead."""
        return self.recording.error if self.recording.settled and self._began_at < 0 else None

    @property
    def is_behind(self) -> bool:
        """Whether there is more to take at once."""
        return not self.at_end and self._lacks_events

    @property
    def _lacks_events(self) -> bool:
        return self.position + 1 < self.recording.num_events

    @property
    def _has_news(self) -> bool:
        recording, is_committed = self.recording, self.connection.committed
        if is_committed and self.writer.opens_early:
            recording.open()
        # How a reply opens is told with its first token, or when the client has waited for long enough.
        return recording.settled or ((recording.started or is_committed) and self._lacks_events)

    async def news(self) -> None:
        """Returns when there is something to send, or the connection is gone."""
        while not (self._has_news or self.connection.gone or self.connection.overdue):
            await self.connection.sleep()

    async def end(self) -> None:
        """Returns when the recording has ended, or the connection is gone."""
        while not (self.recording.settled or self.connection.gone):
            await self.connection.sleep()

    def outputs(self) -> Outputs:
        return self.recording.outputs()

    def take(self) -> bytes:
        """Returns the next events that the client does not have."""
        recording = self.recording
        try:
            self._check_position()
        except ApiError as error:  # it was too slow: the events that it lacks are forgotten
            return self._end_here(error)
        frames = recording.frames_from(self.position + 1, _BATCH) if self._has_news else []
        self.position += len(frames)
        if not recording.settled or self._lacks_events:
            return b"".join(frames)
        if recording.error is not None:
            log_fault(recording.error)
            if recording.is_interrupted:
                return b"".join(frames) + self._end_here(recording.error)
        self.at_end = True
        return b"".join([*frames, self.writer.tail])

    def _end_here(self, error: ApiError) -> bytes:
        self.at_end = True
        return self.writer.fault(self.recording, error, self.position)

    def _check_position(self) -> None:
        first = self.recording.num_dropped
        if first and self.position + 1 < first:
            message = f"Events up to {first - 1} are no longer kept; go on with starting_after={first - 1}."
            raise gone(message, "position_expired")
