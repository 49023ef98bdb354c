"""Ends a rank when rank 0 is gone. The module is imported before torch, which takes seconds."""

from __future__ import annotations

import os
import select
import signal
import threading


def hold(descriptor: int) -> None:
    """Makes this process end as soon as the other end of a socket is closed, and ignore SIGTERM.

    Rank 0 decides when streams have been drained. However it ends itself, its end of the socket is closed then.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_on_hangup, args=(descriptor,), daemon=True).start()


def _end_on_hangup(descriptor: int) -> None:
    hangup = select.poll()
    hangup.register(descriptor, 0)
    hangup.poll()
    os._exit(0)
