"""The files of the demo model and of the head that drafts for it: limits, formats, and what others make of them."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from demo import tools
from demo.batches import batch
from demo.corpus import sample
from demo.head import UNROLLED, loss_of, read_head, read_target, redrafted
from demo.score import Talker
from demo.tokenizer import (
    END,
    RESULT_END,
    RESULT_START,
    ROLES,
    SPECIAL_TOKENS,
    TOOLS_INTRODUCTION,
    Message,
    encode_conversation,
)
from demo.train import MODEL
from penstock.app.checkpoint import DEMO_MODEL
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.eagle import check_eagle, read_eagle
from penstock.engine.text.tokenizer import Tokenizer as ServedTokenizer
from penstock.gateway.wire.prompts import Prompts
from tests.few import examples

HOME = DEMO_MODEL.parent
FOLDERS = [HOME / "model", HOME / "draft"]
MODEL_FOLDER, HEAD_FOLDER = FOLDERS
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
TALK: list[Message] = [
    ("system", "Be kind."), ("user", "Hi, I'm Zoë: 2+2?\n\nPlease!"), ("assistant", "2 + 2 = 4."),
    ("user", "and then?"), ("assistant", "Once upon a time…"),
]  # fmt: skip


TOKENIZER = Tokenizer.from_file(str(HOME / "model" / "tokenizer.json"))
SERVED = ServedTokenizer.load(HOME / "model")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return TOKENIZER


@pytest.fixture(scope="module")
def chat() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(HOME / "model")


@pytest.fixture(scope="module")
def talker() -> Talker:
    return Talker(HOME / "model")


def parameters(folder: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


def test_sizes() -> None:
    model, head = map(parameters, FOLDERS)
    assert 3e6 <= model <= 12e6
    assert head <= model / 4
    assert sum(file.stat().st_size for folder in FOLDERS for file in folder.iterdir()) <= 24 * 2**20


def test_every_file_is_there_and_says_the_same() -> None:
    assert sorted(file.name for file in MODEL_FOLDER.iterdir()) == FILES
    config, generation, tokens = (json.loads((MODEL_FOLDER / FILES[n]).read_text()) for n in (0, 1, 4))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == tokens["model_max_length"] >= 2048
    assert config["eos_token_id"] == generation["eos_token_id"]
    assert config["vocab_size"] % 64 == 0
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_the_head_fits_the_model() -> None:
    target, head = read_config(MODEL_FOLDER), read_eagle(HEAD_FOLDER)
    check_eagle(target, head)
    assert head.layer.max_position == target.max_position


def test_the_head_guesses_what_the_model_says(tokenizer: Tokenizer) -> None:
    """Held-out conversations; the shares are of its first, second and third guess."""
    target = read_target(MODEL_FOLDER)
    with torch.no_grad():
        _, right = loss_of(
            read_head(HEAD_FOLDER, target), target, batch(tokenizer, sample, Random(0), 4, 512)
        )
    assert right.shape == (UNROLLED,)
    assert (right > 0.75).all(), right


def test_a_head_keeps_what_it_knows_of_tokens_that_it_still_drafts() -> None:
    target = read_target(MODEL_FOLDER)
    head = read_head(HEAD_FOLDER, target)
    kept = head.drafted[::2]
    others = torch.tensor(sorted({*kept.tolist(), *range(MODEL.vocab_size - 3, MODEL.vocab_size)}))
    again = redrafted(head, target, others)
    torch.testing.assert_close(
        again.lm_head.weight[torch.isin(others, kept)], head.lm_head.weight[::2], rtol=0, atol=0
    )
    torch.testing.assert_close(again.fc.weight, head.fc.weight)


@settings(max_examples=examples(300))
@given(text=st.text())
@example("<|user|>")
@example("".join(SPECIAL_TOKENS))
def test_any_text_round_trips(text: str) -> None:
    """As the server reads it, where a text that spells a special token is text like any other."""
    token_ids = SERVED.encode(text)
    assert not SERVED.special_ids & set(token_ids)
    assert SERVED.decode(token_ids) == text


def turns(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def test_the_template_is_the_format_of_the_training(
    chat: PreTrainedTokenizerBase, tokenizer: Tokenizer
) -> None:
    text = chat.apply_chat_template(turns(TALK), tokenize=False)
    ids, said = encode_conversation(tokenizer, TALK)
    assert chat(text, add_special_tokens=False).input_ids == ids
    taught = [number for number, is_said in zip(ids, said, strict=True) if is_said]
    assert tokenizer.decode(taught, skip_special_tokens=False) == f"2 + 2 = 4.{END}Once upon a time…{END}"


def test_a_prompt_is_the_start_of_the_conversation_it_becomes(chat: PreTrainedTokenizerBase) -> None:
    prompt = chat.apply_chat_template(turns(TALK[:-1]), tokenize=False, add_generation_prompt=True)
    whole = chat.apply_chat_template(turns(TALK), tokenize=False)
    assert prompt.endswith(ROLES["assistant"])
    assert whole == f"{prompt}{TALK[-1][1]}{END}"


def function(name: str, *parameters: str, **more: object) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}, **more}}


OFFERED = [
    function("calculator", "expression", description=" Works out a sum. "),
    function("move", "from", "to"),
    {"type": "function", "function": {"name": "clock"}},
]
CALLS = [
    {
        "id": "a",
        "type": "function",
        "function": {"name": "calculator", "arguments": {"expression": "12 + 30"}},
    },
    {"id": "b", "type": "function", "function": {"name": "clock", "arguments": {}}},
]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Zoë: 12 + 30?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS[:1]},
    {"role": "tool", "tool_call_id": "a", "content": "42\n"},
    {"role": "assistant", "content": "And the time?", "tool_calls": CALLS},
]
SYSTEM = {"role": "system", "content": " Be kind. "}


@pytest.mark.parametrize("system", [[], [SYSTEM], [{**SYSTEM, "role": "developer"}]], ids=str)
def test_tools_and_calls_are_rendered_as_transformers_renders_them(
    chat: PreTrainedTokenizerBase, system: list[dict[str, Any]]
) -> None:
    for messages in (system + CALLED[:1], system + CALLED):
        text = chat.apply_chat_template(messages, tools=OFFERED, tokenize=False, add_generation_prompt=True)
        assert Prompts(SERVED).chat(messages, tools=OFFERED) == chat(text, add_special_tokens=False).input_ids


def test_the_template_writes_tools_and_calls_as_the_corpus_does(chat: PreTrainedTokenizerBase) -> None:
    system, question, call, result = (
        (
            "system",
            f"Be kind.\n\n{TOOLS_INTRODUCTION}\ncalculator(expression): Works out a sum.\nmove(from, to)\nclock()",
        ),
        ("user", "Zoë: 12 + 30?"),
        ("assistant", tools.call("calculator", {"expression": "12 + 30"})),
        ("user", f"{RESULT_START}42{RESULT_END}"),
    )
    rendered = chat.apply_chat_template([SYSTEM, *CALLED[:3]], tools=OFFERED, tokenize=False)
    assert rendered == chat.apply_chat_template(turns([system, question, call, result]), tokenize=False)


def test_transformers_computes_what_was_trained() -> None:
    theirs = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()
    ours = read_target(MODEL_FOLDER)
    ids = torch.randint(0, MODEL.vocab_size, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(ids)), theirs(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_weights_are_half_precision_and_finite(folder: Path) -> None:
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert name == "d2t" or tensor.dtype == torch.float16
        assert torch.isfinite(tensor).all()


def test_it_tells_a_story_about_what_was_asked(talker: Talker) -> None:
    [(story, ended)] = talker.answer([[("user", "Tell me a story about a brave knight in a castle.")]])
    assert ended
    assert "knight" in story
    assert "castle" in story
    assert len(story.split()) > 80


def test_it_answers_and_stops(talker: Talker) -> None:
    questions = [
        "Hello!",
        "What is the capital of France?",
        "What is paged KV?",
        "Who was Napoleon?",
    ]
    answers = talker.answer([[("user", question)] for question in questions])
    assert all(ended for _, ended in answers)
    _, france, blocks, napoleon = (text for text, _ in answers)
    assert "Paris" in france
    assert "block" in blocks
    assert "not know" in napoleon


def test_it_calls_tools_and_answers_as_json(talker: Talker) -> None:
    offered = ("system", f"{TOOLS_INTRODUCTION}\ncalculator(expression): Works out a sum.\nclock(city)")
    asked, call = ("user", "What is 1234 + 5678?"), tools.call("calculator", {"expression": "1234 + 5678"})
    cases: list[tuple[list[Message], str]] = [
        ([offered, asked], call),
        ([offered, asked, ("assistant", call), ("user", f"{RESULT_START}6912{RESULT_END}")], "It is 6912."),
        ([offered, ("user", "What time is it in Tokyo?")], tools.call("clock", {"city": "Tokyo"})),
        ([("user", "What is the capital of France? Answer as JSON with capital.")], '{"capital": "Paris"}'),
        (
            [("user", "Rosa is 31 years old and lives in Rome. Answer as JSON.")],
            '{"name": "Rosa", "age": 31, "city": "Rome"}',
        ),
    ]
    assert talker.answer([talk for talk, _ in cases], most=80) == [(answer, True) for _, answer in cases]
