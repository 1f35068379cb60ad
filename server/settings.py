"""Every setting of a served engine, and the only reader of flags, environment and YAML.

    flags  >  environment (QUIRE_*)  >  YAML (--config)  >  defaults

One table serves all of them: the fields of :class:`Settings`. A field named ``max_num_seqs`` is
the flag ``--max-num-seqs``, the variable ``QUIRE_MAX_NUM_SEQS`` and the YAML key
``max_num_seqs`` (or ``max-num-seqs``), and its row in ``docs/cli.md`` is written from it. Names
that other servers of this kind also have mean the same here.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.config import (
    CacheDtype,
    Device,
    Dtype,
    EngineConfig,
    LoadFormat,
    LogFormat,
    LogLevel,
    Quantization,
)
from engine.paths import default_model_dir
from engine.pooling import PoolingKind
from engine.profiler import DEFAULT_PROFILE_STEPS, MAX_PROFILE_STEPS
from server.engine_settings import engine_config
from server.operation_settings import OPERATION, OperationSettings
from server.parallel_settings import PARALLEL, ParallelSettings
from server.scheduling_settings import SCHEDULING, SchedulingSettings
from server.setting import Setting, setting, table_of
from server.setting_sources import InvalidSettings, explain, read_environment, read_yaml
from server.setting_values import AdapterList, OriginList, ScaledInt, StringList
from server.speculation_settings import SPECULATION, SpeculationSettings
from server.text.answers import ReasoningParser, ToolCallParser

DEMO_MODEL_NAME = "quire-demo"
__all__ = ["DEMO_MODEL_NAME", "InvalidSettings", "Setting", "Settings", "settings_table"]


ReasoningFields = Literal["both", "reasoning", "reasoning_content"]

_MODEL, _SERVER = "Model", "Server"
_CACHE, _LIMITS, _LOGS = "KV cache", "Access and limits", "Logs and metrics"
_GROUPS = (_MODEL, PARALLEL, SPECULATION, _SERVER, SCHEDULING, _CACHE, _LIMITS, OPERATION, _LOGS)


class Settings(SchedulingSettings, SpeculationSettings, OperationSettings, ParallelSettings):
    """The settings of one server, valid once made, and frozen.

    Use :meth:`load` where problems are to be told to a person; the constructor takes the same
    values as keywords and raises pydantic's ``ValidationError``.
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True)

    # Model
    model: str | None = setting(
        None,
        _MODEL,
        "Directory in Hugging Face format, GGUF file, or a name on the Hub (org/name[@REVISION], "
        "org/name:Q4_K_M for a GGUF file there). The model that ships with Quire when left out.",
    )
    config: Path | None = setting(
        None, _MODEL, "YAML file with any of these settings, such as one from configs/."
    )
    served_model_names: StringList = setting(
        [],
        _MODEL,
        "Name under which clients ask for the model; may be repeated. The last part of MODEL "
        "when left out.",
        name="served_model_name",
    )
    tokenizer: str | None = setting(
        None, _MODEL, "Directory of the tokenizer, when it is not the model's own."
    )
    chat_template: Path | None = setting(
        None, _MODEL, "Jinja file that replaces the model's own chat template."
    )
    tool_call_parser: ToolCallParser = setting(
        "auto",
        _MODEL,
        "How the model writes tool calls; auto takes what its chat template shows.",
    )
    reasoning_parser: ReasoningParser = setting(
        "auto",
        _MODEL,
        "How the model marks its reasoning; auto takes what its chat template shows.",
    )
    dtype: Dtype = setting(
        "auto",
        _MODEL,
        "Number format of weights and KV cache. auto takes the checkpoint's on a GPU; on a CPU "
        "bfloat16 where there are native kernels for it or the processor computes in it, else "
        "float32.",
    )
    quantization: Quantization | None = setting(
        None,
        _MODEL,
        "Round the weights while they load: int8 or fp8 (one scale for each output), int4 (one for "
        "32 inputs) or nf4 (one for 64). Not those of a checkpoint that is quantised already.",
    )
    loras: AdapterList = setting(
        [],
        _MODEL,
        "LoRA adapter as PEFT saves it, as NAME=DIRECTORY; may be repeated. Clients ask for it by "
        "its name, in place of the model's.",
        name="lora",
    )
    lora_dir: Path | None = setting(
        None,
        _MODEL,
        "Directory from which adapters may be loaded at run time; no such route when left out.",
    )
    max_loras: int = setting(
        8,
        _MODEL,
        "Adapters kept on the device, unless those of one step are more; 0 takes none.",
        ge=0,
    )
    max_cpu_loras: int = setting(64, _MODEL, "Adapters kept in the host's memory.", ge=1)
    device: Device = setting("auto", _MODEL, "Where to run; auto takes a GPU when there is one.")
    load_format: LoadFormat = setting(
        "auto",
        _MODEL,
        "auto and safetensors read safetensors files, bin pickles of PyTorch (pytorch_model.bin), "
        "which can hide code: none of those that are not trusted. For measuring: dummy makes "
        "random weights from the config alone; stub has no model, and its tokens cost nothing.",
    )
    max_model_len: ScaledInt | None = setting(
        None,
        _MODEL,
        "Longest context, prompt and output together, in tokens (8k = 8000, 8K = 8192). The "
        "model's own when left out, cut to what the KV cache holds.",
        ge=1,
    )
    attention_backend: str = setting(
        "auto", _MODEL, "Attention implementation; auto takes the fastest that can serve the model."
    )
    batch_invariant: bool = setting(
        False,
        _MODEL,
        "Give a sequence the same logits, bit for bit, whatever else is in the batch and however "
        "its prompt is cut; slower.",
    )
    enforce_eager: bool = setting(
        False, _MODEL, "Capture no CUDA graphs; on a CPU, record no steps."
    )
    pooling_type: PoolingKind | None = setting(
        None,
        _MODEL,
        "Which hidden states make an embedding: last (token), mean, cls (the first token) or max. "
        "What the model was made for when left out.",
    )
    max_images: int = setting(
        16,
        _MODEL,
        "Most images in one prompt, of a model that reads them. 0: none are taken, and what reads "
        "them is not loaded.",
        ge=0,
        le=1024,
    )
    max_image_tokens: int | None = setting(
        None,
        _MODEL,
        "Tokens of an image, above which it is scaled down. When left out the model's own bound, "
        "on a CPU 1,024 at most, as reading one takes seconds.",
        ge=4,
    )
    seed: int = setting(0, _MODEL, "Seed of dummy weights.", ge=0)
    stub_step_ms: float = setting(
        0.0, _MODEL, "Milliseconds that a step takes under --load-format stub.", ge=0, le=10_000
    )

    # Server
    host: str = setting(
        "127.0.0.1", _SERVER, "Address to listen on; 0.0.0.0 lets other machines connect."
    )
    port: int = setting(8000, _SERVER, "Port to listen on; 0 picks a free one.", ge=0, le=65535)
    api_workers: int = setting(
        1,
        _SERVER,
        "API processes that share the engine and the port, for when one is the bottleneck.",
        ge=1,
        le=64,
    )
    default_deadline_s: float | None = setting(
        None,
        _SERVER,
        "Seconds that a request may take when it does not say so itself; it then ends with a 504. "
        "No limit when left out.",
        gt=0,
    )
    step_timeout_s: float = setting(
        300.0,
        _SERVER,
        "Seconds after which a step that does not end is taken for hung: the engine process is "
        "replaced, and its requests go on in the next. 0 waits for ever.",
        ge=0,
    )
    shutdown_timeout_s: float = setting(
        30.0, _SERVER, "Seconds that requests in flight are given to finish after SIGTERM.", ge=0
    )
    data_dir: Path | None = setting(
        None,
        _SERVER,
        "Directory of what is kept over restarts: stored answers, files, batches. "
        "$XDG_DATA_HOME/quire (~/.local/share/quire) when left out.",
    )
    reasoning_fields: ReasoningFields = setting(
        "both",
        _SERVER,
        "Names under which chat answers carry reasoning; clients know one or the other.",
    )
    store_days: int = setting(
        30,
        _SERVER,
        "Days that responses, chats, unused conversations, batches and their files are stored; 0: "
        "until they are deleted.",
        ge=0,
    )
    max_store_bytes: ScaledInt = setting(
        16 * 2**30, _SERVER, "Most that is stored; what was used last goes last. 0: no limit.", ge=0
    )
    heartbeat_s: float = setting(
        15.0, _SERVER, "Seconds between comment lines on a stream whose request waits.", gt=0
    )

    # KV cache
    block_size: int | None = setting(
        None,
        _CACHE,
        "Tokens in one KV block. When left out: 64 on a GPU, 16 on a CPU.",
        ge=1,
        le=1024,
    )
    kv_cache_dtype: CacheDtype = setting(
        "auto",
        _CACHE,
        "Number format of keys and values. auto is the model's; int8 and fp8 (e4m3) take half of "
        "its memory, with a scale for each token and head. See docs/kv-cache.md.",
    )
    enable_prefix_caching: bool = setting(
        True, _CACHE, "Keep the KV blocks of finished requests for prompts that begin alike."
    )
    kv_cache_memory_bytes: ScaledInt | None = setting(
        None,
        _CACHE,
        "Memory of the KV cache, such as 2GiB. When left out: what the share of a GPU leaves; on "
        "a CPU 512 MiB, or more where one sequence of full length needs it.",
        ge=1,
    )
    kv_offload_bytes: ScaledInt = setting(
        0,
        _CACHE,
        "Memory of the host for KV blocks that the cache has no room for, such as 8GiB: prefixes, "
        "and what preempted sequences had computed, come back from there. 0: none. See "
        "docs/kv-cache.md.",
        ge=0,
    )
    gpu_memory_utilization: float = setting(
        0.9, _CACHE, "Share of a GPU's memory to use, weights included.", gt=0, le=1
    )
    num_gpu_blocks_override: int | None = setting(
        None, _CACHE, "Number of KV blocks on any device, whatever the memory.", ge=1
    )

    # Access and limits
    api_keys: StringList = setting(
        [],
        _LIMITS,
        "Key that clients must send as a bearer token; may be repeated. No key is asked for when "
        "left out.",
        name="api_key",
        repr=False,
    )
    api_key_file: Path | None = setting(
        None,
        _LIMITS,
        "YAML or TOML file of hashed keys with their rights, limits and shares; read again when it "
        "changes. See docs/access.md.",
    )
    cors_origins: OriginList = setting(
        [],
        _LIMITS,
        "Origin whose pages may call the API from a browser, such as https://app.example, or * "
        "for all; may be repeated. None when left out.",
        name="cors_origin",
    )
    ssl_certfile: Path | None = setting(
        None, _LIMITS, "PEM file of a certificate (chain): serve HTTPS with it, and nothing else."
    )
    ssl_keyfile: Path | None = setting(
        None, _LIMITS, "PEM file of the certificate's key, when it is not in the same file."
    )
    ssl_ca_certs: Path | None = setting(
        None,
        _LIMITS,
        "PEM file of certificates: clients must show one that one of these has signed.",
    )
    strict: bool = setting(
        False, _LIMITS, "Refuse requests with unknown fields instead of naming them in a header."
    )
    max_queued_requests: int = setting(
        1024, _LIMITS, "Sequences that may wait beyond those that run; more get a 503.", ge=0
    )
    max_body_bytes: ScaledInt = setting(
        16 * 2**20, _LIMITS, "Largest request body, such as 16MiB.", ge=1
    )
    max_file_bytes: ScaledInt = setting(
        512 * 2**20, _LIMITS, "Largest file that can be uploaded to /v1/files.", ge=1
    )
    max_messages: int = setting(10_000, _LIMITS, "Messages in one chat request.", ge=1)
    max_prompts: int = setting(1024, _LIMITS, "Prompts in one completion request.", ge=1)
    dashboard: bool | None = setting(
        None,
        _LIMITS,
        "Show the live page at /dashboard; see docs/dashboard.md. When left out: where keys are "
        "asked for, or no other machine can connect.",
    )
    header_timeout_s: float = setting(
        10.0, _LIMITS, "Seconds a client may take to send a request's headers.", gt=0
    )
    body_timeout_s: float = setting(
        30.0, _LIMITS, "Seconds that may pass without a byte of a request's body.", gt=0
    )

    # Logs and metrics
    log_level: LogLevel = setting("info", _LOGS, "Least severity that is logged.")
    log_format: LogFormat = setting("text", _LOGS, "Lines for people, or one JSON object a line.")
    disable_log_requests: bool = setting(
        False, _LOGS, "Do not log a line for each request. Prompts are never logged."
    )
    metrics_prefix: str = setting(
        "quire",
        _LOGS,
        "First part of the metric names; vllm emits the names that existing dashboards know.",
        pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$",
    )
    profile: Path | None = setting(
        None,
        _LOGS,
        "Directory for the traces that POST /start_profile asks for; no such route when left out.",
    )
    profile_steps: int = setting(
        DEFAULT_PROFILE_STEPS,
        _LOGS,
        "Engine steps in a trace, unless the request says another number.",
        ge=1,
        le=MAX_PROFILE_STEPS,
    )

    @classmethod
    def load(cls, flags: Mapping[str, Any]) -> Self:
        """The settings from ``flags`` (by field name), the environment and the YAML they name.

        Raises:
            InvalidSettings: a value, a key or the YAML file cannot be used; one line.
        """
        try:
            return cls(**flags)
        except ValidationError as error:
            raise InvalidSettings(explain(settings_table(), error, flags)) from None

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What ``model_dump_json`` has written, in another process; no other source is asked."""
        settings = cls.__new__(cls)
        BaseModel.__init__(settings, **json.loads(text))
        return settings

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then our own reading of the environment and of YAML, strongest first."""
        environment = read_environment(settings_table(), os.environ)
        config = init_settings().get("config") or environment.get("config")
        in_file = read_yaml(settings_table(), Path(config)) if config else {}
        return (
            init_settings,
            InitSettingsSource(settings_cls, init_kwargs=environment),
            InitSettingsSource(settings_cls, init_kwargs=in_file),
        )

    @property
    def model_dir(self) -> str:
        """The model to load: as given, or the one that ships with Quire."""
        return self.model or str(default_model_dir())

    @property
    def model_names(self) -> list[str]:
        """The names clients may ask for, the one that answers carry first. Never empty."""
        if self.served_model_names:
            return list(self.served_model_names)
        if self.model is None:
            return [DEMO_MODEL_NAME]
        return [re.sub(r"(\.gguf|@.*)$", "", os.path.basename(os.path.normpath(self.model)))]

    @property
    def adapters(self) -> dict[str, str]:
        """Directories of the adapters, by name."""
        rows = (row.partition("=") for row in self.loras)
        return {name: path for name, _, path in rows}

    @property
    def shows_dashboard(self) -> bool:
        """Whether the live page is there."""
        if self.dashboard is not None:
            return self.dashboard
        return bool(self.api_keys or self.api_key_file) or _is_loopback(self.host)

    def engine_config(self) -> EngineConfig:
        """What the engine process is told of all this."""
        return engine_config(self)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def settings_table() -> list[Setting]:
    """All settings in the order in which they are told to people."""
    return sorted(table_of(Settings), key=lambda row: _GROUPS.index(row.group))
