"""`penstock quantize`: makes a compressed-tensors checkpoint of 4 or 8 bits from one in floating point."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from penstock.app.calibration import PIECE_TOKENS, make_texts
from penstock.app.checkpoint import DEMO_NAME, asked_for, find_checkpoint
from penstock.app.cli import EXIT_INTERRUPTED
from penstock.app.errors import OperatorError
from penstock.app.log import configure_log, progress_bar
from penstock.engine.config import GROUP_SIZES, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.model.parse import read_config
from penstock.engine.model.texts import Outcome, Text, Texts

if TYPE_CHECKING:
    from penstock.engine.model.quantizing import Scheme

METHODS = ("gptq", "awq", "rtn")
_ROW = "row"
_MIB = 1 << 20

_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""The suffixes of what goes along as it is: tokenizer, chat template, generation config."""
_LICENCES = ("LICENSE", "LICENCE", "NOTICE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"a directory, a Hugging Face id, or {DEMO_NAME}")
    parser.add_argument("--revision", help="a commit, a tag or a branch on the hub; default: the newest")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to create")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="gptq",
        help="gptq (default) and awq take activations into account; rtn rounds every weight to the nearest level",
    )
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="bits of a weight; default: 4")
    sizes = "|".join(str(size) for size in GROUP_SIZES)
    parser.add_argument(
        "--group-size",
        metavar=f"{sizes}|{_ROW}",
        help=f"inputs of a row that share a scale; default: 64 for 4 bits (or 32 where rows need it), {_ROW} for 8",
    )
    parser.add_argument(
        "--asymmetric",
        action="store_true",
        help="4 bits with a zero point per scale: slightly better, but fewer programs read it",
    )
    parser.add_argument(
        "--act-order", action="store_true", help="gptq: round the inputs with the largest activations first"
    )
    parser.add_argument(
        "--wide-layers",
        type=int,
        default=1,
        metavar="N",
        help="with 4 bits, keep the first N layers at 8, because all later ones read what they write; default: 1",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help='text like what the model will see, plain or JSON lines with "text"; the demo model has its own',
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        default=32_768,
        metavar="N",
        help="most tokens to use, in pieces of %(const)s; a quarter as many more are held out to measure perplexity; "
        "default: 32768".replace("%(const)s", str(PIECE_TOKENS)),
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a checkpoint")


def run(options: argparse.Namespace) -> int:
    configure_log("info")
    try:
        with _terminations_as_interrupts():
            _quantize(options)
    except KeyboardInterrupt:
        print("penstock: interrupted; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    except CheckpointError as error:
        raise OperatorError(str(error)) from None
    return 0


def _quantize(options: argparse.Namespace) -> None:
    folder = find_checkpoint(asked_for(options.model), options.revision, argument="MODEL")
    if folder.is_file():
        raise OperatorError(
            f"{folder} is a GGUF file: `penstock serve` takes it as it is; quantize the checkpoint it was made from"
        )
    out = options.out.expanduser()
    _check_out(out, folder, options.overwrite)
    config = read_config(folder)
    import torch

    from penstock.engine.model.dtype import choose_device
    from penstock.engine.model.quantizing import check, quantize

    scheme = _scheme(options, config)
    check(folder, scheme)
    device = choose_device(options.device)
    texts = make_texts(
        folder, config, options.calibration, options.calibration_tokens, is_needed=scheme.method != "rtn"
    )
    _say_scheme(scheme, config, texts, str(device))
    with _beside(out) as made, progress_bar("quantizing") as show:
        try:
            outcome = quantize(folder, made / "model.safetensors", scheme, texts, device, show)
            _write_config(folder, made, scheme, config)
            _copy_others(folder, made)
        except (OSError, torch.OutOfMemoryError) as error:
            raise OperatorError(f"{out}: {error}") from None
        size = (made / "model.safetensors").stat().st_size
        _put_in_place(made, out, options.overwrite)
    _say_outcome(outcome, out, size, sum(path.stat().st_size for path in folder.glob("*.safetensors")))


def _check_out(out: Path, folder: Path, overwrite: bool) -> None:
    """
    Raises:
        OperatorError: OUT cannot be made, or is there and may not be replaced.
    """
    if not out.parent.is_dir():
        raise OperatorError(f"OUT {out}: there is no directory {out.parent}")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OperatorError(f"OUT {out} is there, and no directory")
    if not out.exists() or not any(out.iterdir()):
        return
    if out.resolve() == folder.resolve():
        raise OperatorError(f"OUT {out} is MODEL itself")
    if not overwrite:
        raise OperatorError(f"OUT {out} is there already; --overwrite replaces it")
    if not (out / "config.json").is_file():
        raise OperatorError(f"OUT {out} is no checkpoint, it has no config.json, and is not replaced")


def _scheme(options: argparse.Namespace, config: ModelConfig) -> Scheme:
    from penstock.engine.model.quantizing import Scheme

    if options.wide_layers < 0:
        raise OperatorError(f"--wide-layers must not be negative, and is {options.wide_layers}")
    if options.act_order and options.method != "gptq":
        raise OperatorError(f"--act-order is for --method gptq, not {options.method}")
    return Scheme(
        method=options.method,
        bits=options.bits,
        group_size=_group_size(options, config),
        symmetric=not options.asymmetric or options.bits == 8,
        by_activation=options.act_order,
        num_wide_layers=options.wide_layers,
    )


def _group_size(options: argparse.Namespace, config: ModelConfig) -> int | None:
    """The number of inputs that was asked for, or the default; None is a row."""
    from penstock.engine.model.quantizing import largest_group

    given = options.group_size
    if given is None and options.bits == 8:
        return None
    if given is None:
        return largest_group(config)
    if given == _ROW:
        return None
    if given not in map(str, GROUP_SIZES):
        raise OperatorError(
            f"--group-size must be {', '.join(map(str, GROUP_SIZES))} or {_ROW}, and is {given}"
        )
    return int(given)


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """Yields a new folder next to `out`, removed at the end if it still exists."""
    folder = out.parent / f".{out.name}.{os.getpid()}.partial"
    try:
        try:
            folder.mkdir()
        except OSError as error:
            raise OperatorError(f"OUT {out}: {error.strerror}") from None
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _terminations_as_interrupts() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does, so that it leaves nothing behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_config(folder: Path, made: Path, scheme: Scheme, config: ModelConfig) -> None:
    from penstock.engine.model.files import open_files
    from penstock.engine.model.quantizing import left_out

    entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    entries["quantization_config"] = scheme.config(config.num_layers, left_out(config, open_files(folder)))
    (made / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def _copy_others(folder: Path, made: Path) -> None:
    for path in sorted(folder.iterdir()):
        goes_along = path.suffix in _COPIED or path.name.startswith(_LICENCES)
        if path.is_file() and goes_along and path.name != "config.json" and ".index." not in path.name:
            shutil.copyfile(path, made / path.name)


def _put_in_place(made: Path, out: Path, overwrite: bool) -> None:
    """Renames the finished folder; what is replaced goes only when the new one is there.

    Raises:
        OperatorError: `out` has come into being meanwhile.
    """
    old = made.with_suffix(".old")
    if overwrite and out.exists():
        out.rename(old)
    try:
        made.rename(out)
    except OSError as error:
        if old.exists():
            old.rename(out)
        raise OperatorError(f"OUT {out}: {error.strerror}") from None
    shutil.rmtree(old, ignore_errors=True)


def _say_scheme(scheme: Scheme, config: ModelConfig, texts: Texts, device: str) -> None:
    from penstock.engine.model.quantizing import layer_bytes

    size = "one scale a row" if scheme.group_size is None else f"groups of {scheme.group_size}"
    kind = "symmetric" if scheme.symmetric else "asymmetric"
    wide = min(scheme.num_wide_layers, config.num_layers) if scheme.bits == 4 else 0
    wide_text = f"; {wide} of {config.num_layers} layers in 8 bits" if wide else ""
    print(f"{scheme.method}, {scheme.bits} bits, {size}, {kind}{wide_text}, on {device}")
    used = () if scheme.method == "rtn" else texts.calibration
    print(
        f"calibration {_count(used)}, held out {_count(texts.held_out)}; memory: activations "
        f"{texts.num_bytes(config) / _MIB:,.0f} MiB, a layer with its Hessians {layer_bytes(config) / _MIB:,.0f} MiB",
        flush=True,
    )


def _count(pieces: Sequence[Text]) -> str:
    return f"{sum(len(piece.token_ids) for piece in pieces):,} tokens in {len(pieces):,} pieces"


def _say_outcome(outcome: Outcome, out: Path, size: int, size_before: int) -> None:
    print(f"{out}: {size / _MIB:,.1f} MiB of weights, before {size_before / _MIB:,.1f} MiB")
    if outcome.before is None or outcome.after is None:
        print("perplexity: not measured without --calibration FILE")
        return
    change = 100 * (outcome.after / outcome.before - 1)
    print(
        f"perplexity of the held-out text: {outcome.before:.4f} before, {outcome.after:.4f} after, {change:+.2f} %"
    )
