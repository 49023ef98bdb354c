"""llama.cpp's API: the writer of completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.engine.planning.request import FinishReason, TokenLogprobs
from penstock.gateway.http.connections import EVENT_STREAM
from penstock.gateway.http.errors import ApiError
from penstock.gateway.wire.frames import KEEPALIVE, error_frame
from penstock.gateway.wire.llama.bodies import LlamaBody
from penstock.gateway.wire.shapes import TokenText, chosen_logprob
from penstock.gateway.wire.streams import Delta, Generation

_SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold", "seed"),
    *("presence_penalty", "frequency_penalty", "ignore_eos"),
)
"""The settings that have the same name in the engine."""


class CompletionWriter:
    """The `gateway.wire.streams.Writer` of a reply to `/completion` or `/infill`."""

    media_type = EVENT_STREAM

    def __init__(self, body: LlamaBody, tokens: TokenText, context_length: int) -> None:
        self._body = body
        self._tokens = tokens
        self._context_length = context_length

    # Streamed

    def text(self, index: int, text: str) -> bytes:
        return _frame({"index": index, "content": text, "tokens": [], "stop": False})

    def news(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> bytes:
        frames = []
        for index, delta in deltas:
            if delta.finish_reason is None:
                part = {"index": index, "content": delta.text, "tokens": delta.token_ids, "stop": False}
                frames.append(_frame(part | self._probabilities(delta)))
            elif generation.error is None:
                frames.append(_frame(self._choice(generation, index, delta)))
        return b"".join(frames)

    def fault(self, error: ApiError) -> bytes:
        return error_frame(error)

    def keepalive(self) -> bytes:
        return KEEPALIVE

    # Whole

    def whole(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> Any:
        """Returns a choice, or an iterator of several."""
        choices = [self._choice(generation, index, delta) for index, delta in deltas]
        return choices[0] if len(choices) == 1 else iter(choices)

    def _choice(self, generation: Generation, index: int, delta: Delta) -> dict[str, object]:
        is_word, prompt = delta.stop is not None, self._body.prompt
        found: dict[str, object] = {
            "index": index,
            "content": delta.text,
            "tokens": delta.token_ids if self._body.return_tokens else [],
            "id_slot": index,
            "stop": True,
            "model": self._body.model,
            "tokens_predicted": generation.num_output_tokens,
            "tokens_evaluated": generation.num_prompt_tokens,
            "generation_settings": self._settings(generation),
            "prompt": prompt if isinstance(prompt, str) else "",
            "has_new_line": "\n" in delta.text,
            "truncated": False,
            "stop_type": "word" if is_word else _STOP_TYPES.get(delta.finish_reason, "none"),
            "stopping_word": delta.stop or "",
            "tokens_cached": generation.num_cached_tokens,
            "timings": timings_of(generation),
            **self._probabilities(delta),
        }
        return _fields(found, self._body.response_fields) if self._body.response_fields else found

    def _settings(self, generation: Generation) -> dict[str, object]:
        sampling = generation.requests[0].sampling
        return {
            "n_ctx": self._context_length,
            "n_predict": sampling.max_tokens,
            "repeat_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            **{name: getattr(sampling, name) for name in _SETTINGS},
        }

    def _probabilities(self, delta: Delta) -> dict[str, object]:
        if not self._body.logprobs:
            return {}
        pairs = zip(delta.token_ids, delta.logprobs, strict=False)
        return {"completion_probabilities": [self._probability(*pair) for pair in pairs if pair[1]]}

    def _probability(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, object]:
        assert logprobs is not None
        chosen = chosen_logprob(self._tokens, token_id, logprobs, self._body.logprobs or 0)
        ids = [other for other, _ in logprobs.top]
        top = [{"id": id, **one} for id, one in zip(ids, chosen["top_logprobs"], strict=False)]
        return {"id": token_id, **chosen, "top_logprobs": top}


_STOP_TYPES: Mapping[FinishReason | None, str] = {FinishReason.STOP: "eos", FinishReason.LENGTH: "limit"}


def timings_of(generation: Generation) -> dict[str, object]:
    """Returns the times of a generation under llama.cpp's names; they are those of its first choice."""
    first = min(generation.timings, key=lambda timings: timings.first_token_s)
    cached = max(0, generation.num_cached_tokens)
    prompt_s, predicted_s = first.first_token_s - first.scheduled_s, first.finished_s - first.first_token_s
    return {
        "cache_n": cached,
        **_pace("prompt", generation.num_prompt_tokens - cached, prompt_s),
        **_pace("predicted", generation.num_output_tokens, predicted_s),
    }


def _pace(name: str, number: int, seconds: float) -> dict[str, object]:
    milliseconds = 1000 * max(0.0, seconds)
    return {
        f"{name}_n": number,
        f"{name}_ms": round(milliseconds, 3),
        f"{name}_per_token_ms": round(milliseconds / max(1, number), 3),
        f"{name}_per_second": round(1000 * number / milliseconds, 3) if milliseconds else 0.0,
    }


def _fields(values: Mapping[str, object], paths: Sequence[str]) -> dict[str, object]:
    """Returns the values at these paths, by path; paths that are not there are left out."""
    found: dict[str, object] = {}
    for path in paths:
        at: object = values
        for name in path.split("/"):
            at = at.get(name) if isinstance(at, Mapping) else None
        if at is not None:
            found[path] = at
    return found


def _frame(values: object) -> bytes:
    return f"data: {json.dumps(values)}\n\n".encode("ascii")
