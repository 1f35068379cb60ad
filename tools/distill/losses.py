"""The four losses that a student can be trained on.

All take float tensors, compute in float32 and return a mean over positions, so that their weights
mean the same for every batch size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def logit_kl(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over rows; logits [rows, vocab].

    Hinton et al. (2015), section 2: the factor T^2 keeps the magnitude of the gradients independent
    of the temperature.
    """
    theirs = functional.log_softmax(teacher.float() / temperature, dim=-1)
    ours = functional.log_softmax(student.float() / temperature, dim=-1)
    return temperature**2 * functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def hard_labels(student: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the tokens of the text; logits [rows, vocab], targets [rows]."""
    return functional.cross_entropy(student.float(), targets)


def layer_map(num_student: int, num_teacher: int) -> list[int]:
    """The teacher's layer (from 1) that each of the student's layers matches, evenly spaced.

    The last matches the last, and of a deeper student several match the same; TinyBERT's uniform
    strategy (Jiao et al. 2020, section 3.1).
    """
    return [max(1, round((i + 1) * num_teacher / num_student)) for i in range(num_student)]


class HiddenTransfer(nn.Module):
    """Mean squared distance of hidden states, after a projection of each of the student's.

    TinyBERT's equation 8. The states are the outputs of the embedding and of each layer. The
    teacher's are divided by their root mean square, which differs by orders of magnitude between
    layers.
    """

    def __init__(self, student_hidden: int, teacher_hidden: int, mapped: list[int]) -> None:
        super().__init__()
        self.teacher_layers = [0, *mapped]
        self.projections = nn.ModuleList(
            nn.Linear(student_hidden, teacher_hidden, bias=False) for _ in self.teacher_layers
        )

    def forward(
        self, student: tuple[torch.Tensor, ...], teacher: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """The loss of states as transformers returns them: layers + 1 of [rows, tokens, hidden]."""
        total = student[0].new_zeros((), dtype=torch.float32)
        for state, layer, projection in zip(
            student, self.teacher_layers, self.projections, strict=True
        ):
            goal = teacher[layer].float()
            goal = goal * goal.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
            total = total + functional.mse_loss(projection(state).float(), goal)
        return total / len(self.teacher_layers)


def attention_transfer(
    student: tuple[torch.Tensor, ...], teacher: tuple[torch.Tensor, ...], mapped: list[int]
) -> torch.Tensor:
    """KL between attention distributions, mean over queries and layers.

    Each tensor is [rows, heads, queries, keys]. As in MiniLM (Wang et al. 2020, equation 4), but on
    the mean over heads, since student and teacher may differ in their number, and for every layer
    of the student.
    """
    total = student[0].new_zeros((), dtype=torch.float32)
    for ours, layer in zip(student, mapped, strict=True):
        theirs = teacher[layer - 1].float().mean(1)
        mine = ours.float().mean(1)
        apart = theirs * (theirs.clamp_min(1e-9).log() - mine.clamp_min(1e-9).log())
        total = total + apart.sum(-1).mean()
    return total / len(mapped)
