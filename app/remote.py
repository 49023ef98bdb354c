"""`penstock doctor --url`: how a running server is, from outside, and whether its streams come through as sent."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from penstock.app.doctor import Check, Severity
from penstock.app.errors import OperatorError
from penstock.app.reader import TimedAnswer, TimedBytes, read_answer

KEY_VARIABLE = "OPENAI_API_KEY"
_PATIENCE_S = 60.0
_TOKENS = 32
_Sums = Mapping[str, float]


def run(url: str) -> int:
    """Prints every check as it is made; 1 if one failed."""
    url = checked(url)
    failed = False
    for check in checks(url):
        print(check, flush=True)
        failed |= check.level is Severity.FAIL
    return int(failed)


def checked(url: str) -> str:
    """Returns the URL of a server without a slash at its end; raises OperatorError if it is none."""
    if not url.startswith(("http://", "https://")) or not urlsplit(url).hostname:
        raise OperatorError(f"--url {url}: not a URL like http://127.0.0.1:8000")
    return url.rstrip("/")


def checks(url: str) -> Iterator[Check]:
    try:
        status, text = _get(url, "/health")
    except ssl.SSLCertVerificationError as error:
        advice = "for a certificate of your own authority, name the authority's in SSL_CERT_FILE"
        yield Check(Severity.FAIL, "server", f"{url} is not trusted: {error.verify_message}", advice)
        return
    except (OSError, http.client.HTTPException) as error:
        yield Check(
            Severity.FAIL,
            "server",
            f"{url} does not answer: {error}",
            "is it running, and is the port right?",
        )
        return
    yield _state("health", status, text, "the step loop makes no progress: its log says why; start it again")
    yield _state(
        "ready", *_get(url, "/ready"), "it loads, warms up or drains: balancers send nobody here now"
    )
    status, text = _get(url, "/metrics")
    if status == 200:
        yield from check_metrics(sums_of(text))
    else:
        yield Check(
            Severity.WARN,
            "metrics",
            f"HTTP {status}",
            "a proxy may hide them; ask the server itself",
        )
    yield check_stream(url)


def check_metrics(sums: _Sums) -> Iterator[Check]:
    """The counters since the server's start, in words; keys are names, for some with labels behind."""
    kept, broken = (sums.get(f"penstock_promises_total {word}", 0.0) for word in ("kept", "broken"))
    if kept + broken:
        share = kept / (kept + broken)
        level = Severity.OK if share >= 0.95 else Severity.WARN
        yield Check(
            level,
            "promises",
            f"{share:.1%} kept of {kept + broken:.0f}",
            "" if share >= 0.95 else "see Sizing",
        )
    let_in, refused = (sums.get(f"penstock_admissions_total {word}", 0.0) for word in ("admitted", "refused"))
    if let_in + refused:
        share = refused / (let_in + refused)
        level = Severity.OK if share <= 0.05 else Severity.WARN
        advice = "" if share <= 0.05 else "more load than the promise allows"
        yield Check(level, "refused", f"{share:.1%} of {let_in + refused:.0f} requests", advice)
    usage, preemptions = sums.get("penstock_kv_usage_ratio", 0.0), sums.get("penstock_preemptions_total", 0.0)
    short = usage > 0.95 and preemptions > 0
    text = f"{usage:.0%} in use; sequences gave way {preemptions:.0f} times"
    yield Check(
        Severity.WARN if short else Severity.OK,
        "kv",
        text,
        "more --kv-memory, or --kv-dtype int8" if short else "",
    )
    if "penstock_store_up" in sums:
        up = bool(sums["penstock_store_up"])
        failures = sums.get("penstock_store_failures_total", 0.0)
        text = f"{'up' if up else 'Redis does not answer, memory stands in'}; {failures:.0f} calls failed"
        advice = "" if up else "docs/guide/deploy.md, Redis is slow or gone"
        yield Check(Severity.OK if up else Severity.WARN, "store", text, advice)
    if failures := sums.get("penstock_failed_steps_total", 0.0):
        yield Check(Severity.WARN, "steps", f"{failures:.0f} failed", "the log says why")


def check_stream(url: str) -> Check:
    """One short streamed answer; tokens that all come at once were held back on the way."""
    status, text = _get(url, "/v1/models")
    if status == 401:
        return Check(
            Severity.WARN, "stream", "not tried: the server wants a key", f"put one into {KEY_VARIABLE}"
        )
    if status != 200:
        return Check(Severity.FAIL, "stream", f"/v1/models: HTTP {status}")
    body = {
        "model": json.loads(text)["data"][0]["id"],
        "prompt": "Once upon a time",
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = _stream(url, body)
    if answer.was_refused:
        return Check(Severity.WARN, "stream", f"refused with {answer.status}: there is no room now")
    if answer.error:
        return Check(Severity.FAIL, "stream", answer.error)
    num_pieces = len(set(answer.token_times_s))
    said = f"first token after {1000 * answer.ttft_s:.0f} ms, {answer.num_output_tokens} tokens in {num_pieces} pieces"
    if num_pieces == 1:
        return Check(
            Severity.WARN,
            "stream",
            said,
            "something on the way buffers: docs/guide/deploy.md, Behind a proxy",
        )
    return Check(Severity.OK, "stream", said)


def _state(name: str, status: int, text: str, advice: str) -> Check:
    try:
        word = json.loads(text)["status"]
    except (ValueError, KeyError, TypeError):
        return Check(
            Severity.FAIL, name, f"HTTP {status}, and not what Penstock says", "is it a Penstock at all?"
        )
    return Check(Severity.OK if status == 200 else Severity.FAIL, name, word, "" if status == 200 else advice)


def sums_of(text: str) -> dict[str, float]:
    """The sum of each metric's samples, also by each of their labels' values."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for name in (sample.name, *(f"{sample.name} {value}" for value in sample.labels.values())):
                sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=_PATIENCE_S)


def key_headers() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}


def _get(url: str, path: str) -> tuple[int, str]:
    connection = connect(url)
    try:
        connection.request("GET", urlsplit(url).path + path, headers=key_headers())
        reply = connection.getresponse()
        return reply.status, reply.read().decode(errors="replace")
    finally:
        connection.close()


def _stream(url: str, body: object) -> TimedAnswer:
    connection, recording = connect(url), TimedBytes(time.perf_counter())
    try:
        payload = json.dumps(body)
        headers = {**key_headers(), "content-type": "application/json"}
        connection.request("POST", urlsplit(url).path + "/v1/completions", payload, headers)
        reply = connection.getresponse()
        # http.client has taken the chunks apart: the head that goes before says nothing of them.
        recording.note(
            f"HTTP/1.1 {reply.status} \r\ncontent-type: {reply.headers['content-type']}\r\n\r\n".encode()
        )
        while piece := reply.read1():
            recording.note(piece)
    except (OSError, http.client.HTTPException) as error:
        return TimedAnswer(recording.started_s, time.perf_counter(), error=f"the stream broke: {error}")
    finally:
        connection.close()
    return read_answer(recording)
