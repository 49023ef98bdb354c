"""How many users there are as time goes on."""

from __future__ import annotations

import gevent
from locust import LoadTestShape
from locust.rpc import Message
from locust.runners import MasterRunner

from loadtests.curves import SHAPES

_FOREVER_S = 3600.0
_GOODBYE_S = 60.0
"""For workers whose users have ended to say so."""


class Shape(LoadTestShape):
    """--load-shape over --run-time, or over an hour; --users and --spawn-rate mean what they mean without it."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        passed_s, run_s = self.get_run_time(), options.run_time or _FOREVER_S
        if options.run_time and passed_s >= run_s:
            self._end(options.headless)
            return None
        num_users = options.num_users or 1
        wanted = max(1, round(num_users * SHAPES[options.load_shape](min(passed_s / run_s, 1.0))))
        at_once = options.load_shape == "flash-crowd"
        return wanted, max(num_users if at_once else options.spawn_rate or 1, 1)

    def _end(self, is_last_run: bool) -> None:
        """Returns when the last word of each worker is here, which locust's own `quit` does not wait for.

        Workers that are told to stop sleep for --stop-timeout, and then wait a minute for a master that has gone; those
        that are told to quit say their last word and go.
        """
        if not (is_last_run and isinstance(self.runner, MasterRunner)):
            self.runner.stop()
            return
        self.runner.stop(send_stop_to_client=False)
        for worker in self.runner.clients.all:
            self.runner.server.send_to_client(Message("quit", None, worker.id))
        patience_s = self.runner.environment.stop_timeout + _GOODBYE_S
        with gevent.Timeout(patience_s, False):
            while self.runner.clients.all:
                gevent.sleep(0.05)
