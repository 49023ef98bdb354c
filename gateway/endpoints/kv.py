"""`/internal/kv`: the KV of blocks that this replica holds, for the other replicas of its cluster.

There is such a route only where the operator gave a secret, and only for those who know it: the values follow from what
clients wrote, and whoever computes with them believes what they say.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.engine.tiers.block_file import BlockKey, Payload, pack, parse_key
from penstock.engine.tiers.peer import MAX_KEYS, PATH
from penstock.gateway.endpoints.intake import Endpoints
from penstock.gateway.endpoints.operation import OWN, serves
from penstock.gateway.endpoints.state import check_member
from penstock.gateway.errors import invalid, not_found
from penstock.gateway.off_loop import off_loop

BYTES = "application/octet-stream"


class KvApi(Endpoints):
    """The blocks of one service."""

    @serves(f"GET {PATH}/{{digest}}/{{keys}}", OWN, answers=(BYTES,), statuses=(404, 503))
    async def give(self, http: HttpRequest) -> Response:
        """Give another replica the KV of blocks.

        The blocks come one after another in the form of `engine.tiers.block_file`, up to the first that is not here.
        """
        check_member(self._service, http)
        keys = [parse_key(text) for text in http.path_params["keys"].split(",", MAX_KEYS)]
        if len(keys) > MAX_KEYS or None in keys:
            raise invalid(
                f"The path must end with up to {MAX_KEYS} blocks' keys, with commas between them.", None
            )
        kv, wanted = self._service.kv, [key for key in keys if key is not None]
        if kv is None or http.path_params["digest"] != kv.digest.hex():
            raise not_found("There are no blocks of these weights in this layout.")
        payloads = await kv.read(wanted)
        packed = await off_loop(sum(map(len, payloads)), _packed, wanted, payloads, kv.digest)
        return Response(packed, media_type=BYTES)


def _packed(keys: Sequence[BlockKey], payloads: Sequence[Payload], digest: bytes) -> bytes:
    return b"".join(pack(key, payload, digest) for key, payload in zip(keys, payloads, strict=False))
