"""``quire quantize``: quantises a checkpoint into a directory that other engines can load too.

The work is done in ``tools/quantize``. This module has the command line and the default calibration
text.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelLoadError, RequestError

if TYPE_CHECKING:
    from tools.quantize.report import Report

_DESCRIPTION = """\
Quantise a model and write it as a model directory in compressed-tensors format. One layer is in
memory at a time. An interrupted run continues where it stopped when it is started again with the
same arguments.
"""
_EXAMPLES = """\
examples:
  quire quantize ./Qwen3-0.6B -o ./Qwen3-0.6B-int4                 GPTQ, groups of 128
  quire quantize ./model -o ./model-fp8 --scheme fp8 --algorithm rtn
  quire quantize ./model -o ./out --algorithm awq --calibration chats.jsonl
"""

_FIRST_SHARD = 38  # of the corpus: earlier ones trained the embedded model
_SHARD_SIZE = 200


def main(argv: Sequence[str]) -> int:
    """Quantise a model. Returns the exit status: 0 success, 1 failure, 2 wrong usage."""
    options = _parser().parse_args(argv)
    # Not at the top, so that --help does not import torch.
    from tools.quantize.recipe import QuantizeError

    try:
        report = _run(options)
    except (QuantizeError, ModelLoadError, RequestError, ValueError) as error:
        return _print_error(" ".join(str(error).split()))
    except OSError as error:
        return _print_error(f"{error.filename or options.output}: {error.strerror or error}")
    from tools.quantize.report import format_report

    print(format_report(report))
    print(f"\nquire serve {options.output}")
    return 0


def _run(options: argparse.Namespace) -> Report:
    import torch

    from engine.model_source import resolve_model
    from server.cli.progress import LoadDisplay
    from tools.quantize.gptq import GptqOptions
    from tools.quantize.questions import check_questions, count_correct, read_questions
    from tools.quantize.recipe import Recipe
    from tools.quantize.report import write_report
    from tools.quantize.run import Job, quantise
    from tools.quantize.texts import make_windows, read_texts

    recipe = Recipe(
        scheme=options.scheme,
        algorithm=options.algorithm,
        group_size=options.group_size,
        symmetric=not options.asymmetric,
        gptq=GptqOptions(options.damping, by_activity=not options.no_act_order),
        ignore=("lm_head", *options.ignore),
    )
    questions = read_questions(options.questions) if options.questions else []
    texts = read_texts(options.calibration) if options.calibration else _default_texts()
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    source = Path(resolve_model(options.model))
    if questions:
        check_questions(source, questions)
    windows = make_windows(
        source,
        texts,
        window=options.window,
        num_windows=options.num_windows,
        num_held_out=options.num_held_out,
    )
    display = LoadDisplay()
    try:
        report = quantise(Job(source, options.output, recipe), windows, display)
        if questions:
            display(1.0, "asking the questions")
            accuracy = {
                "total": len(questions),
                "right_before": count_correct(source, questions),
                "right_after": count_correct(options.output, questions),
            }
            report = dataclasses.replace(report, accuracy=accuracy)
            write_report(options.output, report)
    finally:
        display.clear()
    return report


def _default_texts() -> Iterable[dict[str, Any]]:
    """An endless stream of conversations of the kind that the embedded model was trained on."""
    from demo.corpus import shard

    shards = (shard(index, size=_SHARD_SIZE) for index in itertools.count(_FIRST_SHARD))
    return itertools.chain.from_iterable(shards)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire quantize",
        usage="quire quantize MODEL -o OUTPUT [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a directory in Hugging Face format, or a name on the Hub (org/name)",
    )
    add("-o", "--output", metavar="OUTPUT", type=Path, required=True, help="directory to create")
    rounding = parser.add_argument_group("scheme and algorithm")
    add = rounding.add_argument
    add(
        "--scheme",
        choices=("int4", "int8", "w8a8", "fp8"),
        default="int4",
        help="int4, int8: weights only; w8a8, fp8: activations too, at run time (default: int4)",
    )
    add(
        "--algorithm",
        choices=("rtn", "gptq", "awq", "awq+gptq"),
        default="gptq",
        help="rtn: round to nearest; gptq: compensate errors; awq: scale what matters most first "
        "(default: gptq)",
    )
    add(
        "--group-size",
        type=int,
        metavar="N",
        help="inputs that share a scale; -1: all (default: for int4 the largest of 128, 64 and 32 "
        "that divides every layer, else -1)",
    )
    add("--asymmetric", action="store_true", help="give every group a zero point (int4, int8)")
    add(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="leave this module as it is: a name, or re:PATTERN; repeatable. The head and the "
        "embeddings are never quantised",
    )
    add(
        "--damping",
        type=float,
        default=0.01,
        help="gptq: share of the mean diagonal (default: 0.01)",
    )
    add(
        "--no-act-order",
        action="store_true",
        help="gptq: process inputs in order, not the most active first",
    )
    calibration = parser.add_argument_group("calibration")
    add = calibration.add_argument
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="plain text, or JSON lines with 'messages' or 'text' (default: short English chats)",
    )
    add(
        "--num-windows",
        type=_positive,
        default=128,
        metavar="N",
        help="windows to run (default: 128)",
    )
    add(
        "--window",
        type=_positive,
        default=512,
        metavar="N",
        help="tokens per window (default: 512)",
    )
    add(
        "--num-held-out",
        type=_natural,
        default=16,
        metavar="N",
        help="windows at the end of the text kept for computing perplexity (default: 16)",
    )
    add(
        "--questions",
        type=Path,
        metavar="FILE",
        help="JSON lines with 'messages' and 'expected', to ask both models",
    )
    parser.add_argument("--num-threads", type=_positive, metavar="N", help="CPU threads")
    return parser


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, not {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not (number := _natural(text)):
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _print_error(text: str) -> int:
    """Print an error in one line; returns the exit status of a failure."""
    print(f"quire quantize: {text}", file=sys.stderr)
    return 1
