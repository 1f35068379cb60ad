"""`quire distill`: turns flags into settings, runs, and prints the result line."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from tools.distill.errors import DistillError
from tools.distill.settings import Generation, Phase, Settings, StudentShape, read_schedule

_DESCRIPTION = """\
Train a small model to imitate a large one, for use as its draft model or by itself.

  quire distill TEACHER --data chats.jsonl --student-layers 2 --student-hidden 256 -o draft

An interrupted run continues from its last checkpoint when the same command is run again.
The last line is JSON. Exit status: 0 done, 1 failed, 2 usage error.
"""


def main(argv: Sequence[str]) -> int:
    """Run one distillation. Returns the exit status."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        settings = settings_of(options)
        if options.threads is not None:
            import torch

            if options.threads < 1:
                raise DistillError("--threads must be at least 1")

            torch.set_num_threads(options.threads)
        from tools.distill.run import distill

        print(json.dumps(distill(settings, options.overwrite)))
    except DistillError as error:
        print(f"quire distill: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"quire distill: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        print(
            "quire distill: out of memory: try fewer --batch-rows with --accumulate",
            file=sys.stderr,
        )
        return 1
    return 0


def settings_of(options: argparse.Namespace) -> Settings:
    """Build settings from parsed flags. Raises DistillError."""

    def group(kind: type, prefix: str) -> dict:
        found = {f.name: getattr(options, prefix + f.name, None) for f in fields(kind)}
        return {name: value for name, value in found.items() if value is not None}

    phase = Phase(**group(Phase, ""))
    phases = read_schedule(options.schedule, phase) if options.schedule else (phase,)
    given = group(Settings, "")
    given["data"] = tuple(options.data)
    return Settings(
        **given,
        shape=StudentShape(**group(StudentShape, "student_")),
        generation=Generation(**group(Generation, "generate_")),
        phases=phases,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire distill",
        usage="quire distill TEACHER (--data FILE | --generate N) -o DIRECTORY [options]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "teacher", metavar="TEACHER", help="any causal model that transformers loads"
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="directory for the student")
    parser.add_argument(
        "--overwrite", action="store_true", help="discard an earlier run in the same place"
    )
    _add_data(parser.add_argument_group("training data"))
    _add_student(parser.add_argument_group("student"))
    _add_losses(parser.add_argument_group("losses and schedule"))
    _add_run(parser.add_argument_group("training"))
    return parser


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--data", type=Path, nargs="+", default=[], metavar="FILE", help="text or JSON lines")
    add("--validation", type=Path, metavar="FILE", help="documents for validation")
    add(
        "--validation-share",
        type=float,
        help="without --validation: share of the documents to hold out (default: 0.02)",
    )
    add("--max-validation-documents", type=int, help="most documents to hold out (default: 256)")
    add("--generate", type=int, dest="generate_num_documents", metavar="N",
        help="have the teacher write N documents after prompts from the data")  # fmt: skip
    add(
        "--generate-alone",
        action="store_true",
        default=None,
        help="train on generated documents only",
    )
    add(
        "--generate-max-new-tokens",
        type=int,
        metavar="N",
        help="longest generated document (default: 128)",
    )
    add(
        "--generate-temperature",
        type=float,
        help="sampling temperature; 0 is greedy (default: 1.0)",
    )
    add("--generate-prompt-tokens", type=int, metavar="N",
        help="tokens taken as prompt from documents without one (default: 32)")  # fmt: skip
    add(
        "--generate-batch-rows",
        type=int,
        metavar="N",
        help="documents generated at a time (default: 32)",
    )


def _add_student(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--student", type=Path, metavar="PATH", help="a model directory, or a config.json")
    for field in fields(StudentShape):
        flag = "--student-" + field.name.replace("_", "-")
        if field.name == "tie_embeddings":
            add(
                flag,
                action="store_true",
                default=None,
                help="share one matrix between embeddings and head",
            )
        else:
            add(flag, type=int, metavar="N", help="this size instead of the teacher's")
    add("--fresh", action="store_true", default=None,
        help="start from random weights instead of the teacher's")  # fmt: skip


def _add_losses(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--schedule",
        type=Path,
        metavar="FILE",
        help="phases as a JSON list; see docs/distillation.md",
    )
    add("--kl", type=float, help="weight of the KL divergence from the teacher (default: 1)")
    add("--temperature", type=float, help="temperature of the KL divergence (default: 1)")
    add("--hard", type=float, help="weight of the cross-entropy with the text (default: 0)")
    add("--hidden", type=float, help="weight of the distance of hidden states (default: 0)")
    add("--attention", type=float, help="weight of the KL of attention distributions (default: 0)")
    add("--steps", type=int, help="optimiser steps (default: 1000)")
    add("--row-tokens", type=int, help="tokens per packed row (default: 512)")
    add("--learning-rate", type=float, help="peak learning rate (default: 1e-3)")
    add("--end-rate", type=float, help="learning rate at the end of a phase (default: 1e-5)")


def _add_run(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--batch-rows", type=int, help="rows per batch (default: 4)")
    add("--accumulate", type=int, help="batches per step (default: 1)")
    add("--warm-up", type=int, help="steps over which the learning rate rises (default: 20)")
    add("--weight-decay", type=float, help="weight decay of matrices (default: 0.05)")
    add("--clip", type=float, help="largest gradient norm (default: 1.0)")
    add(
        "--validate-every",
        type=int,
        metavar="STEPS",
        help="steps between validations (default: 100)",
    )
    add("--save-every", type=int, metavar="STEPS", help="steps between checkpoints (default: 100)")
    add(
        "--patience",
        type=int,
        metavar="N",
        help="end a phase after N validations without improvement (default: 0, never)",
    )
    add("--seed", type=int, help="seed of weights, order and generated text (default: 0)")
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        help="number format of matrix products (default: auto)",
    )
    add("--device", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    add("--threads", type=int, help="CPU threads")
    add(
        "--work",
        type=Path,
        metavar="DIRECTORY",
        help="directory for checkpoints (default: OUT/work)",
    )
