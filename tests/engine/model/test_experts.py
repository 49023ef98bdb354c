"""Models with experts against transformers: both forms on disk, what is wrong with one, runs, quantized experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.memory import weight_bytes
from penstock.engine.fields import Fields
from penstock.engine.kernels import select
from penstock.engine.kernels.cpu import native
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.drafts import DraftSource
from penstock.engine.model.files import open_files
from penstock.engine.model.parse import parse_config, read_config
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import check_tensors
from penstock.engine.program.interpreter import Interpreter
from penstock.engine.spec import Experts, Mlp, Stack
from tests.engine.driver import Driver
from tests.engine.families import SPARSE, TINY
from tests.engine.model.test_transformer import logits_of, make_batch, oracle_logits
from tests.engine.rounding_noise import largest
from tests.engine.test_family_runs import check_greedy, prompt, request

TOKEN_IDS = [7 * i % 390 + 3 for i in range(90)]
OPTIONS = LoadOptions(device="cpu", dtype="float32", num_blocks=64, num_threads=2)


def load(folder: Path, **changes: Any) -> LoadedModel:
    return load_model(folder, replace(OPTIONS, **changes), lambda _: None, lambda *_: None)


def in_chunks(model: LoadedModel) -> Tensor:
    first = logits_of(model, make_batch([(TOKEN_IDS[:37], 0)]))
    return torch.cat([first, logits_of(model, make_batch([(TOKEN_IDS, 37)]))])


def check_logits(found: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 0.1, "the model says something"
    assert largest(found - expected) <= 1e-4 * max(1.0, float(expected.abs().max()))


def experts_of(config: ModelConfig, layer: int = 0) -> Experts:
    own = config.layers[layer].feed_forward
    assert isinstance(own, Experts)
    return own


def stacked(folder: Path, *stacks: Stack) -> Path:
    """Writes the experts of a checkpoint anew, those of each layer as stacks; by default transformers' own."""
    config = read_config(folder)
    tensors = load_file(folder / "model.safetensors")
    for number, layer in enumerate(config.layers):
        if isinstance(own := layer.feed_forward, Experts):
            prefix = f"model.layers.{number}."
            for stack in stacks or (own.stacks[0], own.stacks[-1]):
                experts = [
                    [tensors.pop(f"{prefix}{own.prefix}.{expert}.{map}.weight") for map in stack.maps]
                    for expert in own.own
                ]
                joined = torch.stack(
                    [
                        torch.stack(e, 1).flatten(0, 1) if stack.is_interleaved else torch.cat(e)
                        for e in experts
                    ]
                )
                tensors[f"{prefix}{stack.name}"] = (joined.mT if stack.is_transposed else joined).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def refuse(model: ModelConfig, limits: LoadOptions) -> NoReturn:
    raise native.NativeUnavailable(f"none for {model.architecture} with {limits.block_size}")


def one_by_one(folder: Path) -> Path:
    """Writes the experts of a checkpoint anew, each tensor by its own name."""
    files = unstacked(open_files(folder), read_config(folder))
    tensors = {name: files.read(name).clone().contiguous() for name in files.entries}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def in_the_other_form(folder: Path) -> Path:
    files = open_files(folder)
    return stacked(folder) if unstacked(files, read_config(folder)) is files else one_by_one(folder)


@pytest.mark.parametrize("family", SPARSE)
def test_logits_are_those_of_transformers_in_both_forms_on_disk(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = SPARSE[family].make(tmp_path)
    expected = oracle_logits(path, TOKEN_IDS)
    found = in_chunks(load(path))
    check_logits(found, expected)
    with monkeypatch.context() as patched:
        patched.setattr(select, "check_native", refuse)
        plain = load(path)
    assert isinstance(plain.decoder, Interpreter)
    check_logits(in_chunks(plain), expected)
    assert torch.equal(in_chunks(load(in_the_other_form(path))), found)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_stacks_are_read_as_they_lie(is_interleaved: bool, is_transposed: bool, tmp_path: Path) -> None:
    path = SPARSE["Qwen 3 MoE"].make(tmp_path)
    config = read_config(path)
    before = open_files(path)
    names = [name for name in before.entries if ".experts." in name]
    expected = {name: before.read(name).clone() for name in names}
    stacks = (
        Stack("mlp.experts.gate_up_proj", ("gate_proj", "up_proj"), is_interleaved, is_transposed),
        Stack("mlp.experts.down_proj", ("down_proj",), False, is_transposed),
    )
    layers = tuple(
        layer.with_feed_forward(stacks=stacks) if isinstance(layer.feed_forward, Experts) else layer
        for layer in config.layers
    )
    config = replace(config, spec=replace(config.spec, layers=layers))
    files = unstacked(open_files(stacked(path, *stacks)), config)
    check_tensors(config, files)
    for name in names:
        assert torch.equal(files.read(name), expected[name])
        assert files.entries[name].num_bytes == expected[name].nbytes


def test_files_without_stacks_are_what_they_were(tmp_path: Path) -> None:
    path = SPARSE["Mixtral"].make(tmp_path)
    files = open_files(path)
    assert unstacked(files, read_config(path)) is files


def test_layers_are_dense_where_the_config_says_so(tmp_path: Path) -> None:
    path = SPARSE["Qwen 3 MoE"].make(
        tmp_path, num_hidden_layers=4, mlp_only_layers=[3], decoder_sparse_step=2
    )
    kinds = [type(layer.feed_forward) for layer in read_config(path).layers]
    assert kinds == [Mlp, Experts, Mlp, Mlp]
    check_logits(in_chunks(load(path)), oracle_logits(path, TOKEN_IDS))


@pytest.mark.parametrize("family", SPARSE)
def test_a_token_has_the_same_bits_in_any_company(family: str, tmp_path: Path) -> None:
    """Alone in a step, among others of its own chunk, and beside other sequences, whatever experts these choose."""
    folder = SPARSE[family].make(tmp_path)
    others = [[(13 * i + length) % 390 + 3 for i in range(length)] for length in (45, 29)]
    for dtype in ("float32", "bfloat16"):
        model = load(folder, dtype=dtype, num_blocks=256)
        assert model.kernels.team is not None
        first = logits_of(model, make_batch([(others[0], 0), (TOKEN_IDS[:60], 0), (others[1][:1], 0)]))
        last = logits_of(model, make_batch([(others[0], 44), (TOKEN_IDS[:70], 60), (others[1], 1)]))
        rows = [logits_of(model, make_batch([(TOKEN_IDS[: n + 1], n)])) for n in range(70)]
        assert torch.equal(torch.cat(rows), torch.cat([first[45:105], last[1:11]])), dtype


def test_a_dense_draft_runs_as_its_target_does(tmp_path: Path) -> None:
    folder = SPARSE["Mixtral"].make(tmp_path / "target")
    dense = TINY["Qwen 3"].make(tmp_path / "draft")
    driver = Driver(folder, num_blocks=128, draft=DraftSource(dense))
    driver.run(request("short"))
    check_greedy(folder, (prompt("short"), driver.tokens("short")))
    model = load_model(folder, OPTIONS, lambda _: None, lambda *_: None, DraftSource(dense))
    assert model.draft is not None
    assert model.draft.kernels.name == model.kernels.name


@pytest.mark.parametrize("family", SPARSE)
def test_experts_are_quantized_at_load(family: str, tmp_path: Path) -> None:
    """An expert that is chosen in place of another one, for a rounding, tells more than roundings do."""
    path = SPARSE[family].make(tmp_path, intermediate_size=128)
    exact = in_chunks(load(path))
    eight, four = (
        float((in_chunks(load(path, quantize=bits)) - exact).norm() / exact.norm())
        for bits in ("int8", "int4")
    )
    assert 0 < eight < four < 1.4
    assert eight < 0.5


def test_the_plan_counts_every_expert(tmp_path: Path) -> None:
    path = SPARSE["Mixtral"].make(tmp_path)
    kernels = reference_kernels(torch.device("cpu"), torch.float32)
    tensors = load_file(path / "model.safetensors").values()
    assert weight_bytes(read_config(path), kernels) == sum(tensor.nbytes for tensor in tensors)


def broken(folder: Path, name: str, made: Tensor | None) -> str:
    """What is said of a checkpoint of which a tensor is missing or another one."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file({**tensors, **({} if made is None else {name: made})}, file, {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return str(caught.value)


def test_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    path = SPARSE["Qwen 3 MoE"].make(tmp_path)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    said = broken(path, name, torch.zeros(31, 64))
    assert said.endswith(
        f"{name} has shape [31, 64], and config.json says [32, 64] (the intermediate size of experts, hidden_size)"
    )
    said = broken(path, name, None)
    assert said.endswith(f"tensor {name} is missing; config.json says 8 experts")


def test_a_stack_of_another_shape_is_named(tmp_path: Path) -> None:
    path = stacked(SPARSE["Qwen 3 MoE"].make(tmp_path))
    name = "model.layers.2.mlp.experts.gate_up_proj"
    assert broken(path, name, torch.zeros(7, 64, 64)).endswith(
        f"{name} has shape [7, 64, 64], and config.json says 8 experts of 2 maps each"
    )
    assert "8 experts of 2 maps each" in broken(path, name, torch.zeros(8, 63, 64))
    assert f"{name} of expert 0 has shape [30, 64]" in broken(path, name, torch.zeros(8, 60, 64))
    assert "experts.0.gate_proj.weight is missing; config.json says 8 experts" in broken(path, name, None)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("Mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, and there are 5 experts"),
        ("Mixtral", {"num_local_experts": 0}, "num_local_experts must be between 1 and"),
        ("GLM-4.5", {"n_group": 3}, "n_group is 3 and topk_group 2: 8 experts do not lie in such groups"),
        ("GLM-4.5", {"topk_group": 5}, "n_group is 4 and topk_group 5"),
        ("GLM-4.5", {"topk_group": 1}, "or a token cannot have 3 of them"),
        ("GLM-4.5", {"topk_method": "greedy"}, "topk_method greedy is not supported; only noaux_tc is"),
        ("GLM-4.5", {"scoring_func": "softmax"}, "scoring_func softmax is not supported; only sigmoid is"),
        ("Llama 4", {"scoring_func": "softmax"}, "scoring_func softmax is not supported; only sigmoid is"),
        ("Llama 4", {"no_rope_layers": [1, 1]}, "no_rope_layers does not have an entry for each layer"),
        ("Llama 4", {"attention_chunk_size": 0}, "attention_chunk_size must be between 1 and"),
        (
            "Llama 4",
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types sliding_attention is not supported",
        ),
        ("gpt-oss", {"swiglu_limit": -1.0}, "swiglu_limit must be greater than 0"),
        ("gpt-oss", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ("MiniMax M2", {"scoring_func": "sqrt"}, "scoring_func sqrt is not supported; only sigmoid is"),
        ("ERNIE 4.5 MoE", {"moe_gate_act": "sigmoid"}, "moe_gate_act sigmoid is not supported"),
        ("ERNIE 4.5 MoE", {"moe_num_experts": [6, 6]}, "moe_num_experts must be a whole number"),
        ("Hunyuan MoE", {"moe_topk": [2, 2]}, "moe_topk has 2 entries for 3 layers"),
        ("Hunyuan MoE", {"moe_topk": [2, 7, 2]}, "is 7, and there are 6 experts"),
        ("Hunyuan MoE", {"use_cla": True}, "use_cla is not supported"),
        ("Hunyuan MoE", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5 is not supported in this"),
        ("Qwen 3 MoE", {"n_group": 8}, "n_group 8 is not supported in this family"),
        ("Mixtral", {"topk_group": [2]}, r"topk_group \[2\] is not supported in this family"),
        ("OLMoE", {"clip_qkv": 8.0}, "clip_qkv is not supported"),
        ("Qwen 3 MoE", {"decoder_sparse_step": 0}, "decoder_sparse_step must be between 1 and"),
    ],
)
def test_what_is_refused(family: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = SPARSE[family].make(tmp_path)
    entries: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(CheckpointError, match=said):
        parse_config(Fields("config.json", {**entries, **changes}))


def test_published_checkpoints_may_say_it_otherwise(tmp_path: Path) -> None:
    """MiniMax counts the dimensions that are rotated, and Hunyuan has an entry for each layer."""
    minimax, hunyuan = tmp_path / "minimax", tmp_path / "hunyuan"
    entries: dict[str, Any] = json.loads(
        (SPARSE["MiniMax M2"].make(minimax) / "config.json").read_text(encoding="utf-8")
    )
    del entries["rope_parameters"]
    published = {"rotary_dim": 12, "rope_theta": 1e4, "scoring_func": "sigmoid"}
    assert parse_config(Fields("config.json", {**entries, **published})) == read_config(minimax)
    entries = json.loads((SPARSE["Hunyuan MoE"].make(hunyuan) / "config.json").read_text(encoding="utf-8"))
    layers = {"moe_topk": [2] * 3, "moe_intermediate_size": [112] * 3, "num_shared_expert": [1] * 3}
    nothing = {"n_group": False, "topk_group": False, "routed_scaling_factor": 1.0}
    assert parse_config(Fields("config.json", {**entries, **layers, **nothing})) == read_config(hunyuan)


@pytest.mark.parametrize(
    ("family", "left_out", "published"),
    [
        ("gpt-oss", (), {}),
        ("Llama 4", ("layer_types",), {"no_rope_layers": [], "attn_temperature_tuning": 4}),
    ],
)
def test_older_configs_say_the_same(
    family: str, left_out: tuple[str, ...], published: dict[str, Any], tmp_path: Path
) -> None:
    path = SPARSE[family].make(tmp_path)
    entries: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    rope = entries.pop("rope_parameters")
    old = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, **published}
    others = {name: entry for name, entry in entries.items() if name not in left_out}
    assert parse_config(Fields("config.json", {**others, **old})) == read_config(path)


def test_the_names_of_published_checkpoints_are_read(tmp_path: Path) -> None:
    """They call the number of experts `num_experts`, which transformers 5 writes as `num_local_experts`."""
    path = SPARSE["Qwen 3 MoE"].make(tmp_path)
    entries: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    entries["num_experts"] = entries.pop("num_local_experts")
    assert parse_config(Fields("config.json", entries)) == read_config(path)
    assert experts_of(read_config(path)).router.num_experts == 8
