"""A decoder's parameters in the form it computes with: linear layers made, the rest as loaded.

Parameters are read in layer order, and the sources of a layer are freed before the next layer is
read: a model that is quantised at load is never in memory unquantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from engine.models.altup_weights import (
    AltUpEnds,
    AltUpLayerWeights,
    make_altup_ends,
    make_altup_layer,
)
from engine.models.cross_attention import CrossAttentionWeights, make_cross_attention
from engine.models.expert_weights import (
    ExpertsAlongsideWeights,
    ExpertWeights,
    MlpWeights,
    make_experts,
    make_experts_alongside,
)
from engine.models.latent import LatentWeights, latent_qkv_row_order, make_latent
from engine.models.linear import (
    BiasedHead,
    DenseLinear,
    Head,
    Linear,
    LinearMethod,
    Weight,
    permute_outputs,
)
from engine.models.loader import Weights, load_matrix
from engine.models.norms import NormGate, NormWeights
from engine.models.per_layer_weights import (
    PerLayerEmbeddingWeights,
    PerLayerInputWeights,
    make_per_layer,
    make_per_layer_input,
)
from engine.models.recurrent import RecurrentWeights, make_recurrent
from engine.models.rope import rotary_order
from engine.models.spec import DecoderSpec
from kernels.attention import LayerAttention


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The attention weights of a layer."""

    attention: LayerAttention
    rope: int | None  # index of a rotary embedding; None: no position embedding
    qkv: Linear  # any output gates come first
    # [num_heads + num_kv_heads, head_dim]; [1, head_dim] in a layer without keys
    qk_norm: torch.Tensor | None
    wide_query_norm: NormWeights | None  # [query_size]
    wide_key_norm: NormWeights | None  # [kv_size]
    output: Linear
    latent: LatentWeights | None = None  # if set, ``qkv`` is its first projection
    query_scale: torch.Tensor | None = None  # [head_dim], a factor of rotated queries
    value_norm: torch.Tensor | None = None  # [head_dim], of each head's value
    qk_layer_norm: torch.Tensor | None = None  # [num_heads + num_kv_heads, head_dim]

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        parts = (self.qkv, self.output, self.latent, self.wide_query_norm, self.wide_key_norm)
        num_bytes = sum(part.num_bytes for part in parts if part is not None)
        head_norms = (self.qk_norm, self.qk_layer_norm)
        return num_bytes + sum(norm.nbytes for norm in head_norms if norm is not None)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Norms that its placement lacks are None."""

    attention_norm: NormWeights | None
    mixer: AttentionWeights | RecurrentWeights
    post_attention_norm: NormWeights | None
    mlp_norm: NormWeights | None
    mlp: MlpWeights | ExpertWeights | None  # None: the layer ends with its mixer
    post_mlp_norm: NormWeights | None
    scale: float = 1.0  # of the residual stream after the layer
    experts_alongside: ExpertsAlongsideWeights | None = None  # experts beside ``mlp``
    experts_aside: ExpertWeights | None = None  # whose result is added after the next layer
    per_layer_input: PerLayerInputWeights | None = None  # for its per-layer embedding
    recurrence: RecurrentWeights | None = None  # of a hybrid layer, whose ``mixer`` is attention
    altup: AltUpLayerWeights | None = None  # for several residual streams
    cross_attention: CrossAttentionWeights | None = None  # between ``mixer`` and ``mlp``


@dataclass(frozen=True, slots=True)
class Modules:
    """Everything loaded of a model, or of a pipeline stage."""

    # ids [n] -> [n, hidden_size]; None: in another stage
    embed: Callable[[torch.Tensor], torch.Tensor] | None
    embedding_norm: NormWeights | None
    positions: torch.Tensor | None  # [max_position_embeddings, hidden_size], where learned
    layers: tuple[Layer, ...]
    norm: NormWeights | None  # None: in another stage
    head: Head | None  # scores tokens or texts; None: only hidden states
    num_bytes: int
    per_layer: PerLayerEmbeddingWeights | None = None  # per-layer embeddings
    altup: AltUpEnds | None = None  # of several residual streams

    @property
    def sample_parameter(self) -> torch.Tensor:
        """A parameter with the device and dtype of the model."""
        first = self.layers[0]
        norm = self.norm or first.attention_norm or first.post_attention_norm
        assert norm is not None, "a layer without any norm"
        return norm.weight


class _EmbedAndHead(NamedTuple):
    """What precedes the layers, and the head."""

    embed: Callable[[torch.Tensor], torch.Tensor]
    head: Head | None
    num_bytes: int


def make_modules(
    spec: DecoderSpec, weights: Weights, method: LinearMethod, *, stacked: bool = False
) -> Modules:
    """Read the weights and make the layers, in order.

    ``stacked``: a layer's experts become tensors of all of them.

    Raises:
        ModelLoadError: they cannot be read, or do not fit on the device.
    """
    numbers = range(spec.first_layer, spec.first_layer + spec.num_layers)
    layers = tuple(make_layer(spec, weights, method, i, stacked=stacked) for i in numbers)
    norm, embedding_norm = _norm(spec, weights, "norm"), _norm(spec, weights, "embedding_norm")
    positions = weights.get("positions")
    ends = _make_embed_and_head(spec, weights, method) if spec.has_embed_and_head else None
    num_bytes = sum(layer_bytes(layer) for layer in layers)
    per_layer = None
    if spec.per_layer_size and spec.has_embed_and_head:
        table = make_embedding(load_matrix(weights, "per_layer.embedding"), method)
        per_layer = make_per_layer(weights, method, *table)
    altup = None if spec.altup is None else make_altup_ends(spec.altup, weights, method)
    held = (norm, embedding_norm, ends, per_layer, altup)
    num_bytes += sum(part.num_bytes for part in held if part is not None)
    num_bytes += 0 if positions is None else positions.nbytes
    return Modules(
        embed=None if ends is None else ends.embed,
        embedding_norm=embedding_norm,
        positions=positions,
        layers=layers,
        norm=norm,
        head=None if ends is None else ends.head,
        num_bytes=num_bytes,
        per_layer=per_layer,
        altup=altup,
    )


def _make_embed_and_head(
    spec: DecoderSpec, weights: Weights, method: LinearMethod
) -> _EmbedAndHead:
    embedding = load_matrix(weights, "embedding")
    if not spec.is_generative:
        embed, num_bytes = make_embedding(embedding, method)
        score = DenseLinear(weights["score"], None) if spec.num_labels else None
        return _EmbedAndHead(embed, score, num_bytes + (0 if score is None else score.num_bytes))
    head = method.make_head(embedding if spec.tie_word_embeddings else load_matrix(weights, "head"))
    if spec.head_bias:
        head = BiasedHead(head, weights["head.bias"])
    if spec.tie_word_embeddings:
        return _EmbedAndHead(head.rows, head, head.num_bytes)
    embed, num_bytes = make_embedding(embedding, method)
    return _EmbedAndHead(embed, head, num_bytes + head.num_bytes)


def make_embedding(
    embedding: Weight, method: LinearMethod
) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """Return the embedding look-up, and the table's bytes."""
    if isinstance(embedding, torch.Tensor):
        return partial(functional.embedding, weight=embedding), embedding.nbytes
    table = method.make_head(embedding)
    return table.rows, table.num_bytes


def make_layer(
    spec: DecoderSpec,
    weights: Mapping[str, torch.Tensor],
    method: LinearMethod,
    i: int,
    *,
    stacked: bool = False,
) -> Layer:
    """Make a single layer ``i`` of the whole model, which takes ownership of its parameters.

    Raises as reading the parameters does.
    """

    def linear(name: str) -> Linear:
        return method.make(
            load_matrix(weights, f"{i}.{name}.weight"), weights.get(f"{i}.{name}.bias")
        )

    def norm(name: str) -> NormWeights | None:
        found, gate = _norm(spec, weights, f"{i}.{name}"), f"{i}.{name}.gate_"
        if found is None or f"{gate}down.weight" not in weights:
            return found
        down, up = (
            method.make_unquantized(weights[f"{gate}{way}.weight"]) for way in ("down", "up")
        )
        return found._replace(gate=NormGate(down, up))

    layer, attention_norm = spec.layers[i - spec.first_layer], norm("attention_norm")
    recurrence: RecurrentWeights | None = None
    if layer.has_recurrence and spec.recurrence is not None:
        recurrence = make_recurrent(spec.recurrence, weights, method, i)
    mixer: AttentionWeights | RecurrentWeights
    if layer.recurrent and recurrence is not None:
        mixer, recurrence = recurrence, None
    else:
        mixer = _make_attention(spec.for_layer(layer), weights, method, i, attention_norm)
    is_beside = layer.experts and spec.moe is not None and spec.moe.with_mlp
    mlp: MlpWeights | ExpertWeights | None = None
    if layer.experts and spec.moe and not is_beside:
        mlp = make_experts(spec.moe, weights, method, i, stacked=stacked)
    elif layer.mlp:
        mlp = MlpWeights(linear("gate_up"), linear("down"), _xielu(weights, i))
    return Layer(
        attention_norm=attention_norm,
        mixer=mixer,
        post_attention_norm=norm("attention_after"),
        mlp_norm=norm("mlp_norm"),
        mlp=mlp,
        post_mlp_norm=norm("mlp_after"),
        scale=weights[f"{i}.scale"].item() if spec.layer_scales else 1.0,
        per_layer_input=make_per_layer_input(weights, method, i),
        experts_alongside=make_experts_alongside(spec, weights, method, i, stacked=stacked)
        if is_beside
        else None,
        experts_aside=make_experts(spec.moe, weights, method, i, stacked=stacked)
        if layer.experts_aside and spec.moe
        else None,
        recurrence=recurrence,
        altup=make_altup_layer(weights, method, i),
        cross_attention=make_cross_attention(spec, weights, method, i),
    )


def _make_attention(
    spec: DecoderSpec,
    weights: Mapping[str, torch.Tensor],
    method: LinearMethod,
    i: int,
    like: NormWeights | None,
) -> AttentionWeights:
    layer = spec.layers[i - spec.first_layer]
    output = load_matrix(weights, f"{i}.output.weight"), weights.get(f"{i}.output.bias")
    return AttentionWeights(
        attention=LayerAttention(
            *(spec.score_scale, layer.window, spec.attention_softcap),
            weights.get(f"{i}.sinks"),
            layer.chunk,
            layer.bidirectional_images,
            slopes=_slopes(spec, like),
        ),
        rope=int(layer.local_rope) if layer.rope and spec.rope else None,
        qkv=method.make(*_query_key_value(spec, weights, i)),
        qk_norm=_head_norms(spec, weights, i, like),
        wide_query_norm=_wide_norm(spec, weights, f"{i}.query_norm"),
        wide_key_norm=_wide_norm(spec, weights, f"{i}.key_norm"),
        output=method.make(*output),
        latent=make_latent(spec, weights, method, i),
        query_scale=_query_scale(spec, weights, i),
        value_norm=_value_norm(spec, like),
        qk_layer_norm=_joined_norms(spec, weights, i) if spec.qk_layer_norm else None,
    )


def _slopes(spec: DecoderSpec, like: NormWeights | None) -> torch.Tensor | None:
    if spec.alibi_slopes is None:
        return None
    assert like is not None
    return like.weight.new_tensor(spec.alibi_slopes, dtype=torch.float32)


def _xielu(weights: Mapping[str, torch.Tensor], i: int) -> torch.Tensor | None:
    """Return the coefficients of layer ``i``; a checkpoint's first two are made positive."""
    stored = weights.get(f"{i}.xielu")
    if stored is None:
        return None
    rising, falling, slope, edge = stored.unbind()
    falling = slope + functional.softplus(falling)
    return torch.stack((functional.softplus(rising), falling, slope, edge))


def _query_key_value(
    spec: DecoderSpec, weights: Mapping[str, torch.Tensor], i: int
) -> tuple[Weight, torch.Tensor | None]:
    """Return the fused projection, with queries and keys in the order the kernels rotate.

    If values are keys, their rows occur twice; so do some of values narrower than keys.
    """
    weight, bias = load_matrix(weights, f"{i}.qkv.weight"), weights.get(f"{i}.qkv.bias")
    if spec.qkv_bias and not spec.key_bias:
        query, value = weights[f"{i}.query.bias"], weights[f"{i}.value.bias"]
        bias = torch.cat((query, query.new_zeros(spec.kv_size), value))
    order = qkv_row_order(spec)
    if order is None:
        return weight, bias
    return permute_outputs(weight, order), None if bias is None else bias[order.to(bias.device)]


def qkv_row_order(spec: DecoderSpec) -> torch.Tensor | None:
    """Return the row order of the fused projection; None: as loaded."""
    if spec.latent is not None:
        return latent_qkv_row_order(spec, spec.latent)
    order = rotary_order(spec)
    if order is None and not spec.keys_are_values and spec.value_head_dim is None:
        return None
    rows = torch.arange(sum(spec.qkv_sizes))
    turned = spec.gate_size + spec.query_size + spec.kv_size
    gates, heads, values = rows[: spec.gate_size], rows[spec.gate_size : turned], rows[turned:]
    if spec.keys_are_values:
        values = heads[spec.query_size :]
    elif spec.value_head_dim is not None:
        # As wide as keys; what follows a value is cut off after attention, so any rows will do.
        repeated = torch.arange(spec.head_dim) % spec.value_head_dim
        values = values.view(-1, spec.value_head_dim)[:, repeated].flatten()
    if order is not None:
        heads = heads.view(-1, spec.head_dim)[:, order].flatten()
    return torch.cat((gates, heads, values))


def _head_norms(
    spec: DecoderSpec, weights: Mapping[str, torch.Tensor], i: int, like: NormWeights | None
) -> torch.Tensor | None:
    """Head norms of queries and keys, [num_heads + num_kv_heads, head_dim]; None: not normed."""
    rotates = spec.layers[i - spec.first_layer].rope
    is_unit = spec.unit_qk_norm and (rotates or spec.unit_qk_norm_without_rope)
    if spec.qk_norm_after_rope or is_unit:
        assert like is not None
        return like.weight.new_ones((spec.num_heads + spec.num_kv_heads, spec.head_dim))
    if not spec.qk_norm:
        return None
    if spec.uses_shared_kv:
        query = _norm(spec, weights, f"{i}.query_norm")
        assert query is not None
        return query.weight.unsqueeze(0)
    return _joined_norms(spec, weights, i)


def _joined_norms(spec: DecoderSpec, weights: Mapping[str, torch.Tensor], i: int) -> torch.Tensor:
    """The norms of all heads of queries and keys, which may share theirs, with dimensions in the
    order the kernels rotate: [num_heads + num_kv_heads, head_dim]."""
    query, key = (_norm(spec, weights, f"{i}.{name}") for name in ("query_norm", "key_norm"))
    assert query is not None
    assert key is not None
    norms = torch.cat(
        (query.weight.expand(spec.num_heads, -1), key.weight.expand(spec.num_kv_heads, -1))
    )
    order = rotary_order(spec)
    return norms if order is None else norms[:, order.to(norms.device)].contiguous()


def _query_scale(
    spec: DecoderSpec, weights: Mapping[str, torch.Tensor], i: int
) -> torch.Tensor | None:
    """Return the factor that remains of norms after rope.

    Rope preserves a head's length, so the normalisation may come before it. The weights may not,
    but a score depends only on the product of both.
    """
    if not spec.qk_norm_after_rope:
        return None
    scale = weights[f"{i}.query_norm"] * weights[f"{i}.key_norm"]
    order = rotary_order(spec)
    return scale if order is None else scale[order.to(scale.device)]


def _value_norm(spec: DecoderSpec, like: NormWeights | None) -> torch.Tensor | None:
    if not spec.unit_value_norm or spec.uses_shared_kv:
        return None
    assert like is not None
    return like.weight.new_ones(spec.head_dim)


def _wide_norm(
    spec: DecoderSpec, weights: Mapping[str, torch.Tensor], name: str
) -> NormWeights | None:
    """A norm over all heads of a query or key, with dimensions in the order the kernels rotate."""
    wide, order = _norm(spec, weights, name) if spec.wide_qk_norm else None, rotary_order(spec)
    if wide is None or order is None:
        return wide
    heads = wide.weight.view(-1, spec.head_dim)
    return NormWeights(heads[:, order.to(heads.device)].flatten())


def _norm(spec: DecoderSpec, weights: Mapping[str, torch.Tensor], name: str) -> NormWeights | None:
    weight = weights.get(name)
    if weight is None:
        return None
    offset = spec.norm.offset_of(name)
    if offset:
        weight += offset
    return NormWeights(weight, weights.get(f"{name}.bias"))


def layer_bytes(layer: Layer) -> int:
    """Return a layer's size in memory."""
    norms = (layer.attention_norm, layer.mlp_norm, layer.post_attention_norm, layer.post_mlp_norm)
    num_bytes = sum(norm.num_bytes for norm in norms if norm is not None)
    parts = (
        *(layer.mlp, layer.experts_alongside, layer.per_layer_input, layer.recurrence),
        *(layer.cross_attention, layer.altup, layer.experts_aside),
    )
    num_bytes += sum(part.num_bytes for part in parts if part is not None)
    return num_bytes + layer.mixer.num_bytes
