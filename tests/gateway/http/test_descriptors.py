"""An operator whose server is out of file descriptors is told so, and not all the time."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import pytest

from penstock.gateway.http.descriptors import TELL_EVERY_S
from tests.gateway.harness import Gateway

pytestmark = pytest.mark.anyio


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_no_descriptor_left_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    service = Gateway().service
    service.tick(0.0)
    assert caplog.messages == []
    with no_descriptor_left():
        for now in (1.0, 2.0, TELL_EVERY_S):
            service.tick(now)
        assert len(caplog.messages) == 1
        service.tick(1.0 + TELL_EVERY_S)
    service.tick(2.0 + 2 * TELL_EVERY_S)
    assert len(caplog.messages) == 2
    assert "may have 3" in caplog.messages[0]
