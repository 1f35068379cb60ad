"""`quire distill`: flags to settings, and the last line."""

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
Teach a small model to say what a large one would say, for use as its draft or by itself.

  quire distill TEACHER --data chats.jsonl --student-layers 2 --student-hidden 256 -o draft

A run that was stopped goes on from its last checkpoint when the same command is given again.
The last line is JSON. Exit status: 0 done, 1 failed, 2 called wrongly.
"""


def main(argv: Sequence[str]) -> int:
    """Run one distillation. Returns the exit status."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        settings = settings_of(options)
        if options.threads:
            import torch

            torch.set_num_threads(options.threads)
        from tools.distill.run import distill

        print(json.dumps(distill(settings, options.overwrite)))
    except (DistillError, OSError) as error:
        print(f"quire distill: {error}", file=sys.stderr)
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
    """Settings from parsed flags. Raises DistillError."""

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
    parser.add_argument("-o", "--out", type=Path, required=True, help="where the student goes")
    parser.add_argument("--overwrite", action="store_true", help="begin anew if a run is there")
    _add_data(parser.add_argument_group("what is learned from"))
    _add_student(parser.add_argument_group("the student"))
    _add_losses(parser.add_argument_group("what is matched, and when"))
    _add_run(parser.add_argument_group("the run"))
    return parser


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--data", type=Path, nargs="+", default=[], metavar="FILE", help="text or JSONL")
    add("--validation", type=Path, metavar="FILE", help="documents to judge by")
    add("--validation-share", type=float, help="else this share of the documents (0.02)")
    add("--max-validation-documents", type=int, help="and at most so many (256)")
    add("--generate", type=int, dest="generate_num_documents", metavar="N",
        help="have the teacher write N documents after prompts from the data")  # fmt: skip
    add("--generate-alone", action="store_true", default=None, help="learn from those only")
    add("--generate-max-new-tokens", type=int, metavar="N", help="of a document (128)")
    add("--generate-temperature", type=float, help="0 is greedy (1.0)")
    add("--generate-prompt-tokens", type=int, metavar="N",
        help="of a document that has no prompt of its own (32)")  # fmt: skip
    add("--generate-batch-rows", type=int, metavar="N", help="written at a time (32)")


def _add_student(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--student", type=Path, metavar="PATH", help="a model directory, or a config as JSON")
    for field in fields(StudentShape):
        flag = "--student-" + field.name.replace("_", "-")
        if field.name == "tie_embeddings":
            add(flag, action="store_true", default=None, help="one matrix for input and output")
        else:
            add(flag, type=int, metavar="N", help="instead of the teacher's")
    add("--fresh", action="store_true", default=None,
        help="random weights only: take nothing over from the teacher")  # fmt: skip


def _add_losses(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--schedule", type=Path, metavar="FILE", help="phases as a JSON list; see the docs")
    add("--kl", type=float, help="weight of the distance from the teacher's distribution (1)")
    add("--temperature", type=float, help="at which that is taken (1)")
    add("--hard", type=float, help="weight of the text's own tokens (0)")
    add("--hidden", type=float, help="weight of the hidden states (0)")
    add("--attention", type=float, help="weight of the attention distributions (0)")
    add("--steps", type=int, help="of the optimiser (1000)")
    add("--row-tokens", type=int, help="tokens in a packed row (512)")
    add("--learning-rate", type=float, help="at its peak (1e-3)")
    add("--end-rate", type=float, help="at the end of a phase (1e-5)")


def _add_run(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--batch-rows", type=int, help="rows that go through the models at a time (4)")
    add("--accumulate", type=int, help="of such batches make a step (1)")
    add("--warm-up", type=int, help="steps over which the rate rises (20)")
    add("--weight-decay", type=float, help="of matrices (0.05)")
    add("--clip", type=float, help="the longest gradient (1.0)")
    add("--validate-every", type=int, metavar="STEPS", help="(100)")
    add("--save-every", type=int, metavar="STEPS", help="(100)")
    add(
        "--patience",
        type=int,
        metavar="N",
        help="end a phase after N validations without a better one (0: never)",
    )
    add("--seed", type=int, help="of weights, order and generated text (0)")
    add("--dtype", choices=("auto", "bfloat16", "float32"), help="of products (auto)")
    add("--device", help="auto, cpu, cuda, cuda:1, ...")
    add("--threads", type=int, help="of tensor work on a CPU")
    add("--work", type=Path, metavar="DIRECTORY", help="for checkpoints (OUT/work)")
