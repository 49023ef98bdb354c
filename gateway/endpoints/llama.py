"""llama.cpp's own API: completions, its editors' fill-in-the-middle, templates, and what it says of the server."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.endpoints.answering import ModelEndpoints
from penstock.gateway.endpoints.intake import Arrival
from penstock.gateway.endpoints.operation import ANY, BY_PROMPT, STREAMED, serves
from penstock.gateway.endpoints.requests import Made
from penstock.gateway.http.json_response import Json
from penstock.gateway.reply.generation import Generation
from penstock.gateway.wire.llama.bodies import InfillBody, LlamaBody, TemplateBody
from penstock.gateway.wire.llama.replies import LlamaWriter
from penstock.gateway.wire.writing import Head


class LlamaApi(ModelEndpoints):
    """The llama.cpp API of one service."""

    @serves("POST /completion", BY_PROMPT, LlamaBody, answers=STREAMED, json_types=("object", "array"))
    async def complete(self, http: HttpRequest) -> Response:
        """Continue texts, for llama.cpp's clients."""
        return await self._answer(http, LlamaBody, self._writer, prefix="cmpl-")

    @serves("POST /infill", BY_PROMPT, InfillBody, answers=STREAMED, json_types=("object", "array"))
    async def fill(self, http: HttpRequest) -> Response:
        """Fill in the text between two others, for llama.cpp's clients."""
        return await self._answer(http, InfillBody, self._writer, prefix="cmpl-")

    def _writer(self, head: Head, came: Arrival, _: Made) -> LlamaWriter:
        return LlamaWriter(head, came.body, self._service.tokenizer, self._service.dispatch.context_length)

    @serves("POST /apply-template", ANY, TemplateBody, statuses=(404, 429))
    async def apply(self, http: HttpRequest) -> Response:
        """Give the text of a conversation.

        What the tokenizer puts before every text is left out.
        """
        came, [prompt], headers = await self._intake.counted_prompts(http, TemplateBody)
        spell = partial(self._spelt, prompt)
        text = await self._intake.prompting(came.tenant).run(len(prompt), spell)
        return Json({"prompt": text}, headers=headers)

    def _spelt(self, prompt: list[int]) -> str:
        tokenizer = self._service.tokenizer
        first = tokenizer.encode("", add_special=True)[:1]
        return tokenizer.decode(prompt[len(first) if prompt[:1] == first else 0 :], skip_special=False)

    # The server

    @serves("GET /props", ANY)
    async def props(self, http: HttpRequest) -> Response:
        """Say what llama.cpp's clients ask of a server."""
        self._intake.client(http)
        tokenizer, options = self._service.tokenizer, self._service.options
        defaults = options.defaults
        params = {
            "temperature": defaults.temperature,
            "top_k": defaults.top_k,
            "top_p": defaults.top_p,
            "min_p": defaults.min_p,
            "repeat_penalty": defaults.repetition_penalty,
            "n_predict": -1,
            "seed": -1,
        }
        return Json(
            {
                "default_generation_settings": {
                    "n_ctx": self._service.dispatch.context_length,
                    "params": params,
                },
                "total_slots": self._service.engine_stats().max_num_seqs,
                "model_alias": options.models[0],
                "model_path": options.models[0],
                "modalities": {"vision": False, "audio": False, "video": False},
                "chat_template": tokenizer.chat_template or "",
                "bos_token": tokenizer.special_tokens.get("bos_token", ""),
                "eos_token": tokenizer.special_tokens.get("eos_token", ""),
                "build_info": f"penstock-{version('penstock')}",
                "is_sleeping": False,
                "endpoint_slots": True,
                "endpoint_props": False,
                "endpoint_metrics": not options.metrics_elsewhere,
            }
        )

    @serves("GET /slots", ANY, json_types=("array",))
    async def slots(self, http: HttpRequest) -> Response:
        """List the caller's generations, as llama.cpp does.

        An operator's key is shown all of them, and seats without one.
        """
        client = self._intake.client(http)
        shown = [
            generation
            for generation in self._service.dispatch
            if client.is_operator or generation.requests[0].tenant == client.tenant.name
        ]
        num_free = max(0, self._service.engine_stats().max_num_seqs - len(shown))
        seats: list[Generation | None] = [*shown, *[None] * num_free]
        return Json([self._slot(i, generation) for i, generation in enumerate(seats)])

    def _slot(self, number: int, generation: Generation | None) -> dict[str, object]:
        slot: dict[str, object] = {
            "id": number,
            "n_ctx": self._service.dispatch.context_length,
            "speculative": False,
            "is_processing": generation is not None,
        }
        if generation is not None:
            slot |= {
                "n_prompt_tokens": generation.num_prompt_tokens,
                "next_token": [{"n_decoded": generation.num_output_tokens}],
            }
        return slot
