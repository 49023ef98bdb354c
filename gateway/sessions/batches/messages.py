"""Anthropic's API shows batches as objects of its own, and each result as a line."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import orjson

from penstock.gateway.sessions.batches.batch import Batch

MESSAGE_BATCH_ID = re.compile(r"msgbatch_[0-9a-f]{32}")


def new_message_batch_id() -> str:
    return f"msgbatch_{secrets.token_hex(16)}"


def input_line(custom_id: str, params: dict[str, object]) -> bytes:
    """Makes a request a line of an input file."""
    return orjson.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/messages", "body": params})


def message_batch(batch: Batch, url: str) -> dict[str, Any]:
    """The batch as Anthropic's API shows it.

    Args:
        url: the address of the batch.
    """
    status = "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if batch.ended else status,
        "request_counts": _counts(batch),
        "created_at": _instant(batch.created_at),
        "expires_at": _instant(batch.expires_at),
        "ended_at": _instant(batch.times.get(batch.status)) if batch.ended else None,
        "cancel_initiated_at": _instant(batch.times.get("cancelling")),
        "archived_at": None,
        "results_url": f"{url}/results" if batch.ended else None,
    }


def _counts(batch: Batch) -> dict[str, int]:
    if not batch.ended:
        return {"processing": batch.num_lines, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    left = batch.num_lines - batch.num_completed - batch.num_failed
    is_cancelled = batch.status == "cancelled"
    return {
        "processing": 0,
        "succeeded": batch.num_completed,
        "errored": batch.num_failed - batch.num_expired + (0 if is_cancelled else left),
        "canceled": left if is_cancelled else 0,
        "expired": batch.num_expired,
    }


def _instant(seconds: int | None) -> str | None:
    return None if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def told_results(lines: Iterable[bytes], told: set[str]) -> bytes:
    """Makes results of the lines of an output or error file, and adds the `custom_id` of each to `told`."""
    found = [orjson.loads(line) for line in lines if line]
    told.update(one["custom_id"] for one in found)
    return b"".join(_result(one["custom_id"], _outcome(one["response"])) for one in found)


def left_results(lines: Iterable[bytes], told: set[str], batch: Batch) -> bytes:
    """Makes results of the lines of an input file that are not in `told`: no process got to them."""
    outcome: dict[str, Any] = {"type": "canceled"}
    if batch.errors:
        error = {"type": "api_error", "message": batch.errors[0].message}
        outcome = {"type": "errored", "error": {"type": "error", "error": error, "request_id": None}}
    ids = (orjson.loads(line)["custom_id"] for line in lines if line)
    return b"".join(_result(custom_id, outcome) for custom_id in ids if custom_id not in told)


def _outcome(response: dict[str, Any] | None) -> dict[str, Any]:
    if response is None:
        return {"type": "expired"}
    if response["status_code"] == 200:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": response["body"]}


def _result(custom_id: str, outcome: dict[str, Any]) -> bytes:
    return orjson.dumps({"custom_id": custom_id, "result": outcome}) + b"\n"
