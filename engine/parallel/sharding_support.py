"""Refuse what sharded models do not support, before a process starts or a weight is read."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.recurrence import ChannelScanSpec, GatedDeltaSpec, MambaSpec
from engine.models.spec import DecoderSpec
from engine.parallel.stages import max_stages


def check_sharding_support(config: EngineConfig, spec: DecoderSpec) -> None:
    """Check that the model can be sharded as ``config`` asks.

    Raises:
        ModelLoadError: it cannot; one line that names the setting or what does not divide.
    """
    size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if stages > 1:
        for problem in _stage_problems(config, spec, stages):
            raise ModelLoadError(f"pipeline_parallel_size {stages}: {problem}")
    if size > 1:
        for problem in _tensor_parallel_problems(config, spec, size):
            raise ModelLoadError(f"tensor_parallel_size {size}: {problem}")


def _stage_problems(config: EngineConfig, spec: DecoderSpec, stages: int) -> Iterator[str]:
    yield from _draft_head_problems(config)
    if spec.altup is not None:
        yield "a stage hands on one residual stream, and the model has several"
    if spec.num_layers < stages:
        yield f"the model has {spec.num_layers} layers"
    most = max_stages(spec)
    if most < stages:
        yield (
            f"the model's {spec.num_layers} layers make {_format_stages(most)} at most: each has "
            "keys and values of its own, and those that share them, a selection or experts lie "
            "together"
        )


def _format_stages(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


def _draft_head_problems(config: EngineConfig) -> Iterator[str]:
    speculation = config.speculation
    if speculation is not None and speculation.uses_draft_head:
        yield (
            f"speculation {speculation.method!r} reads hidden states of one process; draft, ngram "
            "and suffix work"
        )


def _tensor_parallel_problems(config: EngineConfig, spec: DecoderSpec, size: int) -> Iterator[str]:
    if config.batch_invariant:
        yield "sums over ranks are not batch-invariant, so not with batch_invariant"
    yield from _draft_head_problems(config)
    for heads, what in _kv_heads(spec).items():
        if heads % size and size % heads:
            yield f"{what} ({heads}) neither divides it nor is divided by it"
    yield from _state_problems(spec, size)
    for what, count in _divided_sizes(spec, expert_parallel=config.enable_expert_parallel):
        if count % size:
            yield f"{what} ({count}) cannot be divided by it"
    if config.enable_expert_parallel and (spec.moe is None or spec.moe.num_experts < size):
        count = 0 if spec.moe is None else spec.moe.num_experts
        yield f"enable_expert_parallel, and the model has {count} experts"
    if spec.altup is not None:
        yield "the gates of an MLP are cut off by their mean over all ranks' parts"
    if spec.vocab_size < size:
        yield f"there are {spec.vocab_size} tokens"
    if spec.wide_qk_norm and spec.norm.kind != "rms":
        yield "norms over all heads are shared out only where they are RMS norms"


def _kv_heads(spec: DecoderSpec) -> dict[int, str]:
    """Return the layers' distinct numbers of KV heads, with their config.json names."""
    if spec.latent is not None or not spec.windows:
        return {}
    others = [layer.heads.num_kv_heads for layer in spec.layers if layer.heads is not None]
    # If windowed layers have their own number, the model's is that of full attention layers.
    name = "num_global_key_value_heads" if others else "num_key_value_heads"
    return {spec.num_kv_heads: name} | dict.fromkeys(others, "num_key_value_heads")


def _state_problems(spec: DecoderSpec, size: int) -> Iterator[str]:
    recurrence = spec.recurrence
    if isinstance(recurrence, GatedDeltaSpec):
        heads = recurrence.num_key_heads
        if heads % size and size % heads:
            yield f"linear_num_key_heads ({heads}) neither divides it nor is divided by it"
    if isinstance(recurrence, MambaSpec) and recurrence.num_groups > 1:
        groups = recurrence.num_groups
        if groups % size:
            yield f"{recurrence.groups_key} ({groups}) is more than one and cannot be divided by it"


def _divided_sizes(spec: DecoderSpec, *, expert_parallel: bool) -> Iterator[tuple[str, int]]:
    """Yield what is divided equally among ranks, with its config.json name."""
    if spec.windows:
        layers = (spec.for_layer(layer) for layer in spec.layers if not layer.recurrent)
        for num_heads in dict.fromkeys(layer.num_heads for layer in layers):
            yield "num_attention_heads", num_heads
    is_beside = spec.moe is not None and spec.moe.with_mlp
    if any(layer.mlp and (is_beside or not layer.experts) for layer in spec.layers):
        yield "intermediate_size", spec.intermediate_size
    if spec.moe is not None:
        if not expert_parallel:
            yield spec.moe.width_key, spec.moe.intermediate_size
        yield spec.moe.shared_width_key, spec.moe.shared_intermediate_size
    if isinstance(spec.recurrence, GatedDeltaSpec):
        yield "linear_num_value_heads", spec.recurrence.num_value_heads
    elif isinstance(spec.recurrence, MambaSpec):
        yield spec.recurrence.heads_key, spec.recurrence.num_heads
    elif isinstance(spec.recurrence, ChannelScanSpec):
        yield spec.recurrence.width_key, spec.recurrence.channels
    elif spec.recurrence is not None:
        yield "hidden_size", spec.recurrence.channels
