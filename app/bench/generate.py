"""The baseline: transformers' `generate`, one request after another, in a process of its own (app/bench/job.py)."""

from __future__ import annotations

import time


def measure(model: str, prompts: list[list[int]], num_output_tokens: int, threads: int) -> list[float]:
    """Seconds of each request: greedy, float32, everything else as transformers has it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def run(prompt: list[int], length: int) -> float:
        ids = torch.tensor([prompt])
        started = time.perf_counter()
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - started
        assert output.shape[1] == len(prompt) + length
        return seconds

    run(prompts[0], 4)
    return [run(prompt, num_output_tokens) for prompt in prompts]
