"""A prompt that one replica computes for another one, which takes its KV while it is computed.

`/internal/prefill` has this replica compute a prompt. `/internal/pull` has it take the KV of one from the replica that
computes it: the blocks go into the prefix cache as they come, where they hold no memory that anybody else needs, and
where the request finds them that is sent here when the prompt is whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.engine.planning.prefix_index import with_hashes
from penstock.engine.planning.request import Request
from penstock.gateway.background import meanwhile
from penstock.gateway.endpoints.intake import Endpoints
from penstock.gateway.endpoints.operation import OWN, serves
from penstock.gateway.endpoints.state import check_member
from penstock.gateway.errors import ApiError, invalid, not_found
from penstock.gateway.http.connections import BODY_WITHIN
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.limits import parse_object
from penstock.gateway.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.reply.prompt_only import PromptOnly, prompt_request
from penstock.priority.lanes import Lane

PATH = "/internal/prefill"
PULL_PATH = "/internal/pull"
PULL_S = 600.0
"""The time after which a prompt that is being computed elsewhere is no longer followed."""
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOrder:
    """A prompt to compute, as a switch sends it."""

    token_ids: list[int]
    salt: str
    """The salt of its blocks' hashes, in hexadecimal digits."""
    tenant: str
    lane: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder(PrefillOrder):
    """A prompt that another replica computes, whose KV is to be taken from there."""

    source: str
    """The address of that replica, as `http://HOST:PORT` or `https://HOST:PORT`."""


_Order = TypeVar("_Order", bound=PrefillOrder)


class PrefillApi(Endpoints):
    """The prompts that one service computes for others, and those that others compute for it."""

    @serves(f"POST {PATH}", OWN, statuses=(429, 503))
    async def compute(self, http: HttpRequest) -> Response:
        """Compute a prompt for another replica, and answer when its KV is there."""
        service = self._service
        check_member(service, http)
        raw = await http.body()
        order = await self._read(PrefillOrder, raw)
        prompt = PromptOnly(
            order.token_ids,
            bytes.fromhex(order.salt),
            service.clock(),
            lane=Lane(order.lane),
            tenant=order.tenant,
            block_size=service.options.block_size,
        )

        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            service.dispatch.release(prompt)

        service.dispatch.submit(prompt)
        try:
            async with meanwhile(watch()):
                await prompt.over()
        finally:
            service.dispatch.release(prompt)
        return JsonResponse(
            {"prompt_tokens": prompt.num_prompt_tokens, "cached_tokens": prompt.num_cached_tokens}
        )

    @serves(f"POST {PULL_PATH}", OWN, statuses=(404, 503))
    async def pull(self, http: HttpRequest) -> Response:
        """Take the KV of a prompt from another replica while that computes it.

        The body is a line of JSON, the order, and then a line whenever more of the prompt was computed: the number of
        its first blocks that are there. Whoever sends it ends it, or hangs up, when there is nothing more to take.
        """
        service, kv = self._service, self._service.kv
        check_member(service, http)
        service.dispatch.check_open()
        if kv is None or not kv.digest:
            raise not_found("This server takes no KV from others.")
        http.scope.get("extensions", {}).get(BODY_WITHIN, lambda _: None)(PULL_S)
        lines = _lines(http)
        order = await self._read(PullOrder, await anext(lines, b""))
        prompt = await off_loop(
            len(order.token_ids) * TOKEN_BYTES, _prompt_of, order, service.clock(), service.options.block_size
        )
        num_taken = 0
        async for line in lines:
            if not line.isdigit() or len(line) > _MOST_DIGITS:
                raise _wrong()
            kv.pull(order.source, prompt, num_taken, int(line))
            num_taken = int(line)
        return JsonResponse({"blocks": num_taken})

    async def _read(self, kind: type[_Order], raw: bytes) -> _Order:
        """Raises 400."""
        service = self._service
        body = await off_loop(len(raw), parse_object, raw, service.options.limits)
        order = _order_of(kind, body, service.vocab_size)
        if len(order.token_ids) >= service.dispatch.context_length:
            raise _wrong()
        return order


async def _lines(http: HttpRequest) -> AsyncIterator[bytes]:
    """Yields the lines of a body as they come, but for a last one that is not ended."""
    rest = b""
    async for part in http.stream():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def _prompt_of(order: PrefillOrder, now: float, block_size: int) -> Request:
    salt, lane = bytes.fromhex(order.salt), Lane(order.lane)
    request = prompt_request(order.token_ids, salt, now, lane=lane, tenant=order.tenant)
    return with_hashes(request, block_size)


def _order_of(kind: type[_Order], body: Mapping[str, object], vocab_size: int) -> _Order:
    """Raises 400."""
    try:
        order = kind(**body)  # type: ignore[arg-type]
        bytes.fromhex(order.salt)
        Lane(order.lane)
        texts = [order.tenant, order.source if isinstance(order, PullOrder) else ""]
        is_right = all(isinstance(text, str) for text in texts)
        is_right = is_right and isinstance(order.token_ids, list) and bool(order.token_ids)
        is_right = is_right and all(type(one) is int and 0 <= one < vocab_size for one in order.token_ids)
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise _wrong()
    return order


def _wrong() -> ApiError:
    return invalid("The body must be an order as the switches of this version send it.", None)
