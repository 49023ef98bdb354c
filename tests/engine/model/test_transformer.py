"""The decoder against transformers, the oracle, on random checkpoints, over every kernel table of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.native import NativeUnavailable, load_library
from penstock.engine.program.rotary import inverse_frequencies
from penstock.engine.spec import Rope
from tests.engine.checkpoints import FAMILIES, make_checkpoint
from tests.engine.configs import spread
from tests.engine.rounding_noise import error_of, largest

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_scaling": None}),
    "llama, tied, one head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, linear rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": None}),
    "mistral, window of 1": ("mistral", {"sliding_window": 1}),
    "qwen2, window above": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3, window by type": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
        },
    ),
}
TABLES = ("torch", "native", *(["triton"] if torch.cuda.is_available() else []))
NUM_TOKENS = 90


@dataclass(frozen=True)
class Oracle:
    """A checkpoint, and transformers' logits for one sequence of it."""

    path: Path
    token_ids: list[int]
    expected: Tensor
    error: float
    """The largest difference of any logit between two decoders in float32."""


class Case:
    """An oracle, and the decoder under test."""

    def __init__(self, oracle: Oracle, table: str) -> None:
        self.token_ids, self.expected, self.error = oracle.token_ids, oracle.expected, oracle.error
        self.model = load(oracle.path, table)

    def check(self, logits: Tensor, start: int, end: int) -> None:
        assert logits.shape == (end - start, 512)
        assert largest(logits.cpu() - self.expected[start:end]) <= self.error

    def decode(self, batch: Batch) -> Tensor:
        return logits_of(self.model, batch)


def logits_of(model: LoadedModel, batch: Batch) -> Tensor:
    with torch.inference_mode():
        return model.lm_head(model.decoder(spread(batch, model.kv.layout).to(model.device)))


def load(path: Path, table: str) -> LoadedModel:
    """Blocks of 16 tokens are what the native table asks for; with others it steps aside."""
    options = LoadOptions(
        device=device_of(table),
        dtype="float32",
        block_size=16 if table == "native" else 8,
        num_blocks=256,
        num_threads=2,
    )
    model = load_model(path, options, lambda _: None, lambda *_: None)
    assert model.kernels.name == table
    return model


def device_of(table: str) -> str:
    return "cuda" if table == "triton" else "cpu"


def oracle_logits(path: Path, token_ids: list[int]) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@pytest.mark.parametrize("table", TABLES)
def test_a_pass_hands_out_the_last_hidden_states(tmp_path: Path, table: str) -> None:
    model = load(make_checkpoint("qwen3", tmp_path), table)
    token_ids = [7 * i % 390 for i in range(40)]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0]
        found = model.decoder(make_batch([(token_ids, 0)]).to(model.device))
    assert found.shape == expected.shape
    assert largest(found.cpu() - expected) <= error_of(tmp_path, token_ids, hidden=True)


def make_batch(parts: list[tuple[list[int], int]], first_block: int = 1) -> Batch:
    """(known tokens, those of them that are computed) of each sequence; sequence s has the s-th dozen of blocks."""
    starts = [0]
    for known, computed in parts:
        starts.append(starts[-1] + len(known) - computed)
    width = 12
    tables = [[first_block + s * width + i for i in range(width)] for s in range(len(parts))]
    return Batch(
        token_ids=int32([token_id for known, computed in parts for token_id in known[computed:]]),
        positions=int32([p for known, computed in parts for p in range(computed, len(known))]),
        query_starts=int32(starts),
        context_lens=int32([len(known) for known, _ in parts]),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        sample_rows=torch.arange(starts[-1], dtype=torch.int32),
    )


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(scope="module", params=TABLES)
def table(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        try:
            load_library(lambda _: None)
        except NativeUnavailable as error:
            pytest.skip(str(error))
    return str(request.param)


@pytest.fixture(scope="module", params=VARIANTS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    family, overrides = VARIANTS[request.param]
    path = make_checkpoint(family, tmp_path_factory.mktemp("model"), **overrides)
    token_ids = torch.randint(0, 512, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    return Oracle(path, token_ids, oracle_logits(path, token_ids), error_of(path, token_ids))


@pytest.fixture(scope="module")
def case(oracle: Oracle, table: str) -> Iterator[Case]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Case(oracle, table)
    torch.set_num_threads(threads)


def test_logits_are_those_of_transformers(case: Case) -> None:
    case.check(case.decode(make_batch([(case.token_ids, 0)])), 0, NUM_TOKENS)


@pytest.mark.parametrize("size", [7, 33])
def test_a_prompt_in_chunks_is_the_prompt_in_one_piece(case: Case, size: int) -> None:
    for start in range(0, NUM_TOKENS, size):
        end = min(start + size, NUM_TOKENS)
        case.check(case.decode(make_batch([(case.token_ids[:end], start)])), start, end)


def test_sequences_of_one_batch_do_not_see_each_other(case: Case) -> None:
    """A prompt, a decode, a chunk, and a prompt again, of different sequences in one step."""
    cuts = [(40, 0), (61, 60), (90, 30), (3, 0)]
    tokens = case.token_ids
    for s, (_, computed) in enumerate(cuts):
        if computed:
            case.decode(make_batch([(tokens[:computed], 0)], first_block=1 + 12 * s))
    logits = case.decode(make_batch([(tokens[:known], computed) for known, computed in cuts]))
    first = 0
    for known, computed in cuts:
        case.check(logits[first : first + known - computed], computed, known)
        first += known - computed


def test_only_the_rows_asked_for_come_back(case: Case) -> None:
    batch = make_batch([(case.token_ids, 0)])
    batch.sample_rows = int32([89, 3])
    assert largest(case.decode(batch).cpu() - case.expected[[89, 3]]) <= case.error
    batch.sample_rows = int32([])
    assert case.decode(batch).shape == (0, 512)
    batch.sample_rows = int32(list(reversed(range(NUM_TOKENS))))
    assert largest(case.decode(batch).cpu() - case.expected.flip(0)) <= case.error


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights_bring_about_the_same_logits(table: str, dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, dtype=dtype)
    block_size = 16 if table == "native" else 8
    model = load_model(
        path,
        LoadOptions(device=device_of(table), block_size=block_size, num_blocks=16, num_threads=2),
        lambda _: None,
        lambda *_: None,
    )
    token_ids = list(range(40))
    logits = logits_of(model, make_batch([(token_ids, 0)])).cpu()
    kernels = model.kernels
    error = error_of(path, token_ids, kernels.kv_dtype, kernels.activation_dtype)
    assert largest(logits.float() - oracle_logits(path, token_ids)) <= error


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize(("low", "high", "factor"), [(1.0, 4.0, 8.0), (1.0, 4.0, 32.0), (2.0, 3.0, 2.0)])
def test_llama3_frequencies_are_those_of_transformers(
    theta: float, low: float, high: float, factor: float
) -> None:
    rope = {"rope_theta": theta, "rope_type": "llama3", "factor": factor, "low_freq_factor": low}
    rope |= {"high_freq_factor": high, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=rope)
    expected, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    ours = Rope(
        theta=theta,
        scaling="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=8192,
    )
    assert torch.equal(inverse_frequencies(ours, 128), expected)
