"""llama.cpp's API: the writer of completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from penstock.engine.planning.request import FinishReason, TokenLogprobs
from penstock.gateway.wire.frames import ReplyWriter, StreamedChoice
from penstock.gateway.wire.llama.bodies import LlamaBody
from penstock.gateway.wire.logprobs import TokenName, logprob_entry
from penstock.gateway.wire.writing import ANSWERED, Delta, Head, Outputs, Reply, Whole

_SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold", "seed"),
    *("presence_penalty", "frequency_penalty", "ignore_eos"),
)
"""The settings that have the same name in the engine."""


class LlamaWriter(ReplyWriter[StreamedChoice]):
    """The `gateway.wire.writing.Writer` of a reply to `/completion` or `/infill`."""

    def __init__(self, head: Head, body: LlamaBody, tokens: TokenName, context_length: int) -> None:
        self._head = head
        self._body = body
        self._tokens = tokens
        self._context_length = context_length

    # Streamed

    def text(self, index: int, text: str) -> list[bytes]:
        return [_frame({"index": index, "content": text, "tokens": [], "stop": False})]

    def more(self, reply: Reply, index: int, delta: Delta) -> list[bytes]:
        if delta.finish_reason in ANSWERED:
            return [_frame(self._choice(reply, index, delta))]
        if delta.ended:
            return []
        part = {"index": index, "content": delta.text, "tokens": delta.token_ids, "stop": False}
        return [_frame(part | self._probabilities(delta))]

    # Whole

    def whole(self, reply: Reply, outputs: Outputs) -> Whole:
        """Returns a choice, or an iterator of several."""
        choices = [self._choice(reply, index, delta) for index, delta in outputs]
        return choices[0] if len(choices) == 1 else iter(choices)

    def _choice(self, reply: Reply, index: int, delta: Delta) -> dict[str, object]:
        is_word, prompt = delta.stop is not None, self._body.prompt
        members: dict[str, object] = {
            "index": index,
            "content": delta.text,
            "tokens": delta.token_ids if self._body.return_tokens else [],
            "id_slot": index,
            "stop": True,
            "model": self._head.model,
            "tokens_predicted": reply.num_output_tokens,
            "tokens_evaluated": reply.num_prompt_tokens,
            "generation_settings": self._settings(reply),
            "prompt": prompt if isinstance(prompt, str) else "",
            "has_new_line": "\n" in delta.text,
            "truncated": False,
            "stop_type": "word" if is_word else _STOP_TYPES.get(delta.finish_reason, "none"),
            "stopping_word": delta.stop or "",
            "tokens_cached": reply.num_cached_tokens,
            "timings": _timings(reply),
            **self._probabilities(delta),
        }
        return _fields(members, self._body.response_fields) if self._body.response_fields else members

    def _settings(self, reply: Reply) -> dict[str, object]:
        sampling = reply.requests[0].sampling
        return {
            "n_ctx": self._context_length,
            "n_predict": sampling.max_tokens,
            "repeat_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "watermark": sampling.watermark is not None,
            **{name: getattr(sampling, name) for name in _SETTINGS},
        }

    def _probabilities(self, delta: Delta) -> dict[str, object]:
        if not self._body.logprobs:
            return {}
        pairs = zip(delta.token_ids, delta.logprobs, strict=False)
        shown = [self._probability(token_id, logprobs) for token_id, logprobs in pairs if logprobs]
        return {"completion_probabilities": shown}

    def _probability(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, object]:
        chosen = logprob_entry(self._tokens, token_id, logprobs, self._body.logprobs or 0)
        ids = [other for other, _ in logprobs.top]
        top = [{"id": id, **one} for id, one in zip(ids, chosen["top_logprobs"], strict=False)]
        return {"id": token_id, **chosen, "top_logprobs": top}


_STOP_TYPES: Mapping[FinishReason | None, str] = {FinishReason.STOP: "eos", FinishReason.LENGTH: "limit"}


def _timings(reply: Reply) -> dict[str, object]:
    """Returns the times of a reply under llama.cpp's names; they are those of its first choice."""
    first = min(reply.timings, key=lambda timings: timings.first_token_s)
    cached = max(0, reply.num_cached_tokens)
    prompt_s, predicted_s = first.first_token_s - first.scheduled_s, first.finished_s - first.first_token_s
    return {
        "cache_n": cached,
        **_pace("prompt", reply.num_prompt_tokens - cached, prompt_s),
        **_pace("predicted", reply.num_output_tokens, predicted_s),
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
    members: dict[str, object] = {}
    for path in paths:
        at: object = values
        for name in path.split("/"):
            at = at.get(name) if isinstance(at, Mapping) else None
        if at is not None:
            members[path] = at
    return members


def _frame(values: object) -> bytes:
    return f"data: {json.dumps(values)}\n\n".encode("ascii")
