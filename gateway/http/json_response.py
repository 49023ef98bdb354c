"""JSON replies that are made at once."""

from __future__ import annotations

import orjson
from starlette.responses import JSONResponse


class JsonResponse(JSONResponse):
    """A JSON reply that is rendered by orjson, in a fraction of the standard library's time."""

    def render(self, content: object) -> bytes:
        return orjson.dumps(content)
