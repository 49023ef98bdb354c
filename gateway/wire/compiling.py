"""Compiling the grammars of requests: a few at a time, one of each tenant, so that slow ones hold up nobody else."""

from __future__ import annotations

import math

import anyio
import anyio.to_thread

from penstock.engine.text.grammar import CompiledGrammar
from penstock.engine.text.grammar_check import MOST_AT_ONCE
from penstock.engine.text.grammars import GrammarError, Grammars, TooManyGrammars
from penstock.gateway.errors import invalid, refused
from penstock.gateway.off_loop import FairSemaphore
from penstock.gateway.wire.structured import Form

_PATIENCE_S = 10.0
_RETRY_AFTER_S = 5.0


class Compiling:
    """Compiles the grammars of one service; for the event loop's thread."""

    def __init__(self, grammars: Grammars, patience_s: float = _PATIENCE_S) -> None:
        """No grammar waits for its turn for longer than `patience_s`."""
        self._grammars = grammars
        self._patience_s = patience_s
        self._turns = FairSemaphore(MOST_AT_ONCE, num_each=1)
        self._threads = anyio.CapacityLimiter(MOST_AT_ONCE)

    async def compile(self, tenant: str, form: Form) -> CompiledGrammar:
        """Returns the compiled grammar of a form, for this tenant's requests.

        Raises:
            ApiError: 400 that names the field, if it is none that an answer can be held to; 503, if too many wait or
                are in use.
        """
        if (compiled := self._grammars.find(tenant, form.grammar)) is not None:
            return compiled
        try:
            with anyio.fail_after(self._patience_s) as waiting:
                async with self._turns.of(tenant):
                    waiting.deadline = math.inf
                    return await anyio.to_thread.run_sync(
                        self._grammars.compile, tenant, form.grammar, limiter=self._threads
                    )
        except TimeoutError:
            why = (
                f"Too many new grammars are being compiled; that of '{form.field}' had to wait for too long."
            )
        except TooManyGrammars:
            why = f"Too many different grammars are in use; that of '{form.field}' has to wait until others are not."
        except GrammarError as error:
            raise invalid(f"Invalid '{form.field}': {error}.", form.field, "invalid_grammar") from None
        raise refused(why, "grammars_busy", _RETRY_AFTER_S, tenant_limit=False)
