"""The predictions and the speed of a model as it is served."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.app.check.texts import TEXTS
from penstock.app.errors import OperatorError
from penstock.app.offline.answers import TokenLogprob
from penstock.app.offline.llm import LLM
from penstock.app.offline.requests import Sampling

NUM_TOP = 20
"""The likeliest tokens whose probabilities are compared; what is left is one more."""
NUM_GREEDY = 32
_PROMPT = 512
_STREAM = 64
_LONG_S = 3.0

_GREEDY: Sampling = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}

Top = Sequence[tuple[int, float]]
"""Ids and log probabilities of the likeliest tokens at one place, best first."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """A model's predictions for a text."""

    kind: str
    token_ids: tuple[int, ...]
    places: list[Top]
    """The likeliest tokens after each token of the text."""
    greedy: list[int]


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a model."""

    loading_s: float
    prompt_length: int
    prompt: float
    """Tokens a second."""
    stream: float
    """Tokens a second of one stream alone."""


def read(flags: Mapping[str, str]) -> tuple[list[Predictions], Speed]:
    """Loads a model, asks it about all texts, measures it, and frees it.

    Args:
        flags: settings by name.

    Raises:
        OperatorError: it cannot be loaded, or has no room for the texts.
    """
    started = time.perf_counter()
    with _loaded(flags) as llm:
        loading_s = time.perf_counter() - started
        predictions = _predictions(llm)
        return predictions, Speed(
            loading_s, *_prompt_speed(llm, predictions), _stream_speed(llm, predictions)
        )


def ask(flags: Mapping[str, str]) -> list[Predictions]:
    """Does what `read` does, but for the measuring."""
    with _loaded(flags) as llm:
        return _predictions(llm)


@contextmanager
def _loaded(flags: Mapping[str, str]) -> Iterator[LLM]:
    settings: dict[str, Any] = dict(flags)
    try:
        with LLM(**settings) as llm:
            yield llm
    except (RuntimeError, ValueError) as error:
        raise OperatorError(str(error)) from None


def _predictions(llm: LLM) -> list[Predictions]:
    kinds = [kind for kind, texts in TEXTS.items() for _ in texts]
    prompts = [text for texts in TEXTS.values() for text in texts]
    wanted: Sampling = {
        **_GREEDY,
        "max_tokens": NUM_GREEDY,
        "logprobs": NUM_TOP,
        "prompt_logprobs": NUM_TOP,
    }
    answers = llm.generate(prompts, **wanted)
    found = []
    for kind, answer in zip(kinds, answers, strict=True):
        (choice,) = answer.choices
        places = [*(answer.prompt_logprobs or ()), *(choice.logprobs or ())[:1]]
        found.append(Predictions(kind, answer.prompt_token_ids, list(map(_top, places)), choice.token_ids))
    return found


def _top(found: TokenLogprob) -> Top:
    return [(token.token_id, token.logprob) for token in found.top]


def _prompt_speed(llm: LLM, predictions: Sequence[Predictions]) -> tuple[int, float]:
    """Returns the length of a prompt and its tokens a second; a short one determines how long another may be."""
    text = [token_id for each in predictions for token_id in each.token_ids]
    length, one_token = _PROMPT // 8, Sampling(**_GREEDY, max_tokens=1)
    for start in (3, 5):  # no block is then one that was computed before
        began = time.perf_counter()
        llm.generate([text[start : start + length]], progress=False, **one_token)
        rate = length / (time.perf_counter() - began)
        if start == 3:
            length = max(length, min(_PROMPT, int(_LONG_S * rate)))
    return length, rate


def _stream_speed(llm: LLM, predictions: Sequence[Predictions]) -> float:
    """Tokens a second after the first; random ones, as a model that repeats itself would be easy to draft for."""
    sampling: Sampling = {"temperature": 1.0, "seed": 1, "max_tokens": _STREAM, "ignore_eos": True}
    prompt = list(predictions[0].token_ids[1:])
    began, num_tokens, seconds = 0.0, 0, 0.0
    for piece in llm.stream([prompt], **sampling):
        if not began:
            began = time.perf_counter()
            continue
        num_tokens += len(piece.token_ids)
        seconds = time.perf_counter() - began
        if seconds > _LONG_S:
            break
    return num_tokens / seconds
