"""`penstock watermark`: tells whether a text has a watermark. It needs the model's tokenizer alone, and no torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from penstock.app.arguments import quantity
from penstock.app.checkpoint import DEMO_NAME, asked_for, find_checkpoint
from penstock.app.errors import OperatorError
from penstock.app.outputs import check_output, write_figures
from penstock.app.tables import percent
from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_tokenizer
from penstock.engine.text.watermark import DELTA, GAMMA, Watermark, evidence

KEY_FLAG = "--watermark-key-file"
MIN_PAIRS = 16
"""In fewer the normal distribution is far from that of green tokens."""


def read_watermark(path: Path, gamma: float = GAMMA, delta: float = DELTA) -> Watermark:
    """Makes the watermark of the key in a file.

    Raises:
        OperatorError: the file cannot be read, or its key is too short.
    """
    try:
        return Watermark.of_secret(path.read_bytes(), gamma, delta)
    except OSError as error:
        raise OperatorError(f"{KEY_FLAG} {path}: {error.strerror}") from None
    except ValueError as error:
        raise OperatorError(f"{KEY_FLAG} {path}: {error}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("detect",), help="count the tokens that a watermark prefers")
    parser.add_argument("file", metavar="FILE", help="the text, in UTF-8; - is standard input")
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR|HUB_ID",
        help=f"the model that may have written the text, or {DEMO_NAME}; a directory needs its tokenizer alone",
    )
    parser.add_argument("--revision", help="a commit, a tag or a branch on the hub; default: the newest")
    parser.add_argument(
        KEY_FLAG,
        required=True,
        type=Path,
        metavar="FILE",
        help="the file that the server had",
    )
    parser.add_argument(
        "--watermark-gamma",
        type=quantity(float, above=0, most=1),
        default=GAMMA,
        metavar="GAMMA",
        help=f"the share that the server had; default: {GAMMA}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")


def run(options: argparse.Namespace) -> int:
    """Prints the evidence.

    Raises:
        OperatorError: a file or the model cannot be read, or the text is too short.
    """
    check_output("--json", options.json)
    if options.watermark_gamma >= 1:
        raise OperatorError("argument --watermark-gamma: must be less than 1")
    watermark = read_watermark(options.watermark_key_file, options.watermark_gamma)
    folder = find_checkpoint(asked_for(options.model), options.revision, needed=("tokenizer.json",))
    try:
        tokenizer = read_tokenizer(folder)
    except CheckpointError as error:
        raise OperatorError(str(error)) from None
    found = evidence(tokenizer.encode(_text(options.file)), watermark)
    if found.num_scored < MIN_PAIRS:
        raise OperatorError(
            f"{options.file}: the text is too short: its distinct pairs of a token and the one before it are "
            f"{found.num_scored}, and a result needs {MIN_PAIRS}"
        )
    share = found.num_green / found.num_scored
    print(f"tokens scored  {found.num_scored:,}")
    print(f"green          {percent(share)} (without the watermark {percent(found.gamma)})")
    print(f"z              {found.z:.2f}")
    print(f"p              {found.p_value:.2g}")
    figures = {"tokens": found.num_scored, "green": found.num_green, "gamma": found.gamma}
    write_figures(options.json, {**figures, "z": found.z, "p": found.p_value})
    return 0


def _text(file: str) -> str:
    try:
        return (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode()
    except OSError as error:
        raise OperatorError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OperatorError(f"{file}: not UTF-8") from None
