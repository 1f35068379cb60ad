"""The training loop; everything that a step depends on is in its state."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tools.distill import losses, models
from tools.distill.checkpoints import Progress, load, save
from tools.distill.errors import DistillError
from tools.distill.packing import Batch, Packer
from tools.distill.settings import Phase, Settings
from tools.distill.validation import validate


class Trainer:
    """Trains one student on one teacher.

    The order of summation in a step does not depend on when the run was started. So a run that is
    killed and continues from its last checkpoint has the same losses and weights as an
    uninterrupted one, bit for bit on a CPU with the same number of threads.
    """

    def __init__(
        self, settings: Settings, teacher: Any, student: Any, packer: Packer,
        held_out: list[Batch], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._teacher, self._student = teacher.eval().requires_grad_(False), student
        self._packer = packer
        self._held_out = held_out
        self._device = next(teacher.parameters()).device
        self._dtype = dtype
        ours, theirs = (m.config.get_text_config() for m in (student, teacher))
        self._layer_map = losses.layer_map(ours.num_hidden_layers, theirs.num_hidden_layers)
        self._hidden = losses.HiddenTransfer(
            ours.hidden_size, theirs.hidden_size, self._layer_map
        ).to(self._device)
        self._learned = nn.ModuleDict({"student": student, "hidden": self._hidden})
        self._optimizer = _optimizer(self._learned, settings)
        self.progress = Progress()

    def resume(self) -> bool:
        """Continue from the last checkpoint; returns whether there is one. Raises DistillError."""
        found = load(self._settings, self._learned, self._optimizer, self._packer, self._device)
        self.progress = found or self.progress
        return found is not None

    def train(self, on_save: Callable[[Progress], None]) -> None:
        """Train to the end of the last phase; calls `on_save` with the progress after each save."""
        from tqdm import tqdm

        settings, progress = self._settings, self.progress
        total = sum(phase.steps for phase in settings.phases)
        self._student.train()
        with tqdm(
            total=total, initial=progress.step, unit="step", file=sys.stderr, mininterval=1
        ) as bar:
            while progress.phase < len(settings.phases):
                told, saved = self._advance(settings.phases[progress.phase])
                bar.set_postfix(_progress_postfix(told, progress), refresh=False)
                bar.update()
                if saved:
                    on_save(progress)

    def _advance(self, phase: Phase) -> tuple[dict[str, float], bool]:
        """Run one step, with the validation and the save that are due after it.

        Returns the step's metrics, and whether the state was saved.
        """
        settings, progress = self._settings, self.progress
        began = time.monotonic()
        metrics = self._step(phase)
        progress.seconds += time.monotonic() - began
        progress.step += 1
        progress.step_in_phase += 1
        progress.history.append(metrics | {"step": progress.step, "phase": progress.phase})
        last = progress.step_in_phase >= phase.steps
        if last or progress.step % settings.validate_every == 0:
            last |= self._validate()
        if last:
            progress.next_phase()
        due = last or progress.step % settings.save_every == 0
        if due:
            save(settings, progress, self._learned, self._optimizer, self._packer)
        return metrics, due

    def load_best(self) -> Any:
        """The student with the weights of the best validation. Raises DistillError."""
        if not self.progress.best:
            raise DistillError(
                "no validation gave a number: a lower --learning-rate with --overwrite may help"
            )
        self._student.load_state_dict(self.progress.best)
        return self._student.eval()

    def _step(self, phase: Phase) -> dict[str, float]:
        """Run one optimiser step over `accumulate` batches; returns the metrics for the curves."""
        settings, progress = self._settings, self.progress
        warm_up = settings.warm_up if progress.phase == 0 else 0
        rate = phase.rate(progress.step_in_phase, min(warm_up, phase.steps - 1))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        metrics: dict[str, float] = {}
        for _ in range(settings.accumulate):
            batch = self._packer.batch(settings.batch_rows, phase.row_tokens)
            progress.tokens += batch.num_tokens
            progress.learned_tokens += len(batch.targets)
            parts = self._losses(phase, batch.to(self._device))
            weighted = [getattr(phase, name) * part for name, part in parts.items()]
            loss = torch.stack(weighted).sum()
            if not torch.isfinite(loss):
                raise DistillError(
                    f"the loss is {loss.item()} at step {progress.step + 1}: a lower "
                    "--learning-rate, or --dtype float32, may help"
                )
            (loss / settings.accumulate).backward()
            for name, part in {"loss": loss, **parts}.items():
                metrics[name] = metrics.get(name, 0.0) + part.item() / settings.accumulate
        torch.nn.utils.clip_grad_norm_(self._learned.parameters(), settings.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return metrics | {"rate": rate}

    def _losses(self, phase: Phase, batch: Batch) -> dict[str, torch.Tensor]:
        """The losses of nonzero weight, by name."""
        wanted = {"hidden": phase.hidden > 0, "attention": phase.attention > 0}
        rows = (batch.inputs, batch.positions, batch.loss_mask)
        parts: dict[str, torch.Tensor] = {}
        with self._autocast():
            ours = models.run(self._student, *rows, **wanted)
        if phase.hard:
            parts["hard"] = losses.hard_labels(ours.logits, batch.targets)
        if not (phase.kl or phase.hidden or phase.attention):
            return parts  # skip the teacher, which costs the most
        with torch.no_grad(), self._autocast():
            theirs = models.run(self._teacher, *rows, **wanted)
        if phase.kl:
            parts["kl"] = losses.logit_kl(ours.logits, theirs.logits, phase.temperature)
        if phase.hidden:
            parts["hidden"] = self._hidden(ours.hidden, theirs.hidden)
        if phase.attention:
            parts["attention"] = losses.attention_transfer(
                ours.attention, theirs.attention, self._layer_map
            )
        return parts

    def _validate(self) -> bool:
        """Validate, keep the weights if they are the best, and return whether to end the phase."""
        self._student.eval()
        with self._autocast():
            found = validate(self._teacher, self._student, self._held_out, self._device)
        self._student.train()
        progress = self.progress
        progress.validations.append(found | {"step": progress.step})
        better = progress.record_validation(found[self._settings.criterion])
        if better:
            progress.best = {
                name: t.detach().clone() for name, t in self._student.state_dict().items()
            }
        patience = self._settings.patience
        return bool(patience) and progress.worse_in_a_row >= patience

    def _autocast(self) -> AbstractContextManager:
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)


def _optimizer(module: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices, but not on norms and biases."""
    learned = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in learned if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in learned if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=settings.phases[0].learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )


def _progress_postfix(told: dict[str, float], progress: Progress) -> dict[str, str]:
    """What the progress bar shows."""
    shown = {"loss": f"{told['loss']:.3f}"}
    if progress.validations:
        last = progress.validations[-1]
        shown |= {"kl": f"{last['kl']:.3f}", "agree": f"{last['agreement']:.3f}"}
    return shown
