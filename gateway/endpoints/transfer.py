"""vLLM's `kv_transfer_params`: a proxy has one server compute a prompt, and tells another one where its KV is.

The proxy sends the first request with `do_remote_decode` and `max_tokens: 1`, and its reply's object with the second.
The secret of the cluster is sent to the address in there, so nobody but a server of the cluster may say where: what it
says is signed, in `remote_engine_id`, which proxies pass on as it is. What is not so signed is not believed, and the
prompt is computed.
"""

from __future__ import annotations

import hmac
import logging
from urllib.parse import urlsplit

from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.http.correlation import CORRELATION
from penstock.gateway.tickets import source_of
from penstock.gateway.wire.schemas import KvTransfer

log = logging.getLogger("penstock.gateway")

_FIELD = "kv_transfer_params"


def given_by(replica: str, reply_id: str, secret: str | None) -> dict[str, object]:
    """Returns the `kv_transfer_params` of a reply whose prompt's KV another server may take from this one.

    Raises:
        ApiError: 400, this server gives none.
    """
    http = CORRELATION.get()
    if not secret or http is None or not http.own_address:
        raise _not_here()
    parts = urlsplit(http.own_address)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": _signed(secret, replica, http.own_address),
        "remote_block_ids": [],  # blocks are found by the prompt
        "remote_host": parts.hostname,
        "remote_port": parts.port,
        "remote_request_id": reply_id,
        "tp_size": 1,
    }


def take_from(params: KvTransfer, secret: str | None) -> None:
    """Notes where the running task's request is to take KV from.

    Raises:
        ApiError: 400, this server takes none.
    """
    http = CORRELATION.get()
    if not params.do_remote_prefill or http is None:
        return
    if not secret:
        raise _not_here()
    given, host = params.remote_engine_id or "", params.remote_host or ""
    authority = f"[{host}]:{params.remote_port}" if ":" in host else f"{host}:{params.remote_port}"
    replica = given.rpartition(".")[0]
    for address in (f"http://{authority}", f"https://{authority}"):
        if hmac.compare_digest(given.encode(), _signed(secret, replica, address).encode()):
            http.source = source_of(secret, http.ticket, address)
            return
    log.warning("no KV from %.80r: no server of this cluster has said so; the prompt is computed", authority)


def _signed(secret: str, replica: str, address: str) -> str:
    mark = hmac.digest(secret.encode(), f"kv {replica} {address}".encode(), "sha256").hex()[:32]
    return f"{replica}.{mark}"


def _not_here() -> ApiError:
    return invalid(f"'{_FIELD}' needs a server with --cluster-secret.", _FIELD, "unsupported_parameter")
