"""File descriptors: when none is left, connections are closed before anybody hears of them."""

from __future__ import annotations

import errno
import logging
import os
import resource

log = logging.getLogger("penstock.gateway")

TELL_EVERY_S = 60.0
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


class Descriptors:
    """Tells the operator when this process has none left: the event loop accepts and closes without a word."""

    def __init__(self) -> None:
        self._told_s = float("-inf")

    def look(self, now: float) -> None:
        """Looks for a free descriptor, several times a second; logs one line in `TELL_EVERY_S` at most."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno in _NONE_LEFT and now - self._told_s >= TELL_EVERY_S:
                self._told_s = now
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                log.error(
                    "no file descriptor is left, so new connections are closed unanswered; "
                    "this process may have %d: raise it (ulimit -n), or let idle clients go",
                    limit,
                )
