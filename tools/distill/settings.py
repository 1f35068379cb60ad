"""The settings of a run, checked once, before anything is loaded."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tools.distill.errors import DistillError

_SEEDS = 2**32  # the seed of each piece of generated text is derived from it, within 64 bits


@dataclass(frozen=True)
class Phase:
    """A stretch of training with its own loss weights; a schedule is a list of phases.

    steps: optimiser steps. row_tokens: tokens in a packed row. temperature: of the KL term. kl,
    hard, hidden, attention: weights of the four losses (:mod:`tools.distill.losses`). learning_rate
    falls along a cosine to end_rate by the last step of the phase.
    """

    steps: int = 1000
    row_tokens: int = 512
    temperature: float = 1.0
    kl: float = 1.0
    hard: float = 0.0
    hidden: float = 0.0
    attention: float = 0.0
    learning_rate: float = 1e-3
    end_rate: float = 1e-5

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            whole = item.name in ("steps", "row_tokens")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise DistillError(f"schedule: {item.name} must be a number, not {value!r}")
            if not math.isfinite(value) or value < 0:
                raise DistillError(f"schedule: {item.name} must not be {value!r}")
        if self.steps < 1 or self.row_tokens < 2 or self.temperature <= 0:
            raise DistillError(
                "schedule: steps >= 1, row_tokens >= 2 and temperature > 0 are needed"
            )
        if not (self.kl or self.hard or self.hidden or self.attention):
            raise DistillError(
                "schedule: a phase in which every loss weighs nothing learns nothing"
            )

    def rate(self, step: int, warm_up: int = 0) -> float:
        """The learning rate at `step` (from 0) of the phase, after `warm_up` linear steps."""
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.steps - warm_up)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.end_rate + (self.learning_rate - self.end_rate) * share


@dataclass(frozen=True)
class StudentShape:
    """Differences from the teacher if the student is made by shrinking it; None: no difference."""

    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    tie_embeddings: bool = False


@dataclass(frozen=True)
class Generation:
    """Text that the teacher generates for the student; see tools.distill.generation.

    num_documents: how many, 0 for none. temperature 0 is greedy. alone: learn only from generated
    documents, and use the documents that were read only for their prompts.
    """

    num_documents: int = 0
    max_new_tokens: int = 128
    temperature: float = 1.0
    prompt_tokens: int = 32
    batch_rows: int = 32
    alone: bool = False

    def __post_init__(self) -> None:
        _check_at_least(0, self, ("num_documents", "temperature"), "generate_")
        _check_at_least(1, self, ("max_new_tokens", "prompt_tokens", "batch_rows"), "generate_")


@dataclass(frozen=True)
class Settings:
    """A whole run. Paths are kept as given, so that a run can be moved as a directory.

    batch_rows rows go through the models at a time, and accumulate such batches make one step.
    validate_every and save_every count steps. patience: the number of validations without
    improvement after which a phase ends, 0 for never.
    """

    teacher: str
    out: Path
    data: tuple[Path, ...] = ()
    validation: Path | None = None
    validation_share: float = 0.02
    max_validation_documents: int = 256
    student: Path | None = None
    shape: StudentShape = field(default_factory=StudentShape)
    fresh: bool = False
    phases: tuple[Phase, ...] = (Phase(),)
    generation: Generation = field(default_factory=Generation)
    batch_rows: int = 4
    accumulate: int = 1
    warm_up: int = 20
    weight_decay: float = 0.05
    clip: float = 1.0
    validate_every: int = 100
    save_every: int = 100
    patience: int = 0
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    work: Path | None = None

    def __post_init__(self) -> None:
        if not self.data and not self.generation.num_documents:
            raise DistillError("there is nothing to learn from: give --data FILE or --generate N")
        if self.student is not None and self.shape != StudentShape():
            raise DistillError("--student and --student-... exclude each other")
        at_least_one = ("batch_rows", "accumulate", "validate_every", "save_every")
        _check_at_least(1, self, (*at_least_one, "max_validation_documents"))
        _check_at_least(0, self, ("warm_up", "weight_decay", "clip", "patience", "seed"))
        if not self.clip:
            raise DistillError("--clip must be more than 0")
        if self.seed >= _SEEDS:
            raise DistillError(f"--seed must be less than {_SEEDS}")
        if not 0 < self.validation_share < 1:
            raise DistillError("--validation-share must lie between 0 and 1")

    @property
    def work_folder(self) -> Path:
        """The folder of checkpoints and of the teacher's generated text."""
        return self.work or self.out / "work"

    @property
    def needs_attention(self) -> bool:
        """Whether any phase uses attention, which only plain attention code returns."""
        return any(phase.attention for phase in self.phases)

    @property
    def criterion(self) -> str:
        """The metric by which the best weights are chosen: `kl`, or `hard` if no KL is learned."""
        return "kl" if self.phases[-1].kl or not self.phases[-1].hard else "hard"

    def as_json(self) -> dict[str, Any]:
        """Every setting by name, in JSON types."""
        return json.loads(json.dumps(asdict(self), default=str))


def _check_at_least(least: int, given: Any, names: tuple[str, ...], prefix: str = "") -> None:
    """Raise DistillError, naming the flag, for a number that is less or not finite."""
    for name in names:
        if not least <= getattr(given, name) < math.inf:
            flag = "generate" if name == "num_documents" else f"{prefix}{name}"
            raise DistillError(f"--{flag.replace('_', '-')} must be at least {least}")


# What may differ between a run and its continuation: none of it affects what is learned.
CHANGEABLE_ON_RESUME = {"out", "work", "save_every", "max_validation_documents"}


def read_schedule(path: Path, default: Phase) -> tuple[Phase, ...]:
    """The phases of a JSON file, a list of objects; `default` provides what an object leaves out.

    Raises DistillError, naming the file, the phase and the key.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DistillError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise DistillError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, list) or not content:
        raise DistillError(f"{path}: a schedule is a list of one or more phases")
    known = {item.name for item in fields(Phase)}
    phases = []
    for number, given in enumerate(content, 1):
        if not isinstance(given, dict):
            raise DistillError(f"{path}: phase {number} is not an object")
        if unknown := sorted(set(given) - known):
            raise DistillError(f"{path}: phase {number} has no setting {unknown[0]!r}")
        try:
            phases.append(Phase(**asdict(default) | given))
        except DistillError as error:
            raise DistillError(f"{path}: phase {number}: {error}") from None
    return tuple(phases)
