"""`/v1/decisions` and `/v1/systemone`: one pass over an input answers all questions about it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import pairwise

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.engine.planning.prefix_index import with_hashes
from penstock.engine.planning.request import Branch, Request, SamplingParams
from penstock.gateway.endpoints.intake import Endpoints, route
from penstock.gateway.endpoints.params import Arrival, salt_of
from penstock.gateway.endpoints.prompting import Prompting
from penstock.gateway.endpoints.replies import LiveReply
from penstock.gateway.http.errors import invalid
from penstock.gateway.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.wire.decided import DecisionsWriter, SystemOneWriter
from penstock.gateway.wire.decisions import (
    Asked,
    Decisions,
    DecisionsBody,
    SystemOneBody,
    understand_decisions,
    understand_system,
)
from penstock.gateway.wire.labels import Steps, label_branches
from penstock.gateway.wire.sampling import context_exceeded
from penstock.gateway.wire.streams import Stream

_NO_END = (
    "Another answer begins with this one, and the model's configuration names no token that ends an answer."
)
_OPTION_BYTES = 64
"""The bytes whose reading is as much work as one possible answer."""


class DecisionsApi(Endpoints):
    """Decisions of one service."""

    def routes(self) -> list[Route]:
        return [route("/v1/decisions", POST=self.decide), route("/v1/systemone", POST=self.answer)]

    async def decide(self, http: HttpRequest) -> Response:
        """Answers in OpenAI's format."""
        came = await self._intake.begin(http, DecisionsBody, understand_decisions)
        return await self._reply(came, DecisionsWriter)

    async def answer(self, http: HttpRequest) -> Response:
        """Answers in TypeSafe's format."""
        came = await self._intake.begin(http, SystemOneBody, understand_system)
        return await self._reply(came, SystemOneWriter)

    async def _reply(
        self, came: Arrival[Decisions], writer: type[DecisionsWriter | SystemOneWriter]
    ) -> LiveReply:
        """Returns the reply; raises 400, 404, 429 or 503, whatever the request meets on its way."""
        asked = came.body
        urgency = self._intake.admit(came, asked.body)
        prompt, branches, steps = await self._branches(
            asked, self._intake.prompting(came.tenant, urgency.lane)
        )
        request = Request(
            request_id=f"dec-{secrets.token_hex(16)}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=0),
            n=len(branches),
            arrival_s=came.at_s,
            lane=urgency.lane,
            ttft_s=urgency.ttft_s,
            tenant=came.tenant.name,
            salt=salt_of(came.tenant),
            branches=branches,
        )
        request = await off_loop(TOKEN_BYTES * request.num_prompt_tokens, self._checked, request, asked)
        stream = Stream([request], await self._intake.reserve(came.client, [request]))
        return LiveReply(self._service, stream, writer(asked.body.model, asked.questions, steps))

    async def _branches(
        self, asked: Decisions, prompting: Prompting
    ) -> tuple[Sequence[int], tuple[Branch, ...], list[list[Steps]]]:
        """The tokens that all questions have in common, the branches after them, and the steps of all labels."""
        shared, rests = await prompting.branched(asked)
        closing = self._service.formats.closing([*shared, *rests[0]])
        rests = [rest + closing for rest in rests]
        if len(rests) == 1:
            shared, rests = shared + rests[0], [[]]
        questions, ends = list(zip(asked.questions, rests, strict=True)), self._service.options.eos_token_ids

        def branches() -> tuple[tuple[Branch, ...], list[list[Steps]]]:
            labels = [self._labels(question) for question, _ in questions]
            self._check_number(sum(len(label) - 1 for own in labels for label in own), asked)
            return label_branches(
                [(rest, own) for (_, rest), own in zip(questions, labels, strict=True)], ends
            )

        options = [option for question in asked.questions for option in question.options]
        num_chars = sum(len(option.label) for option in options)
        self._check_number(
            num_chars // self._service.options.limits.max_bytes_per_token - len(options), asked
        )
        return shared, *await prompting.run(num_chars + _OPTION_BYTES * len(options), branches)

    def _check_number(self, num_tokens: int, asked: Decisions) -> None:
        """Raises 400 for too many questions and tokens of answers, of which those after each first one count."""
        most = self._service.options.limits.max_branches
        if len(asked.questions) + num_tokens > most:
            message = (
                f"The questions, and the tokens of their answers after each first one, may be at most {most}."
            )
            raise invalid(message, "questions")

    def _labels(self, question: Asked) -> list[list[int]]:
        """
        Raises:
            ApiError: 400, if the tokens of two answers are the same, or one has none; or if one begins with another,
                and the model has no token to end an answer with.
        """
        labels = [self._service.tokenizer.encode(option.label) for option in question.options]
        seen: set[tuple[int, ...]] = {()}
        for number, label in enumerate(map(tuple, labels)):
            if label in seen:
                message = "The model's tokenizer cannot tell this answer from another one, or from none."
                raise invalid(message, question.option_field(number))
            seen.add(label)
        if not self._service.options.eos_token_ids:
            ordered = sorted((tuple(label), number) for number, label in enumerate(labels))
            for (label, number), (longer, _) in pairwise(ordered):
                if longer[: len(label)] == label:
                    raise invalid(_NO_END, question.option_field(number))
        return labels

    def _checked(self, request: Request, asked: Decisions) -> Request:
        """The request with the hashes of its prompt; raises 400 if it does not fit into the context."""
        lengths = [len(request.prompt_token_ids)]
        for branch in request.branches[1:]:
            lengths.append(lengths[branch.parent] + len(branch.token_ids))
        context_length = self._service.dispatch.context_length
        if max(lengths) >= context_length:
            raise context_exceeded(context_length, f"{max(lengths)} tokens", asked.field)
        known = self._service.vocab_size
        given = (request.prompt_token_ids, *(branch.token_ids for branch in request.branches))
        scored = (branch.candidates for branch in request.branches)
        if any(max(tokens, default=0) >= known for tokens in (*given, *scored)):
            raise invalid("The request has tokens that the model does not know.", asked.field)
        return with_hashes(request, self._service.options.block_size)
