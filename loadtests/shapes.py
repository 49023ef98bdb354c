"""How many users there are as time goes on."""

from __future__ import annotations

from locust import LoadTestShape

from loadtests.curves import SHAPES

_FOREVER_S = 3600.0


class Shape(LoadTestShape):
    """--load-shape over --run-time, or over an hour; --users and --spawn-rate mean what they mean without it."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        passed_s, run_s = self.get_run_time(), options.run_time or _FOREVER_S
        if options.run_time and passed_s >= run_s:
            self.runner.stop()  # which waits for the last word of each worker, as quitting does not
            return None
        num_users = options.num_users or 1
        wanted = max(1, round(num_users * SHAPES[options.load_shape](min(passed_s / run_s, 1.0))))
        at_once = options.load_shape == "flash-crowd"
        return wanted, max(num_users if at_once else options.spawn_rate or 1, 1)
