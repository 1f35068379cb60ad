"""The encoder: one implementation for all families, made from a spec and weights.

embedding + positions + token types ─► norm ─► [ attention ─ + ─ norm ─ MLP ─ + ─ norm ] x layers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.models.encoder.attention import attend, make_buckets
from engine.models.encoder.relative_positions import distance_buckets
from engine.models.encoder.spec import EncoderActivation, EncoderSpec
from engine.models.linear import DenseLinear, Linear, LinearMethod
from engine.models.loader import Weights, load_matrix
from engine.models.norms import LayerNorm, NormWeights

_ACTIVATIONS: dict[EncoderActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    output: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    mlp_norm: LayerNorm


class Encoder:
    """A loaded encoder.

    Args:
        spec: of the model.
        weights: its parameters, read here one by one.
        method: how linear layers are held.

    Raises:
        ModelLoadError: the weights cannot be read, or do not fit on the device.
    """

    def __init__(self, spec: EncoderSpec, weights: Weights, method: LinearMethod) -> None:
        self.spec = spec
        self.num_bytes = 0
        self._weights = weights
        self._embedding = self._tensor("embedding")
        self._positions = self._tensor("positions")
        self._token_types = self._tensor("token_types") if spec.num_token_types else None
        self._relative = self._tensor("relative_bias") if spec.relative_buckets else None
        self._embedding_norm = self._norm("embedding_norm")
        self._layers = tuple(self._layer(i, method) for i in range(spec.num_layers))
        self._head: tuple[Linear, Linear] | None = None
        if spec.num_labels:
            self._head = self._dense("pooler"), self._dense("classifier")
        self._activate = _ACTIVATIONS[spec.activation]

    @property
    def device(self) -> torch.device:
        """The device of all parameters."""
        return self._embedding.device

    def forward(
        self, token_ids: torch.Tensor, token_types: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return the last hidden states of whole, concatenated texts.

        Args:
            token_ids: [num_tokens] int64.
            token_types: [num_tokens] int64: 1 for the second text of a pair, else 0.
            lengths: of the texts, in tokens.

        Returns:
            [num_tokens, hidden_size]
        """
        first = self.spec.position_offset
        steps = [torch.arange(first, first + length) for length in lengths]
        positions = torch.cat(steps).to(self.device)
        x = functional.embedding(token_ids, self._embedding)
        x = x + functional.embedding(positions, self._positions)
        if self._token_types is not None:
            # Families trained without token types have a single row.
            kinds = token_types.clamp(max=self._token_types.shape[0] - 1)
            x = x + functional.embedding(kinds, self._token_types)
        x = self._embedding_norm(x)
        bias = None if self._relative is None else self._bias
        buckets = make_buckets(lengths, self.device, bias)
        for layer in self._layers:
            attended = attend(layer.qkv(x), buckets, self.spec.num_heads)
            x = layer.attention_norm(layer.output(attended) + x)
            x = layer.mlp_norm(layer.down(self._activate(layer.up(x))) + x)
        return x

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the classification head to texts' first hidden states.

        [n, hidden_size] -> [n, num_labels] float32.
        """
        assert self._head is not None, "an encoder without a head was asked for scores"
        pooler, classifier = self._head
        activate = torch.tanh if self.spec.head_activation == "tanh" else torch.relu
        return classifier(activate(pooler(hidden))).float()

    def _bias(self, num_tokens: int) -> torch.Tensor:
        """Return the score bias for ``num_tokens`` tokens: [heads, num_tokens, num_tokens]."""
        assert self._relative is not None
        where = distance_buckets(num_tokens, self.spec.relative_buckets, self.device)
        return functional.embedding(where, self._relative).permute(2, 0, 1)

    # ------------------------------------------------------------ loading

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._weights[name]
        self.num_bytes += tensor.nbytes
        return tensor

    def _norm(self, name: str) -> LayerNorm:
        weights = NormWeights(self._tensor(name), self._tensor(f"{name}.bias"))
        return LayerNorm(weights, self.spec.norm_eps)

    def _dense(self, name: str) -> Linear:
        return DenseLinear(self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias"))

    def _layer(self, i: int, method: LinearMethod) -> _Layer:
        def linear(name: str) -> Linear:
            layer = method.make(
                load_matrix(self._weights, f"{i}.{name}.weight"), self._weights[f"{i}.{name}.bias"]
            )
            self.num_bytes += layer.num_bytes
            return layer

        return _Layer(
            qkv=linear("qkv"),
            output=linear("output"),
            attention_norm=self._norm(f"{i}.attention_norm"),
            up=linear("up"),
            down=linear("down"),
            mlp_norm=self._norm(f"{i}.mlp_norm"),
        )
