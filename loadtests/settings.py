"""The flags of a load test on locust's command line, which its web page shows as fields, too."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from loadtests.curves import SHAPES
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy


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
    parser.add_argument(
        "--promise-ttft", type=float, default=1.0, help="interactive promise: first token, in seconds"
    )
    parser.add_argument(
        "--promise-tpot", type=float, default=0.1, help="interactive promise: each token, in seconds"
    )
    parser.add_argument("--report", default="", help="folder for report.json and report.html")


def read_tenants(text: str) -> dict[str, str]:
    """Key by name; one tenant without a key if the text is empty.

    Raises:
        ValueError: an entry is not NAME=KEY.
    """
    if not text:
        return {"default": ""}
    tenants = {}
    for entry in text.split(","):
        name, _, key = entry.partition("=")
        if not name or not key:
            raise ValueError("--tenants takes NAME=KEY,NAME=KEY")
        tenants[name] = key
    return tenants


def read_lanes(options: argparse.Namespace) -> Mapping[Lane, LanePolicy]:
    """The lanes with the promise that the server under test makes to interactive requests."""
    interactive = replace(
        DEFAULT_POLICIES[Lane.INTERACTIVE], ttft_s=options.promise_ttft, tpot_s=options.promise_tpot
    )
    return {**DEFAULT_POLICIES, Lane.INTERACTIVE: interactive}
