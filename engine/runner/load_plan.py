"""What is decided, and refused, before a decoder's weights are read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.attention import other_heads, selection
from engine.models.checkpoint import ModelConfig
from engine.models.loader import weights_bytes
from engine.models.spec import DecoderSpec
from engine.parallel.shard import Shard, shard_spec
from engine.quantization import choose_method
from engine.quantization.cpu import PanelMethod
from engine.quantization.method import WeightMethod
from engine.runner.audio_load import AudioPlan, plan_audio
from engine.runner.device import (
    cache_codes,
    choose_device,
    choose_dtype,
    set_threads,
)
from engine.runner.image_load import ImagePlan, plan_images
from engine.runner.kernels import choose_kernels
from engine.runner.weight_files import WeightFiles, find_weights
from engine.speculation.load import DraftPlan, plan_draft
from engine.speculation.load_head import HeadPlan, plan_head
from kernels.attention import AttentionSpec, SourcePlaces
from kernels.operations import Kernels

# On a GPU a block of keys is one tile of the attention kernels. On a CPU caches are small, and the
# unused part of each sequence's last block counts.
_BLOCK_SIZES = {"cpu": 16, "cuda": 64}


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The decisions made before any weight is read."""

    config: EngineConfig
    model: ModelConfig
    full_spec: DecoderSpec  # the whole model
    shard: Shard | None  # this process's rank; None: it holds the whole model
    spec: DecoderSpec  # what this process computes
    attention: AttentionSpec
    kernels: Kernels
    num_threads: int
    files: WeightFiles
    method: WeightMethod
    draft: DraftPlan | None
    head: HeadPlan | None
    images: ImagePlan | None
    audio: AudioPlan | None

    @property
    def has_panels(self) -> bool:
        """Whether native kernels multiply the dense weights."""
        return self.kernels.name == "cpu" and isinstance(self.method.dense, PanelMethod)

    @property
    def is_capturable(self) -> bool:
        """Whether decode steps may be captured as CUDA graphs, or recorded on a CPU."""
        may = not self.config.enforce_eager and self.spec.is_generative
        return may and self.kernels.attention.is_capturable

    @property
    def captures_steps(self) -> bool:
        """Whether steps are captured as CUDA graphs, if those of the other ranks are."""
        is_whole = self.shard is None or self.shard.num_stages == 1
        return self.is_capturable and is_whole and self.attention.device.type == "cuda"

    @property
    def stack_experts(self) -> bool:
        """Whether a layer's experts are stacked into one tensor."""
        if self.kernels.name != "cpu":
            return self.kernels.name == "triton"
        return not (self.has_panels or self.has_codes)

    @property
    def has_codes(self) -> bool:
        """Whether weights are quantised, at load or in their files."""
        return self.config.quantization is not None or self.files.codes is not None


def make_plan(
    config: EngineConfig,
    model: ModelConfig,
    full_spec: DecoderSpec,
    shard: Shard | None = None,
    *,
    num_threads: int | None = None,
) -> LoadPlan:
    """Decide how the model, or one rank's shard of it, is held and computed.

    ``num_threads`` repeats the decision of an earlier load.

    Raises:
        ModelLoadError: it cannot be served as configured.
    """
    spec = full_spec if shard is None else shard_spec(full_spec, shard)
    place = shard.number % config.ranks_per_node if shard else 0  # rank on this machine
    device = choose_device(config.device, config.first_device + place)
    dtype = choose_dtype(config.dtype, spec.checkpoint_dtype, device)
    files = find_weights(config, model, dtype, device, config.seed)
    codes = cache_codes(config.cache.dtype)
    if codes is not None and spec.value_dim is not None:
        raise ModelLoadError(
            f"kv_cache_dtype {config.cache.dtype!r}: a cache of latents is not rounded here; it is "
            "small as it is"
        )
    block_size = config.cache.block_size or _BLOCK_SIZES[device.type]
    images = plan_images(config, model, files, full_spec, device)
    audio = plan_audio(config, model, files, full_spec)
    attention = attention_spec(spec, block_size, dtype, device, codes)
    if images is not None and spec.bidirectional_images:
        attention = replace(attention, is_bidirectional=True)
    kernels = choose_kernels(config.attention_backend, attention, invariant=config.batch_invariant)
    draft = plan_draft(config, spec, attention)
    head = plan_head(config, model, spec, files.headers, files.quant_format, attention)
    if num_threads is None:
        size = weights_bytes(spec, dtype)
        num_threads = set_threads(config.num_threads, size, shares_cores=kernels.name == "cpu")
    method = choose_method(
        config.quantization,
        dtype,
        device,
        invariant=config.batch_invariant,
        checkpoint_format=files.codes,
    )
    plan = LoadPlan(
        config=config,
        model=model,
        full_spec=full_spec,
        shard=shard,
        spec=spec,
        attention=attention,
        kernels=kernels,
        num_threads=num_threads,
        files=files,
        method=method,
        draft=draft,
        head=head,
        images=images,
        audio=audio,
    )
    if config.batch_invariant and spec.moe is not None:
        reason = _refuse_invariant_experts(plan, dtype, device)
        if reason is not None:
            raise ModelLoadError(f"a mixture of experts is not batch-invariant here: {reason}")
    return plan


def _refuse_invariant_experts(
    plan: LoadPlan, dtype: torch.dtype, device: torch.device
) -> str | None:
    if plan.has_panels:
        return None
    if plan.kernels.name != "triton":
        return "there are kernels for it in bfloat16 or int8 on a CPU, and of Triton's on a GPU"
    from kernels.triton.check_products import check_experts

    return check_experts(dtype, device)


def attention_spec(
    spec: DecoderSpec,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    codes: torch.dtype | None = None,
) -> AttentionSpec:
    """Describe the model's attention, to choose kernels by."""
    if not spec.windows:  # no layer attends
        return AttentionSpec(
            *(1, 1, 64, block_size, dtype, device),
            has_recurrent_layers=spec.is_recurrent,
            has_attention_layers=False,
            has_experts=spec.moe is not None,
        )
    return AttentionSpec(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
        windows=spec.windows_of(None),
        other_heads=other_heads(spec),
        softcap=spec.attention_softcap,
        has_sinks=spec.has_sinks,
        has_slopes=spec.alibi_slopes is not None,
        value_dim=spec.value_dim,
        chunk_size=spec.chunk,
        cache_dtype=codes,
        has_recurrent_layers=spec.is_recurrent,
        has_experts=spec.moe is not None,
        selection=selection(spec),
        source=None
        if spec.source is None
        else SourcePlaces(spec.source.num_positions, spec.source.num_places),
    )
