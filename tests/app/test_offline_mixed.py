"""`LLM` under a mixed load: an answer is the one that it is alone, whatever becomes of those who share its steps."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from penstock.app.offline.answers import Choice
from penstock.app.offline.llm import LLM
from penstock.app.offline.requests import Sampling
from penstock.engine.planning.lookup import Lookup
from tests.engine.fake_runner import drafting_always
from tests.few import examples

STEMS = [
    "Once upon a time",
    "The old bear",
    "Paris is",
    "the cat sat on the mat, the cat sat on",
    "1 2 3 4 5 6 7",
]
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["age"],
    "additionalProperties": False,
}
SOMETIMES: list[Callable[[random.Random], Sampling]] = [
    lambda pace: {"top_p": pace.choice([0.5, 0.9])},
    lambda pace: {"top_k": pace.choice([1, 5, 40])},
    lambda pace: {"min_p": pace.choice([0.05, 0.2])},
    lambda pace: {"typical_p": pace.choice([0.5, 0.8])},
    lambda pace: {"frequency_penalty": pace.uniform(-1, 1)},
    lambda pace: {"presence_penalty": pace.uniform(-1, 1)},
    lambda pace: {"repetition_penalty": pace.uniform(1, 1.5)},
    lambda pace: {"n": pace.randint(2, 4)},
    lambda pace: {"logprobs": pace.randint(0, 5)},
    lambda pace: {"stop": pace.sample([" the", ".", ",", "and", "\n"], 2)},
    lambda _: {"ignore_eos": True},
    lambda pace: {"logit_bias": {pace.randrange(500): pace.choice([-100, 5])}},
    lambda _: {"bad_words": ["the", "a"]},
    lambda _: {"structured_outputs": {"json": AGE}},
]


def asked(pace: random.Random) -> tuple[str, Sampling]:
    prompt = " ".join(pace.choice(STEMS) for _ in range(pace.choice([1, 2, 8])))
    if pace.random() < 0.1:
        return prompt, {"use_beam_search": True, "n": 3, "max_tokens": pace.randint(2, 12)}
    sampling: Sampling = {
        "max_tokens": pace.randint(1, 60),
        "seed": pace.randrange(100),
        "temperature": pace.choice([0, 0.7, 1.0, 1.5]),
    }
    for some in pace.sample(SOMETIMES, pace.randint(0, 3)):
        sampling.update(some(pace))
    return prompt, sampling


def test_an_answer_is_the_same_alone_and_among_others() -> None:
    """Where there may be drafts, there are."""
    pace = random.Random(1)
    requests = [asked(pace) for _ in range(examples(60))]
    llm = LLM(progress=False, num_blocks=48, max_num_seqs=8)

    def answer(number: int) -> list[Choice]:
        prompt, sampling = requests[number]
        return llm.generate(prompt, **sampling)[0].choices

    def go(number: int, num_read: int) -> None:
        """With `num_read`, it is cancelled after so many pieces."""
        if not num_read:
            together[number] = answer(number)
            return
        prompt, sampling = requests[number]
        for _, _ in zip(range(num_read), llm.stream(prompt, **sampling), strict=False):
            pass

    alone = [answer(number) for number in range(len(requests))]
    scheduler = llm._engine._scheduler
    assert scheduler is not None
    scheduler.drafting = drafting_always(Lookup(), 3)
    together: dict[int, list[Choice]] = {}
    order = [(number, pace.choice([0, 0, 0, pace.randint(1, 20)])) for number in range(len(requests))]
    pace.shuffle(order)
    threads = [threading.Thread(target=go, args=one) for one in order]
    for thread in threads:
        thread.start()
        if pace.random() < 0.3:
            llm.generate("x", max_tokens=pace.randint(1, 5))
    for thread in threads:
        thread.join()
    llm.generate("x", max_tokens=1)
    llm.close()
    assert together == {number: alone[number] for number, num_read in order if not num_read}
    stats = llm._engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
