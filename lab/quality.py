"""Measures what each type of weights and of KV cache costs published models: `python -m lab.quality FILE.gguf ...`.

A row says how far a model is, as it is served on the CPU, from what transformers makes of its weights in float32: the
mean KL divergence of the next token after each token of `penstock check`'s texts, and how often the likeliest is the
same. Types of 4 bits would find the levels again that the weights of a GGUF file already have, so all rows but the
first are of the file's weights with noise.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from penstock.app import cli
from penstock.app.build import load_options
from penstock.app.check import ours, theirs
from penstock.app.check.compare import Distance, compare, total
from penstock.app.errors import OperatorError
from penstock.app.estimate import estimate
from penstock.app.log import configure_log
from penstock.app.settings import EngineSettings
from penstock.engine.model.checkpoint import read_config, read_tokenizer

Exact = Callable[[tuple[int, ...]], Tensor]
"""Log probabilities [N, vocabulary] after each of N tokens."""

_COMMON = {"device": "cpu", "num_blocks": "1024", "no_quantize_cache": "true"}


@dataclass(frozen=True, slots=True)
class Case:
    """One choice of types."""

    name: str
    flags: dict[str, str] = field(default_factory=dict)
    """Settings of `penstock serve` by name."""
    made: str | None = None
    """The options of `penstock quantize`, which makes the checkpoint; None is the one in float32."""


CASES = (
    Case("float16", {"dtype": "float16"}),
    Case("bfloat16", {"dtype": "bfloat16"}),
    Case("int8", {"quantize": "int8"}),
    Case("int4", {"quantize": "int4"}),
    Case("int4, groups of 64", {"quantize": "int4", "quantize_group_size": "64"}),
    Case("int4, groups of 128", {"quantize": "int4", "quantize_group_size": "128"}),
    Case("fp8", {"quantize": "fp8"}),
    Case("nf4, groups of 32", {"quantize": "nf4", "quantize_group_size": "32"}),
    Case("nf4, groups of 64", {"quantize": "nf4", "quantize_group_size": "64"}),
    Case("auto, KV cache int8", {"kv_dtype": "int8"}),
    Case("auto, KV cache int4", {"kv_dtype": "int4"}),
    Case("int8, KV cache int8", {"quantize": "int8", "kv_dtype": "int8"}),
    Case("int4, KV cache int8", {"quantize": "int4", "kv_dtype": "int8"}),
    Case("made: rtn, 8 bits", made="--method rtn --bits 8"),
    Case("made: rtn", made="--method rtn"),
    Case("made: awq", made="--method awq"),
    Case("made: gptq", made="--method gptq"),
    Case("made: gptq, groups of 32", made="--method gptq --group-size 32"),
)


def table(files: Sequence[Path], cases: Sequence[Case] = CASES) -> Iterator[str]:
    """The lines of a Markdown table, each as soon as it is known."""
    yield "| model | weights | KL to float32 | likeliest agrees | MiB of weights |"
    yield "|---|---|---|---|---|"
    for file in files:
        yield from _rows(file, cases)


def _rows(file: Path, cases: Sequence[Case]) -> Iterator[str]:
    network = theirs.load(file)
    exact: Exact = partial(theirs.log_probabilities, network)
    with TemporaryDirectory() as place:
        yield _row(file.stem, Case("as published"), file, exact)
        add_noise(network)
        folder = Path(place) / "float32"
        network.hf_quantizer.remove_quantization_config(network)  # what it has are floats by now
        network.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(read_tokenizer(file)._parsing.to_str(), encoding="utf-8")
        exact = cache(exact)
        for case in cases:
            try:
                yield _row(file.stem, case, _checkpoint(folder, case), exact)
            except OperatorError as error:  # rows of the model that no group divides
                yield f"| {file.stem} | {case.name} | {error} | | |"


def add_noise(network: Any) -> None:
    """Moves the weights of the linear maps by up to half a step of 4 bits in groups of 32, the same in each run."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.endswith("_proj.weight"):
                groups = weight.unflatten(1, (-1, 32))
                step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
                groups += (torch.rand(groups.shape, generator=generator) - 0.5) * step


def _checkpoint(folder: Path, case: Case) -> Path:
    """The checkpoint of a case, in place of the one that was made before; its making is told on stderr."""
    if case.made is None:
        return folder
    text, made = folder.parent / "text.txt", folder.parent / "made"
    text.write_text("\n\n".join(topics.values()), encoding="utf-8")
    options = ["--calibration", str(text), *f"--device cpu --overwrite {case.made}".split()]
    with redirect_stdout(sys.stderr):
        status = cli.main(["quantize", str(folder), str(made), *options])
    if status:
        raise SystemExit(status)
    return made


def _row(name: str, case: Case, model: Path, exact: Exact) -> str:
    flags = {**_COMMON, "model": str(model), **case.flags}
    found = distance(flags, exact)
    size = estimate(read_config(model), load_options(EngineSettings.load(flags))).weights / (1 << 20)
    agreeing = f"{found.agreeing:,} of {found.places:,}"
    return f"| {name} | {case.name} | {found.mean_kl:.6f} | {agreeing} | {size:,.1f} |"


def distance(flags: Mapping[str, str], exact: Exact) -> Distance:
    """Returns the distance of a model, loaded by these settings, from exact log probabilities, over all texts."""
    told = ours.ask(flags)
    gc.collect()
    return total(compare(replace(each, greedy=[]), exact(each.token_ids)) for each in told)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.quality", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="leave out types without TEXT in their names"
    )
    options = parser.parse_args()
    configure_log("info")
    try:
        for line in table(options.files, [case for case in CASES if options.only in case.name]):
            print(line, flush=True)
    except (OperatorError, theirs.LeftOut) as error:
        print(f"lab.quality: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
