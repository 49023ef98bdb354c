"""Penstock under load: `locust -f loadtests/locustfile.py --host URL`, with the web page, headless, or over workers.

README.md says how to use it. The statistics and the exit status are locust's own.
"""

from __future__ import annotations

from typing import Any

from locust import events

from loadtests.shapes import SHAPES, Shape
from loadtests.users import Background, Batcher, Chatter, Completer, Leaver, Resumer, SlowReader

__all__ = ["Background", "Batcher", "Chatter", "Completer", "Leaver", "Resumer", "Shape", "SlowReader"]


@events.init_command_line_parser.add_listener
def add_arguments(parser: Any) -> None:
    """`parser` is locust's: an ArgumentParser whose arguments can come from the environment, and be secrets."""
    parser.add_argument(
        "--model", default="penstock-demo", env_var="LOADTEST_MODEL", help="as the server calls it"
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=0.5,
        help="requests per second of each user that does not wait for answers",
    )
    parser.add_argument(
        "--load-shape",
        default="constant",
        choices=list(SHAPES),
        help="how the number of users goes with time",
    )
    parser.add_argument(
        "--tenants",
        default="",
        env_var="LOADTEST_TENANTS",
        is_secret=True,
        help="API keys of users, as NAME=KEY,NAME=KEY; empty if the server wants none",
    )
