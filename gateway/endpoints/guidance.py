"""The guidance of answers: the formats in which they are read, and the grammars and budgets that bound them."""

from __future__ import annotations

from functools import partial

from penstock.engine.planning.grammar import CompiledGrammar, Grammar
from penstock.engine.planning.thinking import ThinkingBudget
from penstock.gateway.endpoints.arrivals import Arrival, Guidance
from penstock.gateway.endpoints.prompting import Prompting
from penstock.gateway.service import Service
from penstock.gateway.wire.ask import Conversation, Turn
from penstock.gateway.wire.efforts import Reasoned
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.structured import Form

_GRAMMAR_WORK = 10
"""Writing the grammar of a tool is as much work as tokenising so many times its text."""


class GuidanceMaker:
    """Makes the guidance of one service's answers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer_grammar(self, came: Arrival) -> CompiledGrammar | None:
        """Returns the grammar that answers without calls have to match; raises as Compiling does."""
        return await self._compiled(came, came.ask.form)

    async def guidance(
        self, came: Arrival, prompting: Prompting, prompt: list[int], answer: CompiledGrammar | None
    ) -> Guidance:
        """Returns the guidance of the answers to a prompt.

        An answer has to match its grammar after its reasoning, where no tool is called.

        Raises:
            ApiError: 400, if the model cannot call tools, or cannot be held to their schemas.
        """
        ask, formats = came.ask, self._service.formats
        if not isinstance(ask.input, Conversation | Turn):
            return Guidance(grammar=answer)
        reading = formats.reading(prompt, ask.tools, shows_reasoning=ask.shows_reasoning)
        grammar = await self._grammar(came, prompting, prompt, reading, answer and answer.plain)
        field = "tools" if ask.tools.tools else "response_format"
        return Guidance(
            reading=reading,
            grammar=await self._compiled(came, None if grammar is None else Form(field, grammar)),
            thinking=None if ask.reasoning is None else self._thinking(ask.reasoning, prompt, reading),
        )

    async def _compiled(self, came: Arrival, form: Form | None) -> CompiledGrammar | None:
        return None if form is None else await self._service.compiling.compile(came.tenant.name, form)

    async def _grammar(
        self, came: Arrival, prompting: Prompting, prompt: list[int], reading: Reading, answer: Grammar | None
    ) -> Grammar | None:
        """Returns the grammar of a whole reply; None if it is free."""
        use, formats = came.ask.tools, self._service.formats
        if answer is None and not (use.tools and (use.required or use.strict)):
            return None
        write = partial(formats.grammar, prompt, reading, use, answer)
        if not use.tools:
            return write()
        return await prompting.run(_GRAMMAR_WORK * use.num_chars, write)

    def _thinking(self, reasoning: Reasoned, prompt: list[int], reading: Reading) -> ThinkingBudget | None:
        prompts = self._service.prompts
        number = reasoning.budget(prompts.variables, self._service.dispatch.context_length)
        if number is None:
            return None
        return self._service.formats.budget(prompt, reading, number, prompts.around_closing)
