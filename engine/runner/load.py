"""From a config to a runner: read, check, load, plan the memory, put together."""

from __future__ import annotations

import logging
import time

import torch

from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.gguf.blocks import FORMATS
from engine.gguf.spec import stored_format
from engine.gguf.weights import GgufWeights
from engine.kv_cache.storage import KVCache, plan_memory
from engine.lora.store import AdapterStore
from engine.models.checkpoint import ModelConfig, fingerprint, read_config, read_headers
from engine.models.decoder import Decoder
from engine.models.encoder.spec import EncoderSpec
from engine.models.linear import LinearMethod
from engine.models.loader import (
    Weights,
    dummy_weights,
    load_weights,
    num_parameters,
    weights_bytes,
)
from engine.models.modules import Modules, make_modules
from engine.models.safetensors import Header
from engine.models.spec import DecoderSpec
from engine.models.stored import Format
from engine.pooling import PoolingInfo
from engine.quantization import choose_method, refuse_codes
from engine.quantization.cpu import PanelMethod
from engine.quantization.formats import read_format
from engine.runner.device import cache_codes, choose_device, choose_dtype, dtype_name, set_threads
from engine.runner.encoder_load import load_encoder_runner
from engine.runner.graphs import CudaCapture, DecodeGraphs
from engine.runner.kernels import choose_kernels
from engine.runner.model_runner import ModelRunner
from engine.runner.programs import DecodePrograms
from engine.runner.protocol import Runner
from engine.runner.rows import RowTable
from engine.speculation.draft_model import DraftModel
from engine.speculation.load import DraftPlan, plan_draft
from engine.speculation.load_head import plan_head
from engine.types import EngineInfo, MemoryPlan
from kernels.attention import AttentionSpec

logger = logging.getLogger(__name__)

# The keys of a block are one tile of a GPU's attention kernels; on a CPU, where caches are small,
# what counts is how much of the last blocks is empty.
_BLOCK_SIZES = {"cpu": 16, "cuda": 64}


def load_runner(config: EngineConfig, on_progress: LoadProgress | None = None) -> Runner:
    """See ``engine.runner.load_runner``. What can be refused is refused before weights load."""
    started_s = time.monotonic()
    model = read_config(config.model)
    if isinstance(model.spec, EncoderSpec):
        return load_encoder_runner(config, model, model.spec, on_progress, started_s)
    return _load_decoder_runner(config, model, model.spec, on_progress, started_s)


def _load_decoder_runner(
    config: EngineConfig,
    model: ModelConfig,
    spec: DecoderSpec,
    on_progress: LoadProgress | None,
    started_s: float,
) -> ModelRunner:
    has_files = config.load_format != "dummy" and model.gguf is None
    headers = read_headers(model.directory, config.load_format) if has_files else []
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, spec.checkpoint_dtype, device)
    block_size = config.cache.block_size or _BLOCK_SIZES[device.type]
    codes = cache_codes(config.cache.dtype)
    if codes is not None and spec.value_dim is not None:
        raise ModelLoadError(
            f"kv_cache_dtype {config.cache.dtype!r}: a cache of latents is not rounded here; it is "
            "small as it is"
        )
    attention = attention_spec(spec, block_size, dtype, device, codes)
    kernels = choose_kernels(config.attention_backend, attention, invariant=config.batch_invariant)
    draft = plan_draft(config, spec, attention)
    shares = kernels.name == "cpu"
    set_threads(config.num_threads, weights_bytes(spec, dtype), shares_cores=shares)
    stored_as = _stored_format(config, model)
    draft_stored_as = None if draft is None else _stored_format(config, draft.model_config)
    head = plan_head(config, model, spec, headers, stored_as, attention)
    gguf_codes = None if config.load_format == "dummy" else _held_as_codes(config, model, attention)
    method = choose_method(
        config.quantization,
        dtype,
        device,
        invariant=config.batch_invariant,
        stored=stored_as.name if stored_as else gguf_codes,
    )
    has_panels = kernels.name == "cpu" and isinstance(method.dense, PanelMethod)
    if config.batch_invariant and spec.moe is not None and not has_panels:
        raise ModelLoadError("a mixture of experts is not batch-invariant here")
    if model.gguf is not None and config.load_format != "dummy":
        types = FORMATS.keys() if gguf_codes else ()
        weights: Weights = GgufWeights(model.gguf, spec, dtype, device, on_progress, packed=types)
    else:
        weights = _load(config, spec, headers, dtype, device, on_progress, stored_as)
    is_stacked = kernels.name == "triton"
    if kernels.name == "cpu":
        is_stacked = not (has_panels or config.quantization or stored_as or gguf_codes)
    modules = make_modules(spec, weights, method, stacked=is_stacked)
    draft_modules = None
    if draft is not None:
        draft_modules = _draft_modules(config, draft, draft_stored_as, method)
    loaded_head = None if head is None else head.load(config, method, modules)
    memory = plan_memory(
        spec,
        config.cache,
        config.scheduler,
        block_size=block_size,
        max_model_len=config.max_model_len or _longest_made_for(model, spec),
        dtype=dtype,
        device=device,
        weights_bytes=sum(
            part.num_bytes for part in (modules, draft_modules, loaded_head) if part is not None
        ),
        draft_bytes_per_token=sum(
            part.bytes_per_token for part in (draft, head) if part is not None
        ),
        codes=codes,
    )
    cache = KVCache(spec, memory.num_blocks, memory.block_size, dtype, device, codes)
    info = _info(config, model, spec, headers, attention, kernels.name, memory, started_s)
    decoder = Decoder(spec, modules, kernels, memory.max_model_len)
    rows = RowTable(
        max_num_rows=config.scheduler.max_num_seqs,
        max_num_blocks=min(memory.num_blocks, -(-memory.max_model_len // memory.block_size)),
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        device=device,
    )
    adapters = AdapterStore(
        spec,
        dtype,
        device,
        max_loaded=0 if config.batch_invariant else config.lora.max_loaded,
        max_on_host=config.lora.max_on_host,
    )
    features = None if loaded_head is None else loaded_head.features(memory)
    graphs: DecodeGraphs | DecodePrograms | None = None
    if spec.generates and kernels.attention.is_capturable and not config.enforce_eager:
        if device.type == "cuda":
            most = config.scheduler.max_num_seqs
            capture = CudaCapture()
            graphs = DecodeGraphs(decoder, cache, kernels, attention, rows, most, capture, features)
        else:
            graphs = DecodePrograms(decoder, cache, kernels, attention, rows, features=features)
    draft_model: DraftModel | None = None
    if draft is not None and draft_modules is not None:
        draft_model = draft.model(
            draft_modules, memory, rows, spec.vocab_size, enforce_eager=config.enforce_eager
        )
    if loaded_head is not None and features is not None:
        draft_model = loaded_head.drafts(features, memory, rows)
    speculation = config.speculation
    logger.info(memory.describe())
    return ModelRunner(
        info,
        decoder,
        cache,
        kernels,
        attention,
        rows,
        adapters,
        graphs,
        draft_model,
        features=features,
        rejects=speculation is not None and speculation.draft_sampling == "rejection",
    )


def _longest_made_for(model: ModelConfig, spec: DecoderSpec) -> int | None:
    """The input that a model of embeddings was trained for, where that is told and shorter."""
    longest = model.sentence.max_tokens
    if spec.generates or longest is None:
        return None
    return min(longest, spec.longest_context)


def _load(
    config: EngineConfig,
    spec: DecoderSpec,
    headers: list[Header],
    dtype: torch.dtype,
    device: torch.device,
    on_progress: LoadProgress | None,
    stored_as: Format | None,
) -> Weights:
    if config.load_format == "dummy":
        return dummy_weights(spec, dtype, device, config.seed, on_progress)
    return load_weights(spec, headers, dtype, device, on_progress, stored_as)


def _draft_modules(
    config: EngineConfig, draft: DraftPlan, stored_as: Format | None, method: LinearMethod
) -> Modules:
    """The draft's parameters, held as the model's are, or as its own checkpoint has them."""
    if stored_as is not None:
        attention = draft.attention
        method = choose_method(
            None,
            attention.dtype,
            attention.device,
            invariant=config.batch_invariant,
            stored=stored_as.name,
        )
    return draft.modules(config, method, stored_as)


def _stored_format(config: EngineConfig, model: ModelConfig) -> Format | None:
    """How the checkpoint's matrices are quantised; None: they are not, or random."""
    if model.quantization_config is None:
        return None
    if config.load_format == "dummy":
        logger.warning("random weights are dense, though the checkpoint's would be quantised")
        return None
    where = f"{model.directory / 'config.json'}, 'quantization_config'"
    return read_format(model.quantization_config, where)


def _held_as_codes(
    config: EngineConfig, model: ModelConfig, attention: AttentionSpec
) -> str | None:
    """What a GGUF file is quantised to, where a kernel multiplies such codes as they lie.

    Elsewhere, and where more than the kernel's precision is asked for, its weights are widened
    while they load, and the log says so.
    """
    kind = None if model.gguf is None else stored_format(model.gguf)
    if kind is None:
        return None
    dtype, device = attention.dtype, attention.device
    if config.batch_invariant:
        reason = "batch invariance is asked for"
    elif device.type == "cpu" and dtype != torch.bfloat16:
        reason = "the kernel that multiplies them computes in bfloat16"
    else:
        reason = refuse_codes(dtype, device)
    if reason is None:
        return f"GGUF {kind}"
    logger.info("weights in GGUF %s are widened to %s: %s", kind, dtype_name(dtype), reason)
    return None


def attention_spec(
    spec: DecoderSpec,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    codes: torch.dtype | None = None,
) -> AttentionSpec:
    """What the model asks of its attention."""
    return AttentionSpec(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
        windows=spec.windows,
        softcap=spec.attention_softcap,
        has_sinks=spec.has_sinks,
        value_dim=spec.value_dim,
        chunk=spec.chunk,
        cache_dtype=codes,
    )


def _remembered(config: EngineConfig, spec: DecoderSpec) -> int | None:
    """How far back any token reads the blocks of its sequence; None: to the first."""
    speculation = config.speculation
    if spec.chunk is not None or (speculation is not None and speculation.in_step):
        return None  # a draft model reads blocks of the same numbers
    return spec.widest_window


def _info(
    config: EngineConfig,
    model: ModelConfig,
    spec: DecoderSpec,
    headers: list[Header],
    attention: AttentionSpec,
    backend: str,
    memory: MemoryPlan,
    started_s: float,
) -> EngineInfo:
    dtype = dtype_name(attention.dtype)
    source = f"dummy {config.seed}" if config.load_format == "dummy" else "checkpoint"
    rounding = config.quantization or "unquantised"
    kind = config.pooling_type or model.sentence.kind or "last"
    return EngineInfo(
        model=config.model,
        architecture=spec.architecture,
        num_parameters=num_parameters(spec),
        dtype=dtype,
        device=str(attention.device),
        attention_backend=backend,
        vocab_size=spec.vocab_size,
        max_model_len=memory.max_model_len,
        eos_token_ids=spec.eos_token_ids,
        memory=memory,
        fingerprint=fingerprint(
            model, headers, dtype, rounding, source, backend, kind, memory.cache_dtype
        ),
        load_s=time.monotonic() - started_s,
        generates=spec.generates,
        window=_remembered(config, spec),
        pooling=PoolingInfo(
            kind=kind,
            size=spec.hidden_size,
            normalize=model.sentence.normalize,
            num_labels=spec.num_labels,
            sigmoid=spec.score_sigmoid,
        ),
    )
