"""Experts of GGUF files: their weights are those of the `gguf` library, and logits are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.memory import weight_bytes
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.files import open_files
from penstock.engine.model.gguf import container
from penstock.engine.model.gguf.kinds import KINDS
from penstock.engine.model.gguf.names import Names
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import check_tensors, layer_specs, make_recipe
from tests.engine.families import SPARSE, TINY
from tests.engine.gguf_files import same, write_family, write_file
from tests.engine.model.test_expert_formats import load, loaded
from tests.engine.model.test_experts import TOKEN_IDS, check_logits, in_chunks
from tests.engine.model.test_transformer import oracle_logits

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "mlp_only_layers": [],
    "num_experts": 3,
    "num_experts_per_tok": 2,
}
"""Rows of whole blocks of 256."""
UNSAID: dict[str, dict[str, Any]] = {
    "Llama 4": {"attention_chunk_size": 8192, "floor_scale": 8192},
    "gpt-oss": {"swiglu_limit": 7.0},
}
"""What files do not say, for llama.cpp has it in its code."""
OF_LATENTS: dict[str, Any] = {"kv_lora_rank": 64, "qk_nope_head_dim": 32}
"""Rows of whole blocks, where a family has latents."""
TYPES = list(container.SUPPORTED)


def dequantised(path: Path) -> dict[str, Tensor]:
    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(path).tensors
    }


def like_files(type: str) -> Any:
    """Routers and biases are in floating point, as the converter leaves them, and here what K and V are made with."""
    floats = ("ffn_gate_inp", "attn_k_b", "attn_v_b", "bias")
    return lambda name: "F32" if any(part in name for part in floats) else type


def rounded(name: str, tensor: Tensor, kind: Type, *, is_transposed: bool) -> Tensor:
    """The weights that blocks of a type stand for, which are along the inputs of a linear map."""
    if tensor.dim() == 1 or any(
        part in name for part in ("gate.weight", "router", "e_score", "bias", "kv_b_proj")
    ):
        return tensor
    rows = tensor.mT if is_transposed else tensor
    blocks = gguf.quants.quantize(rows.contiguous().numpy(), kind)
    made = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    return made.mT.contiguous() if is_transposed else made


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_logits_are_those_of_transformers(family: str, type: str, tmp_path: Path) -> None:
    sizes = OF_LATENTS if "kv_lora_rank" in SPARSE[family].entries else UNSAID.get(family, {})
    folder = SPARSE[family].make(tmp_path, **sizes, intermediate_size=128, mlp_only_layers=[])
    file, kind = folder / "model.safetensors", Type[type]
    stacked = family in ("gpt-oss", "Llama 4")
    tensors = {
        name: rounded(name, tensor, kind, is_transposed=stacked and tensor.dim() == 3)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    path = write_family(folder, tmp_path / "model.gguf", like_files(type))
    expected = oracle_logits(folder, TOKEN_IDS)
    found = in_chunks(load(path))
    if type == "F32":
        check_logits(found, expected)
    for own, wanted in zip(read_config(path).attentions, read_config(folder).attentions, strict=True):
        assert own.reach == wanted.reach
        assert (own.temperature or ()) == pytest.approx(wanted.temperature or ())
    for found_maps, wanted_maps in zip(loaded(path), loaded(folder), strict=True):
        assert [None if part is None else part.tolist() for part in found_maps] == [
            None if part is None else part.tolist() for part in wanted_maps
        ]


def mixed(name: str) -> str:
    """Gates and ups of types of their own, which are multiplied together."""
    found = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q6_K", "ffn_down_exps": "IQ4_XS"}
    return next((type for part, type in found.items() if part in name), "F32")


@pytest.mark.parametrize("types", [*map(like_files, TYPES), mixed], ids=[*TYPES, "mixed"])
def test_experts_are_those_of_the_library(types: Any, tmp_path: Path) -> None:
    folder = SPARSE["Qwen 3 MoE"].make(tmp_path, **WIDE)
    path = write_family(folder, tmp_path / "model.gguf", types)
    expected = dequantised(path)
    gate, up, down = (expected[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    found = [weight for weight, _ in loaded(path)]
    assert len(found) == 7
    assert torch.equal(found[0], expected["blk.0.ffn_gate_inp.weight"])
    for number in range(3):
        torch.testing.assert_close(found[1 + number], torch.cat([gate[number], up[number]]))
        torch.testing.assert_close(found[4 + number], down[number])


def test_experts_are_as_narrow_as_their_file(tmp_path: Path) -> None:
    folder = SPARSE["Qwen 3 MoE"].make(tmp_path, **WIDE)
    for type in ("Q4_K", "Q8_0", "MXFP4", "IQ4_XS"):
        path = write_family(folder, tmp_path / "model.gguf", like_files(type))
        config, files = read_config(path), open_files(path)
        recipe = make_recipe(config, LoadOptions(device="cpu"), unstacked(files, config))
        experts = [spec for spec in layer_specs(config, recipe) if ".experts." in spec.parts[0].name]
        taken = sum(
            spec.format.num_bytes(spec.out_features, spec.in_features, torch.bfloat16) for spec in experts
        )
        stored = sum(entry.num_bytes for name, entry in files.entries.items() if ".experts." in name)
        assert len(experts) == 6
        assert taken <= 1.07 * stored
        assert weight_bytes(config, reference_kernels(torch.device("cpu"), torch.float32), recipe) > taken


def rewritten(path: Path, change: Any, **entries: Any) -> Path:
    """The same file with other tensors."""
    reader = gguf.GGUFReader(path)
    arrays = {tensor.name: tensor.data for tensor in reader.tensors}
    change(arrays)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    other = path.with_name(f"{path.stem}-changed.gguf")
    write_file(other, {**fields, **entries}, arrays, same("F32"))
    return other


def one_by_one(arrays: dict[str, Any]) -> None:
    for name in [name for name in arrays if "_exps" in name]:
        for number, expert in enumerate(arrays.pop(name)):
            arrays[name.replace("_exps", f".{number}")] = expert


def fused(arrays: dict[str, Any]) -> None:
    for name in [name for name in arrays if "ffn_gate_exps" in name]:
        gates, ups = (
            torch.from_numpy(arrays.pop(each).copy()) for each in (name, name.replace("gate", "up"))
        )
        arrays[name.replace("gate", "gate_up")] = torch.cat([gates, ups], 1).numpy()


@pytest.mark.parametrize("change", [one_by_one, fused])
def test_both_other_forms_are_read(change: Any, tmp_path: Path) -> None:
    """Files of 2023 have a tensor for each expert, and newer ones may have gates and ups in one."""
    path = write_family(SPARSE["Mixtral"].make(tmp_path), tmp_path / "model.gguf")
    expected = in_chunks(load(path))
    assert torch.equal(in_chunks(load(rewritten(path, change))), expected)


def checked(path: Path) -> None:
    config = read_config(path)
    check_tensors(config, unstacked(open_files(path), config))


def refused(path: Path, change: Any = lambda _: None, **entries: Any) -> str:
    other = rewritten(path, change, **{name.replace("__", "."): value for name, value in entries.items()})
    with pytest.raises(CheckpointError) as caught:
        checked(other)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_wrong_is_named_as_the_file_has_it(tmp_path: Path) -> None:
    path = write_family(SPARSE["Mixtral"].make(tmp_path, num_hidden_layers=1), tmp_path / "model.gguf")

    def cut(arrays: dict[str, Any]) -> None:
        arrays["blk.0.ffn_up_exps.weight"] = arrays["blk.0.ffn_up_exps.weight"][:4]

    def narrow(arrays: dict[str, Any]) -> None:
        arrays["blk.0.ffn_up_exps.weight"] = arrays["blk.0.ffn_up_exps.weight"][:, 1:]

    missing = refused(path, lambda arrays: arrays.pop("blk.0.ffn_down_exps.weight"))
    assert missing.endswith("tensor blk.0.ffn_down_exps.weight is missing; the metadata says 5 experts")
    assert "blk.0.ffn_up_exps.weight has shape [4, 112, 64], and the metadata says 5 experts" in refused(
        path, cut
    )
    assert "blk.0.ffn_up_exps.weight of expert 0 has shape [111, 64], and the metadata says" in refused(
        path, narrow
    )
    one = refused(rewritten(path, one_by_one), lambda arrays: arrays.pop("blk.0.ffn_up.2.weight"))
    assert "blk.0.ffn_up_exps.weight is missing" in one
    assert refused(path, llama__expert_gating_func=2).endswith(
        "llama.expert_gating_func 2 is not supported; only 1 is"
    )
    assert refused(path, llama__expert_used_count=9).endswith(
        "num_experts_per_tok is 9, and there are 5 experts (num_local_experts)"
    )


def test_experts_where_none_are_known_are_refused(tmp_path: Path) -> None:
    path = write_family(TINY["Qwen 3"].make(tmp_path), tmp_path / "model.gguf", qwen3__expert_count=8)
    with pytest.raises(
        CheckpointError, match=r"qwen3\.expert_count: mixtures of experts are not supported for qwen3"
    ):
        read_config(path)


def test_every_kind_with_experts_or_states_has_a_name_of_its_own_for_each_tensor() -> None:
    """All that the `gguf` library calls a tensor of these kinds is known, but for what is no part of a decoder."""
    unknown = ("rope_freqs", "attn_rot_embd", "nextn", "attn_sinks", "exp_probs_b", "ffn_latent", "dense_2")
    ends = {"ssm_a": "", "ssm_d": "", "ssm_dt": ".bias"}
    for name, kind in KINDS.items():
        architecture = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
        names, seen = Names(kind), set()
        for tensor in gguf.MODEL_TENSORS[architecture]:
            bare = gguf.TENSOR_NAMES[tensor].format(bid=3)
            own = bare + ends.get(bare.removeprefix("blk.3."), ".weight")
            if (kind.sparse or kind.has_states) and not any(part in own for part in unknown):
                found = names.engine_name(own)
                assert found is not None, own
                assert found not in seen
                seen.add(found)
                assert names.ggml_name(found) == own
