"""CPU microseconds of the event loop per streamed token, from `deliver` to the socket.

    .venv/bin/python -m tests.gateway.stream_cost [STREAMS] [TOKENS] [MICROSECONDS OF A STEP] [LISTENERS] [READS]

A thread stands in for the step thread: one report per step, one token per stream in it. With steps that are shorter
than the loop needs for their tokens (0, say), it says what a token costs that comes together with others. Listeners
look at the window: every detail of /v1/events, with as many KV blocks as the demo model has. With READS 1 the model is
one that reasons and calls tools, and the requests have a tool; the tokens are those of an answer all the same. Readers
and listeners are other processes, so that their CPU does not count.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time

import uvicorn
import uvloop

from penstock.app.build import Outbox
from penstock.engine.engine import EngineState
from penstock.engine.planning.request import FinishReason, Output, Request
from penstock.gateway.http.protocol import GatewayProtocol
from penstock.gateway.service import ServiceOptions
from tests.gateway.endpoints.test_tools import TEMPLATE, TOOL
from tests.gateway.harness import MODEL, Gateway, chat_body, make_timings, make_tokenizer, step_report

STEP_US = 4000

_READERS = """
import selectors, socket, sys
port, number, request = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
selector = selectors.DefaultSelector()
for _ in range(number):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(request)
    selector.register(connection, selectors.EVENT_READ)
while selector.get_map():
    for key, _ in selector.select():
        if not key.fileobj.recv(65536):
            selector.unregister(key.fileobj)
"""


def main(
    num_streams: int = 64,
    num_tokens: int = 500,
    step_us: int = STEP_US,
    num_listeners: int = 0,
    reads: int = 0,
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = _measure(num_streams, num_tokens, step_us / 1e6, num_listeners, reads=bool(reads))
        cost_s = runner.run(measured)
    tokens = num_streams * num_tokens
    print(
        f"{num_streams} streams: {cost_s / tokens * 1e6:.1f} microseconds of CPU per token ({tokens} tokens)"
    )


async def _measure(
    num_streams: int, num_tokens: int, step_s: float, num_listeners: int, *, reads: bool
) -> float:
    gateway = _reading_gateway() if reads else Gateway(clock=time.monotonic)
    gateway.engine.ref_counts = [0, *[0, 0, 1, 0, 2, 0, 0, 0] * 4096]
    gateway.engine.findable = bytearray(b"\0" + b"\0\1" * 16384)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(512)
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            gateway.app, http=GatewayProtocol, log_level="critical", ws="none", access_log=False
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve(sockets=[listener]))
        listeners = _reading(
            port, num_listeners, "GET /v1/events?detail=steps,kv HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        readers = _reading(port, num_streams, _http_request(tools=[TOOL] if reads else []))
        requests = [await gateway.taken() for _ in range(num_streams)]
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        outbox = Outbox()
        outbox.open(loop, gateway.service.deliver, lambda _: done.set())
        step_thread = threading.Thread(target=_step, args=(outbox, requests, num_tokens, step_s))
        before_s = time.thread_time()
        step_thread.start()
        await done.wait()
        await gateway.left()
        cost_s = time.thread_time() - before_s
        await asyncio.to_thread(readers.wait)
        listeners.kill()
        listeners.wait()
        server.should_exit = True
        await serving
    return cost_s


def _reading_gateway() -> Gateway:
    options = ServiceOptions(models=(MODEL,), tool_parser="hermes", reasoning_parser="think")
    return Gateway(options, clock=time.monotonic, tokenizer=make_tokenizer(TEMPLATE))


def _reading(port: int, number: int, request: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _READERS, str(port), str(number), request])


def _step(outbox: Outbox, requests: list[Request], num_tokens: int, step_s: float) -> None:
    reports = [
        step_report(*(_output(request, number == num_tokens - 1) for request in requests))
        for number in range(num_tokens)
    ]
    for report in reports:
        outbox.deliver(report)
        time.sleep(step_s)
    outbox.announce(EngineState.STOPPED)


def _output(request: Request, is_last: bool) -> Output:
    output = Output(request_id=request.request_id, index=0, text=" token", token_ids=[7])
    if is_last:
        output.finish_reason, output.timings = FinishReason.STOP, make_timings(request)
    return output


def _http_request(tools: list[object]) -> str:
    body = json.dumps(chat_body(stream=True, tools=tools))
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
