"""A server that runs already and speaks OpenAI's API: this one, or another to set beside it."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.app.bench.server_process import ServerProcess
from penstock.app.errors import OperatorError

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class OtherServer:
    """Where it listens, and the name of the first of its models."""

    host: str
    port: int
    model: str

    @classmethod
    def at(cls, url: str) -> OtherServer:
        """Asks it for its models.

        Raises:
            OperatorError: the address is none of http, or nothing there lists a model.
        """
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host, port = None, 0
        if parts.scheme != "http" or host is None:
            raise OperatorError(f"--url {url}: expected an address like http://127.0.0.1:8000")
        try:
            with urllib.request.urlopen(f"http://{parts.netloc}/v1/models", timeout=_TIMEOUT_S) as reply:
                model = json.load(reply)["data"][0]["id"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise OperatorError(f"--url {url}: GET /v1/models brought no model: {error}") from None
        return cls(host, port, model)


AnyServer = ServerProcess | OtherServer
