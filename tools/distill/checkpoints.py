"""The state of a run on disk: one file, replaced atomically, with all the next step depends on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.distill.errors import DistillError
from tools.distill.packing import Packer
from tools.distill.settings import CHANGEABLE_ON_RESUME, Settings

_FILE = "state.pt"


@dataclass
class Progress:
    """The progress of a run. Written by Trainer.

    step counts optimiser steps over all phases. history has an entry for each step, validations one
    for each validation; best holds the student's weights at the best validation.
    """

    phase: int = 0
    step: int = 0
    step_in_phase: int = 0
    tokens: int = 0
    learned_tokens: int = 0
    seconds: float = 0.0
    best_value: float = float("inf")
    best_step: int = 0
    worse_in_a_row: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, torch.Tensor] = field(default_factory=dict)

    def record_validation(self, value: float) -> bool:
        """Record a validation, and return whether it is the best so far."""
        if value < self.best_value:
            self.best_value, self.best_step, self.worse_in_a_row = value, self.step, 0
            return True
        self.worse_in_a_row += 1
        return False

    def next_phase(self) -> None:
        """Advance to the next phase."""
        self.phase += 1
        self.step_in_phase = 0
        self.worse_in_a_row = 0


def save(
    settings: Settings, progress: Progress, learned: nn.Module,
    optimizer: torch.optim.Optimizer, packer: Packer,
) -> None:  # fmt: skip
    """Write the state atomically: a reader always finds the previous one or this one, complete."""
    folder = settings.work_folder
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "settings": settings.as_json(),
        "progress": dict(vars(progress)),
        "learned": learned.state_dict(),
        "optimizer": optimizer.state_dict(),
        "packer": packer.state(),
        "random": _random_state(),
    }
    partial = folder / (_FILE + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / _FILE)


def load(
    settings: Settings, learned: nn.Module, optimizer: torch.optim.Optimizer, packer: Packer,
    device: torch.device,
) -> Progress | None:  # fmt: skip
    """Restore the state of the last save; None if nothing was saved.

    Raises DistillError if the saved run is a different one.
    """
    path = settings.work_folder / _FILE
    if not path.exists():
        return None
    state = _read(path, device)
    then, now = state["settings"], settings.as_json()
    for name in sorted(now.keys() - CHANGEABLE_ON_RESUME):
        if then.get(name) != now[name]:
            raise DistillError(
                f"{path}: a run with another {name} ({json.dumps(then.get(name))}, now "
                f"{json.dumps(now[name])}); --overwrite starts over"
            )
    learned.load_state_dict(state["learned"])
    optimizer.load_state_dict(state["optimizer"])
    packer.restore(state["packer"])
    _restore_random(state["random"])
    return Progress(**state["progress"])


def remove_checkpoint(settings: Settings) -> None:
    """Remove the saved state, so that the next run starts over."""
    (settings.work_folder / _FILE).unlink(missing_ok=True)


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many kinds for a truncated file
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise DistillError(f"{path}: {reason}; --overwrite starts over") from None


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _restore_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])
