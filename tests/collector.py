"""A collector of traces: OTLP over HTTP, on a port of its own, decoded by the protocol's own classes."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Keeps the spans that it is sent. While `status` is not 200 it takes none."""

    def __init__(self) -> None:
        self.status = 200
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.num_posts = 0
        self._news = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                collector.take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, body: bytes) -> None:
        with self._news:
            self.num_posts += 1
            if self.status == 200:
                for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    self.resources.append(attributes(of_resource.resource))
                    self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
            self._news.notify_all()

    def wait_posts(self, number: int) -> None:
        """Returns when so many have come."""
        with self._news:
            assert self._news.wait_for(lambda: self.num_posts >= number, 30)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def attributes(of: Any) -> dict[str, Any]:
    """Returns the attributes of a span, an event or a resource."""
    return {each.key: _value(each.value) for each in of.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(each) for each in found.values] if kind == "array_value" else found
