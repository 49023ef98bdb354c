"""`penstock quantize` of experts: read back by Penstock, and by transformers once it stands in floating point."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.config import LoadOptions
from penstock.engine.model import quantizing
from penstock.engine.model.files import open_files
from penstock.engine.model.parse import read_config
from penstock.engine.model.quantizing import Scheme, layer_bytes, left_out, quantize
from penstock.engine.model.tensors import layer_specs, make_recipe
from tests.engine.families import SPARSE
from tests.engine.model.test_expert_formats import loaded
from tests.engine.model.test_experts import experts_of, stacked
from tests.engine.model.test_quantizing import CPU, perplexity, texts

ONE_BY_ONE = ("Qwen 3 MoE", "Qwen 2 MoE", "Mixtral", "OLMoE", "MiniMax M2")
"""Families whose experts transformers reads one by one, in all layers."""
SIZES: dict[str, Any] = {"intermediate_size": 64, "moe_intermediate_size": 48, "num_hidden_layers": 2}


def made(folder: Path, out: Path, scheme: Scheme) -> tuple[float, float]:
    out.mkdir()
    outcome = quantize(folder, out / "model.safetensors", scheme, texts(), CPU)
    config = json.loads((folder / "config.json").read_text())
    ours = read_config(folder)
    config["quantization_config"] = scheme.config(ours.num_layers, left_out(ours, open_files(folder)))
    (out / "config.json").write_text(json.dumps(config))
    assert outcome.before is not None
    assert outcome.after is not None
    return outcome.before, outcome.after


def as_floats(folder: Path, made: Path, out: Path) -> Path:
    """Writes what a quantized checkpoint stands for."""
    config, files = read_config(made), open_files(made)
    tensors = load_file(made / "model.safetensors")
    for spec in layer_specs(config, make_recipe(config, LoadOptions(device="cpu"), files)):
        for part in spec.parts:
            stored = list(part.storage.tensors(part.rows, spec.in_features))
            own = {one.suffix: tensors.pop(f"{part.name}.{one.suffix}") for one in stored}
            format = part.storage.format(part.rows, spec.in_features)
            tensors[f"{part.name}.weight"] = format.unpack(part.storage.repack(own)).contiguous()
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    copyfile(folder / "config.json", out / "config.json")
    return out


@pytest.mark.parametrize("method", quantizing.METHODS)
@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_experts_are_calibrated(family: str, method: str, tmp_path: Path) -> None:
    """The perplexities are those of transformers with the weights as they were, and as Penstock reads what was made."""
    folder = SPARSE[family].make(tmp_path / "float", **SIZES)
    out = tmp_path / "made"
    before, after = made(folder, out, Scheme(method=method, group_size=16))
    assert before == pytest.approx(perplexity(folder, texts()), rel=1e-3)
    found, floats = list(loaded(out)), list(loaded(folder))
    experts = len(experts_of(read_config(folder), 0).own)
    for number, ((weight, _), (wanted, _)) in enumerate(zip(found, floats, strict=True)):
        is_router = number % (1 + 2 * experts) == 0
        assert torch.equal(weight, wanted) if is_router else not torch.equal(weight, wanted)
    assert after == pytest.approx(perplexity(as_floats(folder, out, tmp_path / "dense"), texts()), rel=1e-3)


def test_a_bias_of_choice_is_copied_as_it_is(tmp_path: Path) -> None:
    """That of ERNIE has an axis more than is read of it."""
    folder = SPARSE["ERNIE 4.5 MoE"].make(tmp_path / "float", num_hidden_layers=2)
    made(folder, tmp_path / "made", Scheme(method="rtn", group_size=16))
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    first, second = (load_file(tmp_path / f / "model.safetensors")[name] for f in ("float", "made"))
    assert torch.equal(first, second)


def test_an_expert_that_few_tokens_chose_is_rounded_to_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SPARSE["Mixtral"].make(tmp_path / "float", **SIZES)
    weights = {}
    for name, method, fewest in (("rtn", "rtn", 32), ("few", "gptq", 1 << 30), ("many", "gptq", 32)):
        monkeypatch.setattr(quantizing, "_FEWEST_ROWS", fewest)
        made(folder, tmp_path / name, Scheme(method=method, group_size=16, num_wide_layers=0))
        weights[name] = [weight for weight, _ in loaded(tmp_path / name)]
    assert all(map(torch.equal, weights["rtn"], weights["few"]))
    assert sum(map(torch.equal, weights["rtn"], weights["many"])) == 2, "the routers"


def test_stacked_experts_are_written_one_by_one(tmp_path: Path) -> None:
    folder, scheme = SPARSE["OLMoE"].make(tmp_path / "float", **SIZES), Scheme(method="gptq", group_size=16)
    made(folder, tmp_path / "first", scheme)
    made(stacked(folder), tmp_path / "second", scheme)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_a_layer_of_experts_has_one_hessian_of_theirs_at_a_time(tmp_path: Path) -> None:
    config = read_config(SPARSE["Mixtral"].make(tmp_path, **SIZES))
    hidden, inner, kv = 64, 64, 32
    weights = 5 * 3 * hidden * inner + 5 * hidden + 2 * hidden * (hidden + kv)
    assert layer_bytes(config) == 4 * (weights + 4 * hidden**2 + inner**2)
