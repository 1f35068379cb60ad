"""A whole run: read, check, load, train, keep the best weights, and report the result."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from tools.distill import models
from tools.distill.checkpoints import Progress, remove_checkpoint
from tools.distill.curves import write_curves
from tools.distill.documents import Documents, read_documents
from tools.distill.errors import DistillError
from tools.distill.generation import generate
from tools.distill.packing import Packer, validation_batches
from tools.distill.settings import Settings
from tools.distill.student import init_from_teacher, make_student, student_config
from tools.distill.training import Trainer

logger = logging.getLogger("quire.distill")


def distill(settings: Settings, overwrite: bool = False) -> dict[str, Any]:
    """Run or continue a distillation; the student is written to settings.out.

    Returns the record that the last line prints: steps, tokens, the best validation, the student's
    size, and whether documents of a packed row were isolated. For a completed run, the record is
    returned again.

    Raises DistillError.
    """
    if overwrite:
        remove_checkpoint(settings)
    device = models.pick_device(settings.device)
    dtype = models.pick_dtype(settings.dtype, device)
    tokenizer = models.load_tokenizer(settings.teacher)
    teacher_config = models.load_config(settings.teacher)
    config = student_config(teacher_config, settings.student, settings.shape)
    models.check_vocabularies(teacher_config, config, (settings.teacher, settings.student))
    longest = max(phase.row_tokens for phase in settings.phases)
    models.check_memory(
        teacher_config, config, dtype.itemsize, settings.batch_rows * longest, device
    )
    eager = settings.needs_attention
    teacher = models.load_model(settings.teacher, dtype, device, eager)
    student, taken = _student(settings, config, teacher, device, eager)
    apart = models.isolates_documents(teacher) and models.isolates_documents(student)
    if not apart:
        logger.warning("this model's attention crosses the documents of a packed row")
    documents, held_out = _documents(settings, teacher, tokenizer, overwrite)
    trainer = Trainer(
        settings, teacher, student, Packer(documents, settings.seed),
        validation_batches(held_out, settings.batch_rows, longest), dtype,
    )  # fmt: skip
    if trainer.resume():
        logger.info("going on from step %d", trainer.progress.step)
    trainer.train(lambda progress: _show(settings, progress))
    models.export(
        trainer.load_best(), tokenizer, settings.out, torch.bfloat16, settings.teacher,
        teacher.generation_config,
    )  # fmt: skip
    record = _record(settings, trainer.progress, student) | {
        "inherited_tensors": len(taken),
        "documents": len(documents),
        "documents_apart": apart,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    _write(settings.out / "distill.json", record | {"settings": settings.as_json()})
    return record


def _student(
    settings: Settings, config: Any, teacher: Any, device: torch.device, eager_attention: bool
) -> tuple[Any, list[str]]:
    """The student, and the names of the tensors it inherited from the teacher."""
    source = settings.student
    if source is not None and source.is_dir() and any(source.glob("*.safetensors")):
        return models.load_model(source, torch.float32, device, eager_attention), []
    student = make_student(config, settings.seed, eager_attention).to(device)
    return student, [] if settings.fresh else init_from_teacher(student, teacher)


def _documents(
    settings: Settings, teacher: Any, tokenizer: Any, overwrite: bool
) -> tuple[Documents, Documents]:
    """The documents for (training, validation)."""
    documents = read_documents(settings.data, tokenizer) if settings.data else None
    if settings.generation.num_documents:
        written = generate(settings, teacher, tokenizer, documents, overwrite=overwrite)
        paths = (written,) if settings.generation.alone else (*settings.data, written)
        documents = read_documents(paths, tokenizer)
    assert documents is not None  # Settings guarantees that there is one of the two
    vocabulary = teacher.config.get_text_config().vocab_size
    _check_tokens(documents, vocabulary)
    if settings.validation is not None:
        held_out = read_documents((settings.validation,), tokenizer)
        _check_tokens(held_out, vocabulary)
        return documents, held_out
    return documents.split(
        settings.validation_share, settings.max_validation_documents, settings.seed
    )


def _check_tokens(documents: Documents, vocabulary: int) -> None:
    largest = int(documents.tokens.max())
    if largest >= vocabulary:
        raise DistillError(f"a document has token {largest}, and the teacher has {vocabulary}")


def _show(settings: Settings, progress: Progress) -> None:
    """Update the picture and the numbers behind it."""
    settings.out.mkdir(parents=True, exist_ok=True)
    write_curves(progress, settings.out / "curves.svg")
    rows = [*progress.history, *(row | {"validation": True} for row in progress.validations)]
    text = "".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: row["step"]))
    partial = settings.work_folder / "history.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(settings.work_folder / "history.jsonl")


def _record(settings: Settings, progress: Progress, student: Any) -> dict[str, Any]:
    best = next(v for v in progress.validations if v["step"] == progress.best_step)
    weights = settings.out / "model.safetensors"
    return {
        "out": str(settings.out),
        "steps": progress.step,
        "best_step": progress.best_step,
        "validation": {name: round(best[name], 5) for name in ("kl", "hard", "agreement")},
        "tokens": progress.tokens,
        "learned_tokens": progress.learned_tokens,
        "seconds": round(progress.seconds, 1),
        "parameters": sum(parameter.numel() for parameter in student.parameters()),
        "weights_bytes": weights.stat().st_size if weights.exists() else None,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
