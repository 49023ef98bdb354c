"""Measures what a watermark costs in perplexity, and in how long a text it is found: `python -m lab.watermark`.

Each row is of answers to the same questions by the same seeds. Their perplexity is that of the model without the
watermark: log probabilities are of untouched logits. They are scored as `penstock watermark detect` scores them: their
texts are tokenised again, and cut after some tokens, or put one after another.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

from penstock.app.arguments import count, listed, not_negative, positive
from penstock.app.bench.workloads import story_question
from penstock.app.offline.answers import Choice
from penstock.app.offline.llm import LLM
from penstock.engine.text.watermark import GAMMA, Watermark, evidence

_KEY = 0x5EED_0F_A_3A5C_1E55
LENGTHS = (50, 100, 200)
"""Tokens of a text that are scored."""
LIMIT = 1e-4
"""The p-value below which a text counts as found."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The answers of one row."""

    choices: Sequence[Choice]
    token_ids: Sequence[Sequence[int]]
    """Of their texts."""

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def perplexity(self) -> float:
        found = [one.logprob for choice in self.choices for one in choice.logprobs or ()]
        return math.exp(-math.fsum(found) / len(found))


def answered(llm: LLM, watermark: Watermark | None, num_texts: int, temperature: float) -> Texts:
    """Returns answers of at most the longest length."""
    questions = [story_question(random.Random(seed)) for seed in range(num_texts)]
    requests = [
        replace(request, sampling=replace(request.sampling, watermark=watermark, seed=seed))
        for seed, question in enumerate(questions)
        for request in llm._requests.of_conversations(
            [[{"role": "user", "content": question}]],
            {"max_tokens": max(LENGTHS), "temperature": temperature, "logprobs": True},
        )
    ]
    choices = [answer.choices[0] for answer in llm._answers(requests, progress=False)]
    encode = llm._core.model.tokenizer.encode
    return Texts(choices, [encode(choice.text) for choice in choices])


def table(
    llm: LLM, deltas: Sequence[float], gamma: float, num_texts: int, temperature: float = 1.0
) -> Iterator[str]:
    """The lines of a Markdown table, each as soon as it is known."""
    lengths = " | ".join(f"{length} tokens: z, found" for length in LENGTHS)
    yield f"| delta | tokens | perplexity | {lengths} | all texts: pairs, z |"
    yield "|---" * (4 + len(LENGTHS)) + "|"
    for delta in deltas:
        mark = Watermark(key=_KEY, gamma=gamma, delta=delta)
        texts = answered(llm, mark if delta else None, num_texts, temperature)
        cells = [f"{delta:g}", f"{texts.num_tokens:,}", f"{texts.perplexity:.3f}"]
        cells += [_scores(texts, mark, length) for length in LENGTHS]
        together = evidence([*chain(*texts.token_ids)], mark)
        yield f"| {' | '.join(cells)} | {together.num_scored:,}, {together.z:.1f} |"


def _scores(texts: Texts, mark: Watermark, length: int) -> str:
    """The median z of the texts that are so long, and how many of them are found."""
    found = [evidence(ids[:length], mark) for ids in texts.token_ids if len(ids) >= 0.9 * length]
    if not found:
        return "-"
    num_found = sum(one.p_value < LIMIT for one in found)
    return f"{median(one.z for one in found):.1f}, {num_found} of {len(found)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.watermark", description=__doc__)
    parser.add_argument("--model", help="by default, the demo model")
    parser.add_argument("--deltas", type=listed(not_negative), default=[0.0, 1.0, 2.0, 4.0], metavar="N,...")
    parser.add_argument("--gamma", type=not_negative, default=GAMMA)
    parser.add_argument("--temperature", type=positive, default=1.0)
    parser.add_argument("--texts", type=count, default=200, metavar="N")
    options = parser.parse_args()
    with LLM(options.model, progress=False) as llm:
        for line in table(llm, options.deltas, options.gamma, options.texts, options.temperature):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
