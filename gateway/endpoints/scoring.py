"""Requests whose one pass over an input scores the answers of all questions about it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from penstock.engine.planning.prefix_index import with_hashes
from penstock.engine.planning.request import Branch, Request
from penstock.gateway.endpoints.intake import Arrival
from penstock.gateway.endpoints.prompting import Prompting
from penstock.gateway.endpoints.requests import NO_OUTPUT, RequestMaker
from penstock.gateway.errors import invalid
from penstock.gateway.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.service import Service
from penstock.gateway.wire.labels import Steps, label_branches
from penstock.gateway.wire.questions import Question, Questions
from penstock.gateway.wire.sampling import context_exceeded

_NO_END = (
    "Another answer begins with this one, and the model's configuration names no token that ends an answer."
)
_OPTION_BYTES = 64
"""The bytes whose reading is as much work as one possible answer."""

Branches = tuple[tuple[Branch, ...], list[list[Steps]]]


class Scoring:
    """Makes the requests of one service's questions."""

    def __init__(self, service: Service, maker: RequestMaker) -> None:
        self._service = service
        self._maker = maker

    async def request(
        self, came: Arrival, asked: Questions, prompting: Prompting, reply_id: str
    ) -> tuple[Request, list[list[Steps]]]:
        """Returns the request of all questions, and the steps of each question's labels; raises 400 as it meets it."""
        prompt, rests = await self._prompt(came, asked, prompting)
        branches, steps = await self._branches(asked.questions, rests, prompting)
        request = self._maker.request(
            came, reply_id, prompt, sampling=NO_OUTPUT, n=len(branches), branches=branches
        )
        size = TOKEN_BYTES * request.num_prompt_tokens
        return await off_loop(size, self._checked, request, came.ask.field), steps

    async def _prompt(
        self, came: Arrival, asked: Questions, prompting: Prompting
    ) -> tuple[list[int], list[list[int]]]:
        """Returns the tokens that all questions share, and the further ones of each up to its answer."""
        shared, rests = await prompting.branched(asked, came.ask.field)
        closing = self._service.formats.closing([*shared, *rests[0]])
        rests = [rest + closing for rest in rests]
        return (shared + rests[0], [[]]) if len(rests) == 1 else (shared, rests)

    async def _branches(
        self, questions: Sequence[Question], rests: list[list[int]], prompting: Prompting
    ) -> Branches:
        ends = self._service.options.eos_token_ids

        def branches() -> Branches:
            labels = [self._labels(question) for question in questions]
            self._check_number(len(questions), sum(len(label) - 1 for own in labels for label in own))
            return label_branches(list(zip(rests, labels, strict=True)), ends)

        options = [option for question in questions for option in question.options]
        num_chars = sum(len(option.label) for option in options)
        least = num_chars // self._service.options.limits.max_bytes_per_token - len(options)
        self._check_number(len(questions), least)
        return await prompting.run(num_chars + _OPTION_BYTES * len(options), branches)

    def _check_number(self, num_questions: int, num_tokens: int) -> None:
        """Raises 400 for too many questions and tokens of answers, of which those after each first one count."""
        most = self._service.options.limits.max_branches
        if num_questions + num_tokens > most:
            message = (
                f"The questions, and the tokens of their answers after each first one, may be at most {most}."
            )
            raise invalid(message, "questions")

    def _labels(self, question: Question) -> list[list[int]]:
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

    def _checked(self, request: Request, field: str) -> Request:
        """Returns the request with the hashes of its prompt; raises 400 if it does not fit into the context."""
        lengths = [len(request.prompt_token_ids)]
        for branch in request.branches[1:]:
            lengths.append(lengths[branch.parent] + len(branch.token_ids))
        context_length = self._service.dispatch.context_length
        if max(lengths) >= context_length:
            raise context_exceeded(context_length, f"{max(lengths)} tokens", field)
        given = (request.prompt_token_ids, *(branch.token_ids for branch in request.branches))
        scored = (branch.candidates for branch in request.branches)
        if any(max(tokens, default=0) >= self._service.vocab_size for tokens in (*given, *scored)):
            raise invalid("The request has tokens that the model does not know.", field)
        return with_hashes(request, self._service.options.block_size)
