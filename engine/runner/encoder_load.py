"""Load an encoder: from a config to a model in memory."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from itertools import chain

from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.memory import available_bytes
from engine.models.checkpoint import ModelConfig, fingerprint, read_headers
from engine.models.dense import DenseLayers, read_dense_headers
from engine.models.dense_spec import DenseSpec
from engine.models.encoder.model import Encoder
from engine.models.encoder.spec import EncoderSpec
from engine.models.loader import dummy_weights, load_weights, num_parameters, weights_bytes
from engine.quantization import choose_method
from engine.runner.device import choose_device, choose_dtype, dtype_name, set_threads
from engine.runner.encoder_runner import EncoderRunner
from engine.runner.sleeping import ReloadPlan, SleepingModel, source_name
from engine.types import EngineInfo, MemoryPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder in memory; see ``engine.runner.sleeping.LoadedModel``."""

    config: EngineConfig
    encoder: Encoder
    dense: DenseLayers | None
    spec: EncoderSpec
    info: EngineInfo

    @property
    def reload_plan(self) -> ReloadPlan:
        """How to read it again."""
        return ReloadPlan(self.config, self.spec, self.info, load_encoder)

    def runner(self) -> EncoderRunner:
        """See ``LoadedModel.runner``. There is no KV cache: nothing is kept between steps."""
        return EncoderRunner(self.info, self.encoder, self.dense, partial(SleepingModel, self))


def load_encoder(
    config: EngineConfig, model: ModelConfig, on_progress: LoadProgress | None = None
) -> LoadedEncoder:
    """Load an encoder whose config has been read.

    Raises:
        ModelLoadError: the model cannot be served as configured; a one-line reason.
    """
    started_s = time.monotonic()
    spec = model.spec
    assert isinstance(spec, EncoderSpec)
    if config.attention_backend != "auto":
        raise ModelLoadError("attention backends are for models that generate; this is an encoder")
    if config.batch_invariant:
        raise ModelLoadError("batch invariance is for models that generate; this is an encoder")
    if config.cache.offload_bytes:
        raise ModelLoadError("kv_offload_bytes: an encoder has no KV cache")
    max_len = _longest(config, model, spec)
    device = choose_device(config.device, config.first_device)
    dtype = choose_dtype(config.dtype, spec.checkpoint_dtype, device)
    is_dummy = config.load_format == "dummy"
    headers = [] if is_dummy else read_headers(model.directory, config.load_format)
    dense_specs = _dense_specs(model, spec)
    dense_files = None if is_dummy else read_dense_headers(dense_specs, config.load_format)
    set_threads(config.num_threads, weights_bytes(spec, dtype))
    method = choose_method(config.quantization, dtype, device)
    if is_dummy:
        weights = dummy_weights(spec, dtype, device, config.seed, on_progress)
    else:
        weights = load_weights(spec, headers, dtype, device, on_progress)
    encoder = Encoder(spec, weights, method)
    dense = DenseLayers(dense_specs, dense_files, device, config.seed) if dense_specs else None
    kind = config.pooling_type or model.sentence.kind or "mean"
    # Blocks have no memory behind them here: each stands for a place in the engine. The scheduler
    # keeps one spare for each running sequence.
    memory = MemoryPlan(
        weights_bytes=encoder.num_bytes + (dense.num_bytes if dense is not None else 0),
        kv_cache_bytes=0,
        free_bytes=available_bytes(device),
        bytes_per_token=0,
        num_blocks=2 * config.scheduler.max_num_seqs,
        block_size=max_len,
        max_model_len=max_len,
    )
    source = source_name(config, config.seed if is_dummy else None)
    details = (dtype_name(dtype), config.quantization or "unquantised", source, kind)
    info = EngineInfo(
        model=config.model,
        architecture=spec.architecture,
        num_parameters=num_parameters(spec) + sum(map(num_parameters, dense_specs)),
        dtype=dtype_name(dtype),
        device=str(device),
        attention_backend="torch",
        vocab_size=spec.vocab_size,
        max_model_len=max_len,
        eos_token_ids=(),
        memory=memory,
        fingerprint=fingerprint(model, [*headers, *chain(*(dense_files or ()))], *details),
        load_s=time.monotonic() - started_s,
        generation=config.generation,
        is_generative=False,
        pooling=model.pooling_info(kind),
        unchunked_prefill=True,
    )
    logger.info(memory.describe())
    return LoadedEncoder(config, encoder, dense, spec, info)


def _dense_specs(model: ModelConfig, spec: EncoderSpec) -> tuple[DenseSpec, ...]:
    """Return the layers behind the pooling. Raises ModelLoadError if they do not fit the model."""
    specs = model.sentence.dense
    if specs and spec.num_labels:
        raise ModelLoadError(
            f"{specs[0].directory}: a dense layer beside a classification head is not supported"
        )
    if specs and specs[0].inputs != spec.output_size:
        raise ModelLoadError(
            f"{specs[0].directory}: a dense layer for {specs[0].inputs} numbers, where the model "
            f"has {spec.output_size}"
        )
    return specs


def _longest(config: EngineConfig, model: ModelConfig, spec: EncoderSpec) -> int:
    """Return the maximum length: the configured one, the one trained for, or all positions."""
    longest = spec.default_context_len
    return config.max_model_len or min(longest, model.sentence.max_tokens or longest)
