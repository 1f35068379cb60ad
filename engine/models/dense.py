"""Dense layers behind a model's pooling (``Dense`` of sentence-transformers)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn import functional

from engine.config import LoadFormat
from engine.models.checkpoint import read_headers
from engine.models.dense_spec import DenseActivation, DenseSpec
from engine.models.loader import dummy_weights, load_weights
from engine.models.safetensors import Header

_ACTIVATIONS: dict[DenseActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
}


class DenseLayers:
    """Loaded dense layers, one after another, in float32.

    Args:
        specs: of the layers.
        files: of each layer; None: random weights.
        device: of the weights.
        seed: of random weights.

    Raises:
        ModelLoadError: weights are missing, damaged or of another shape.
    """

    def __init__(
        self,
        specs: Sequence[DenseSpec],
        files: Sequence[list[Header]] | None,
        device: torch.device,
        seed: int,
    ) -> None:
        self._layers: list[tuple[torch.Tensor, torch.Tensor | None, DenseActivation]] = []
        for i, spec in enumerate(specs):
            if files is None:
                weights = dummy_weights(spec, torch.float32, device, seed + i)
            else:
                weights = load_weights(spec, files[i], torch.float32, device)
            bias = weights["linear.bias"] if spec.bias else None
            self._layers.append((weights["linear.weight"], bias, spec.activation))

    @property
    def num_bytes(self) -> int:
        """The size of the weights in memory."""
        return sum(
            weight.nbytes + (0 if bias is None else bias.nbytes) for weight, bias, _ in self._layers
        )

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """[n, inputs of the first layer] -> [n, outputs of the last], both float32."""
        for weight, bias, activation in self._layers:
            vectors = _ACTIVATIONS[activation](functional.linear(vectors, weight, bias))
        return vectors


def read_dense_headers(specs: Sequence[DenseSpec], load_format: LoadFormat) -> list[list[Header]]:
    """Read and check the headers of each layer's weight files. Raises as ``read_headers`` does.

    A layer may have safetensors though the model was saved as pickles.
    """
    return [read_headers(spec.directory, _format(spec.directory, load_format)) for spec in specs]


def _format(directory: Path, load_format: LoadFormat) -> LoadFormat:
    return "auto" if any(directory.glob("*.safetensors")) else load_format
