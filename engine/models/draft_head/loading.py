"""Make a draft head's modules from its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.errors import ModelLoadError
from engine.models.draft_head.network import DraftHeadModules
from engine.models.draft_head.spec import DraftHeadSpec, canonical_name
from engine.models.linear import LinearMethod
from engine.models.loader import Weights, load_matrix
from engine.models.modules import Modules, layer_bytes, make_embedding, make_layer
from engine.models.norms import NormWeights
from engine.models.safetensors import Header, read_tensor
from engine.models.spec import DecoderSpec


def make_draft_head(
    spec: DraftHeadSpec,
    weights: Weights,
    method: LinearMethod,
    model: tuple[DecoderSpec, Modules],
    draft_vocab_ids: torch.Tensor | None,
    *,
    stacked: bool = False,
) -> tuple[DraftHeadModules, int]:
    """Read the weights and make the layer; ``stacked``: its experts become tensors of all of them.

    Args:
        model: the target model, whose matrices it borrows where it has none.
        draft_vocab_ids: see ``DraftHeadModules``.

    Returns:
        The modules, and the bytes of what is not borrowed.

    Raises:
        ModelLoadError: they cannot be read, or do not fit on the device.
    """

    def norm(name: str) -> NormWeights | None:
        weight = weights.get(name)
        return None if weight is None else NormWeights(weight + spec.layer.norm.offset)

    model_spec, borrowed = model
    layer = make_layer(spec.layer, weights, method, 0, stacked=stacked)
    fc = method.make(load_matrix(weights, "fc.weight"), weights.get("fc.bias"))
    num_bytes = layer_bytes(layer) + fc.num_bytes
    embed, head, head_spec = borrowed.embed, borrowed.head, model_spec
    if spec.has_embedding:
        embed, table_bytes = make_embedding(load_matrix(weights, "embedding"), method)
        num_bytes += table_bytes
    if spec.has_lm_head:
        head = method.make_head(load_matrix(weights, "head"))
        head_spec = spec.layer
        num_bytes += head.num_bytes
    assert embed is not None  # stages are not drafted for
    assert head is not None  # a generating model has one
    modules = DraftHeadModules(
        fc=fc,
        token_norm=norm("token_norm"),
        state_norm=norm("state_norm"),
        layer=layer,
        norm=norm("norm"),
        embed=embed,
        head=head,
        head_spec=head_spec,
        draft_vocab_ids=draft_vocab_ids,
    )
    return modules, num_bytes


def read_draft_vocab_ids(
    spec: DraftHeadSpec, headers: Sequence[Header], device: torch.device
) -> torch.Tensor | None:
    """Return the token ids that an EAGLE-3 head scores; None if it scores all.

    They come from ``d2t``, the offset of each id from its place. Without ``headers``, for random
    weights, they are the first ids.

    Raises:
        ModelLoadError: they are not valid.
    """
    count = spec.draft_vocab_size
    if spec.kind != "eagle3" or count == spec.layer.vocab_size:
        return None
    ids = torch.arange(count)
    for header in headers:
        for entry in header.entries.values():
            if canonical_name(spec, entry.name) != "d2t":
                continue
            if entry.shape != (count,) or entry.dtype not in (torch.int64, torch.int32):
                raise ModelLoadError(
                    f"{header.path}: tensor 'd2t' must be {count} integers, one a draft token"
                )
            with header.path.open("rb") as file:
                ids = ids + read_tensor(file, entry)
            if ids.min() < 0 or ids.max() >= spec.layer.vocab_size or ids.unique().numel() != count:
                raise ModelLoadError(
                    f"{header.path}: tensor 'd2t' names tokens twice, or that the model has not"
                )
    return ids.to(device)
