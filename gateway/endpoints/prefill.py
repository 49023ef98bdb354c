"""`/internal/prefill`: a prompt that this replica computes for another one, which takes its KV from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.background import meanwhile
from penstock.gateway.endpoints.intake import Endpoints
from penstock.gateway.endpoints.operation import OWN, serves
from penstock.gateway.endpoints.state import check_member
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.limits import parse_object
from penstock.gateway.off_loop import off_loop
from penstock.gateway.reply.prompt_only import PromptOnly
from penstock.priority.lanes import Lane

PATH = "/internal/prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOrder:
    """A prompt to compute, as a switch sends it."""

    token_ids: list[int]
    salt: str
    """The salt of its blocks' hashes, in hexadecimal digits."""
    tenant: str
    lane: int


class PrefillApi(Endpoints):
    """The prompts that one service computes for others."""

    @serves(f"POST {PATH}", OWN, statuses=(429, 503))
    async def compute(self, http: HttpRequest) -> Response:
        """Compute a prompt for another replica, and answer when its KV is there."""
        service = self._service
        check_member(service, http)
        raw = await http.body()
        order = _read(await off_loop(len(raw), parse_object, raw, service.options.limits), service.vocab_size)
        prompt = PromptOnly(
            order.token_ids,
            bytes.fromhex(order.salt),
            service.clock(),
            lane=Lane(order.lane),
            tenant=order.tenant,
            block_size=service.options.block_size,
        )
        if len(order.token_ids) >= service.dispatch.context_length:
            raise _wrong()

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


def _read(body: Mapping[str, object], vocab_size: int) -> PrefillOrder:
    """Raises 400."""
    try:
        order = PrefillOrder(**body)  # type: ignore[arg-type]
        bytes.fromhex(order.salt)
        Lane(order.lane)
        is_right = (
            isinstance(order.tenant, str) and isinstance(order.token_ids, list) and bool(order.token_ids)
        )
        is_right = is_right and all(type(one) is int and 0 <= one < vocab_size for one in order.token_ids)
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise _wrong()
    return order


def _wrong() -> ApiError:
    return invalid("The body must be an order as the switches of this version send it.", None)
