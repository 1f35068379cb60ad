"""The encoder: one implementation for all families, made from a spec and weights.

embedding + positions + token types ─► norm ─► [ attention ─ + ─ norm ─ MLP ─ + ─ norm ] x layers
embedding ─► norm ─► [ norm ─ attention ─ + ─ norm ─ MLP ─ + ] x layers ─► norm      with pre-norm

In a sandwich, attention and MLP have a norm behind them as well, before the sum. Behind both may be
a third part, which the embeddings' projection for the layer gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.models.encoder.attention import Bucket, attend, make_buckets
from engine.models.encoder.relative_positions import distance_buckets
from engine.models.encoder.spec import EncoderSpec, HeadActivation
from engine.models.encoder.weights import has_attention_norm
from engine.models.linear import DenseLinear, Linear, LinearMethod
from engine.models.loader import Weights, load_matrix
from engine.models.norms import IdentityNorm, LayerNorm, Norm, NormWeights, RmsNorm
from engine.models.rope import inverse_frequencies
from kernels.reference import operations
from kernels.reference.layers import rms_norm, rope, rope_tables

_ACTIVATIONS: dict[HeadActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}
_Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [num_tokens, 1, head_dim / 2]


@dataclass(frozen=True, slots=True)
class _PerLayer:
    """``x += after(output(activation(gate(x)) * own))``, where ``own`` is the layer's."""

    gate: Linear
    output: Linear
    after: Norm


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    output: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    mlp_norm: Norm
    attention_after: Norm
    mlp_after: Norm
    qk_norms: tuple[Norm, Norm] | None
    per_layer: _PerLayer | None
    scale: torch.Tensor | None  # [1] float32
    num_kv_heads: int
    head_dim: int
    is_local: bool


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
        self._positions = self._tensor("positions") if spec.rope is None else None
        self._token_types = self._tensor("token_types") if spec.num_token_types else None
        self._relative = self._tensor("relative_bias") if spec.relative_buckets else None
        # Rounded to the model's dtype, as in the code that checkpoints were trained with.
        scale = torch.tensor(spec.embedding_scale, dtype=self._embedding.dtype)
        self._embedding_scale = scale.item()
        self._embedding_norm = self._norm_if("embedding_norm", spec.embedding_norm)
        self._layers = tuple(self._layer(i, method) for i in range(spec.num_layers))
        self._per_layer: tuple[Linear, Norm] | None = None
        if spec.per_layer_size:
            projection = self._dense("per_layer", has_bias=False)
            self._per_layer = projection, self._norm("per_layer_norm")
        self._projection: Linear | None = None
        if spec.projected_size:
            self._projection = self._dense("projection", has_bias=False)
        self._final_norm = self._norm_if("norm", spec.placement != "post")
        self._head: tuple[Linear, Norm, Linear] | None = None
        if spec.num_labels:
            norm = self._norm_if("head_norm", spec.head.has_norm)
            pooler = self._dense("pooler", has_bias=spec.head.bias)
            self._head = pooler, norm, self._dense("classifier")
        self._activate = _ACTIVATIONS[spec.activation]
        self._no_weight = torch.ones(1, device=self.device)
        # Of global layers, and of local ones.
        longest = spec.max_context_len
        _, global_width = spec.global_heads or (0, spec.head_dim)
        ropes = ((spec.rope, global_width), (spec.local_rope, spec.head_dim))
        made = [
            inverse_frequencies(kind, width, longest, longest)
            for kind, width in ropes
            if kind is not None
        ]
        self._frequencies = [(each.to(self.device), scale) for each, scale in made]

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
            [num_tokens, output_size]
        """
        first = self.spec.position_offset
        steps = [torch.arange(first, first + length) for length in lengths]
        positions = torch.cat(steps).to(self.device)
        x = functional.embedding(token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if self._positions is not None:
            x = x + functional.embedding(positions, self._positions)
        if self._token_types is not None:
            # Families trained without token types have a single row.
            kinds = token_types.clamp(max=self._token_types.shape[0] - 1)
            x = x + functional.embedding(kinds, self._token_types)
        x = self._embedding_norm(x)
        bias = None if self._relative is None else self._bias
        window = self.spec.window if self.spec.local_layers else None
        buckets = make_buckets(lengths, self.device, bias, window)
        rotations = [
            rope_tables(positions, frequencies, scale) for frequencies, scale in self._frequencies
        ]
        own = None if self._per_layer is None else self._own_parts(x)
        for i, layer in enumerate(self._layers):
            rotation = rotations[int(layer.is_local)] if rotations else None
            if self.spec.placement != "post":
                attended = self._attend(layer, layer.attention_norm(x), buckets, rotation)
                x = x + layer.attention_after(attended)
                x = x + layer.mlp_after(self._mlp(layer, layer.mlp_norm(x)))
            else:
                x = layer.attention_norm(self._attend(layer, x, buckets, rotation) + x)
                x = layer.mlp_norm(self._mlp(layer, x) + x)
            if layer.per_layer is not None:
                assert own is not None
                gated = self._activate(layer.per_layer.gate(x)) * own[:, i]
                x = x + layer.per_layer.after(layer.per_layer.output(gated))
            if layer.scale is not None:
                x = x * layer.scale.to(x.dtype)
        x = self._final_norm(x)
        return x if self._projection is None else self._projection(x)

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the classification head to texts' pooled hidden states (``HeadSpec.pooling``).

        [n, hidden_size] -> [n, num_labels] float32.
        """
        assert self._head is not None, "an encoder without a head was asked for scores"
        pooler, norm, classifier = self._head
        activate = _ACTIVATIONS[self.spec.head.activation]
        return classifier(norm(activate(pooler(hidden)))).float()

    def _attend(
        self, layer: _Layer, x: torch.Tensor, buckets: Sequence[Bucket], rotation: _Rotation | None
    ) -> torch.Tensor:
        """Return the attention's output: [num_tokens, hidden_size] -> the same."""
        fused, spec = layer.qkv(x), self.spec
        num_heads, num_kv_heads, head_dim = spec.num_heads, layer.num_kv_heads, layer.head_dim
        size = (num_heads + num_kv_heads) * head_dim
        if spec.value_norm:
            values = fused[:, size:].unflatten(1, (num_kv_heads, head_dim))
            fused[:, size:] = rms_norm(values, self._no_weight, spec.norm_eps).flatten(1)
        if layer.qk_norms is not None or rotation is not None:
            turned = fused[:, :size]  # queries and keys
            heads = turned.reshape(-1, num_heads + num_kv_heads, head_dim)
            if layer.qk_norms is not None:
                parts = heads.split((num_heads, num_kv_heads), dim=1)
                normed = [norm(part) for norm, part in zip(layer.qk_norms, parts, strict=True)]
                heads = torch.cat(normed, dim=1)
            if rotation is not None:
                heads = rope(heads, *rotation)
            turned.copy_(heads.view(turned.shape))
        attended = attend(
            fused,
            buckets,
            num_heads,
            num_kv_heads,
            is_local=layer.is_local,
            scale=spec.attention_scale,
        )
        return layer.output(attended)

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output: [num_tokens, hidden_size] -> the same."""
        inner = layer.up(x)
        if not self.spec.gated:
            return layer.down(self._activate(inner))
        gate, up = inner.chunk(2, dim=-1)
        if self.spec.gate_last:
            gate, up = up, gate
        return layer.down(self._activate(gate) * up)

    def _own_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Project the embeddings for each layer: [num_tokens, hidden_size] -> [num_tokens, layers,
        per_layer_size]."""
        assert self._per_layer is not None
        projection, norm = self._per_layer
        parts = projection(x) * self.spec.hidden_size**-0.5
        return norm(parts.unflatten(1, (self.spec.num_layers, -1)))

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

    def _norm(self, name: str) -> Norm:
        if (offset := self.spec.rms_offset) is not None:
            return RmsNorm(self._tensor(name).add_(offset), self.spec.norm_eps, operations)
        bias = self._tensor(f"{name}.bias") if self.spec.norm_bias else None
        return LayerNorm(NormWeights(self._tensor(name), bias), self.spec.norm_eps)

    def _norm_if(self, name: str, exists: bool) -> Norm:
        return self._norm(name) if exists else IdentityNorm()

    def _dense(self, name: str, *, has_bias: bool = True) -> Linear:
        bias = self._tensor(f"{name}.bias") if has_bias else None
        return DenseLinear(self._tensor(f"{name}.weight"), bias)

    def _layer(self, i: int, method: LinearMethod) -> _Layer:
        def linear(name: str) -> Linear:
            layer = method.make(
                load_matrix(self._weights, f"{i}.{name}.weight"),
                self._weights.get(f"{i}.{name}.bias"),
            )
            self.num_bytes += layer.num_bytes
            return layer

        is_sandwich = self.spec.placement == "sandwich"
        per_layer = None
        if self.spec.per_layer_size:
            after = self._norm(f"{i}.per_layer_after")
            per_layer = _PerLayer(linear("per_layer_gate"), linear("per_layer_output"), after)
        num_kv_heads, head_dim = self.spec.kv_heads(i)
        return _Layer(
            qkv=linear("qkv"),
            output=linear("output"),
            attention_norm=self._norm_if(f"{i}.attention_norm", has_attention_norm(self.spec, i)),
            up=linear("up"),
            down=linear("down"),
            mlp_norm=self._norm(f"{i}.mlp_norm"),
            attention_after=self._norm_if(f"{i}.attention_after", is_sandwich),
            mlp_after=self._norm_if(f"{i}.mlp_after", is_sandwich),
            qk_norms=(self._norm(f"{i}.query_norm"), self._norm(f"{i}.key_norm"))
            if self.spec.qk_norm
            else None,
            per_layer=per_layer,
            scale=self._tensor(f"{i}.scale") if self.spec.layer_scales else None,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            is_local=i in self.spec.local_layers,
        )
