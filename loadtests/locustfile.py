"""Penstock under load: `locust -f loadtests/locustfile.py --host URL`, with the web page, headless, or over workers.

Users, shapes and flags are in the modules beside it; README.md says how to use them.
"""

from __future__ import annotations

from typing import Any

from locust import events

from loadtests.collecting import Collector
from loadtests.settings import add_arguments
from loadtests.shapes import Shape
from loadtests.users import Background, Batcher, Chatter, Completer, Leaver, Resumer, SlowReader

__all__ = ["Background", "Batcher", "Chatter", "Completer", "Leaver", "Resumer", "Shape", "SlowReader"]

events.init_command_line_parser.add_listener(add_arguments)


@events.init.add_listener
def collect(environment: Any, **_: Any) -> None:
    Collector(environment)
