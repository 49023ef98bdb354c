"""Loading holds the weights and one layer: of checkpoints that are quantized, and of what --quantize makes of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine.kernels.cpu.native import NativeUnavailable, load_library

PROGRAM = """
import json, sys
from pathlib import Path
from penstock.app.bench.checkpoint import Shape
from lab.bench.checkpoints import MAKERS
from lab.bench.formats import Peak
from lab.bench.parts import load

shape = Shape("wide", hidden=512, num_layers=12, num_heads=8, num_kv_heads=4, intermediate=1536, vocabulary=1024)
beside, models = {}, []
for format, quantize in (("dense", "int8"), ("W8A8", None), ("Q4_0", None)):
    path = MAKERS[format](shape, Path(sys.argv[1]))
    peaks = []
    for _ in range(2):  # on a busy machine, what was freed is seen late
        with Peak() as peak:
            models.append(load(path, {"quantize": quantize, "keep_quantized": False}, 1))
        peaks.append(peak.bytes - peak.kept)
    beside[format] = min(peaks)
print(json.dumps(beside))
"""
LAYER_WEIGHTS = 3 * 512 * 512 + 3 * 512 * 1536


def test_loading_holds_one_layer_beside_the_weights(tmp_path: Path) -> None:
    try:
        load_library(lambda _: None)
    except NativeUnavailable:
        pytest.skip("weights stay packed with the native kernels only, and there is no compiler for them")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    beside = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for format, num_bytes in beside.items():
        # --quantize rounds from float32.
        assert num_bytes <= LAYER_WEIGHTS * (4 if format == "dense" else 2), beside


OF_EXPERTS = """
import json, sys
from pathlib import Path

import torch

from penstock.engine.config import LoadOptions
from penstock.engine.kernels.cpu.native import load_library
from penstock.engine.kernels.select import native_kernels
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.files import open_files
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import make_recipe
from penstock.engine.model.weights import load_weights
from lab.bench.formats import Peak
from penstock.app.bench.checkpoint import write_checkpoint
from lab.bench.checkpoints import A3B_30B, w4a16

path = Path(sys.argv[1])
cut = {"hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
experts = {"vocab_size": 512, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
write_checkpoint({**A3B_30B, **cut, **experts, "quantization_config": w4a16(128)}, path)
kernels, models, taken = native_kernels(load_library(print).start_team(1), torch.bfloat16), [], []
for _ in range(5):  # on a busy machine, what was freed is seen late
    with Peak() as peak:
        config = read_config(path)
        files = unstacked(open_files(path), config)
        recipe = make_recipe(config, LoadOptions(device="cpu"), files)
        models.append(load_weights(config, files, kernels, lambda *_: None, recipe))
    taken.append([peak.bytes, sum(file.stat().st_size for file in path.glob("*.safetensors"))])
print(json.dumps(min(taken)))
"""


@pytest.mark.long("memory of experts")
def test_experts_take_what_they_take_on_disk(tmp_path: Path) -> None:
    """Of a model with 4 bits, 1.1 times its size at most, beside what does not grow with it."""
    try:
        load_library(lambda _: None)
    except NativeUnavailable:
        pytest.skip("weights stay packed with the native kernels only, and there is no compiler for them")
    command = [sys.executable, "-c", OF_EXPERTS, str(tmp_path)]
    most, stored = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert stored > 20 << 20
    assert most <= 1.1 * stored + (6 << 20), (most, stored)
