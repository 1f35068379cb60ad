"""All settings of a server: one table for flags, environment and YAML.

    flags  >  environment (QUIRE_*)  >  YAML (--config)  >  defaults

All sources share one table, the fields of :class:`Settings`. A field named ``max_num_seqs`` is the
flag ``--max-num-seqs``, the variable ``QUIRE_MAX_NUM_SEQS`` and the YAML key ``max_num_seqs`` (or
``max-num-seqs``), and its row in ``docs/cli.md`` is generated from it. Names that vLLM also has
have the same meaning here, but for the exceptions in ``docs/cli.md``.
"""

from __future__ import annotations

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
    Device,
    EngineConfig,
    LoadFormat,
    LogFormat,
    LogLevel,
    Policy,
    Quantization,
)
from engine.paths import default_model_dir
from engine.pooling import PoolingKind
from engine.profiler import DEFAULT_PROFILE_STEPS, MAX_PROFILE_STEPS
from server.cache_settings import CACHE, CacheSettings
from server.engine_settings import engine_config
from server.media_settings import MEDIA, MediaSettings
from server.operation_settings import OPERATION, OperationSettings
from server.parallel_settings import PARALLEL, ParallelSettings
from server.scheduling_settings import SCHEDULING, SchedulingSettings
from server.setting import Setting, setting, table_of
from server.setting_sources import InvalidSettings, explain, read_environment, read_yaml
from server.setting_values import (
    AdapterList,
    Host,
    KeyList,
    Length,
    MetricsPrefix,
    NameList,
    NumberFormat,
    OriginList,
    ProxyList,
    ScaledInt,
    is_loopback,
)
from server.speculation_settings import SPECULATION, SpeculationSettings
from server.text.answer_format import (
    MismatchedParsers,
    ReasoningParser,
    ToolCallParser,
    check_parsers,
)

DEMO_MODEL_NAME = "quire-demo"
__all__ = ["DEMO_MODEL_NAME", "InvalidSettings", "Setting", "Settings", "settings_table"]


ReasoningFields = Literal["both", "reasoning", "reasoning_content"]

_MODEL, _SERVER = "Model", "Server"
_LIMITS, _LOGS = "Access and limits", "Logs and metrics"
_GROUPS = (
    *(_MODEL, MEDIA, PARALLEL, SPECULATION, _SERVER, SCHEDULING, CACHE, _LIMITS, OPERATION),
    _LOGS,
)


class Settings(
    SchedulingSettings,
    CacheSettings,
    SpeculationSettings,
    OperationSettings,
    ParallelSettings,
    MediaSettings,
):
    """The settings of one server: validated on construction, and frozen.

    Use :meth:`load` to report problems to a person; the constructor takes the same values as
    keywords and raises pydantic's ``ValidationError``.
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True)

    # Model
    model: str | None = setting(
        None,
        _MODEL,
        "Model to serve: a directory in Hugging Face format, a GGUF file, or a name on the Hub "
        "(org/name, org/name@REVISION, or org/name:Q4_K_M for a GGUF file there). Default: the "
        "embedded model.",
    )
    config: Path | None = setting(
        None, _MODEL, "YAML file with any of these settings, such as one from configs/."
    )
    served_model_names: NameList = setting(
        [],
        _MODEL,
        "Name by which clients request the model; repeatable. Default: the last part of MODEL, "
        "and for a model of the Hub also org/name.",
        name="served_model_name",
    )
    tokenizer: str | None = setting(
        None, _MODEL, "Directory of the tokenizer, or its name on the Hub. Default: the model's."
    )
    chat_template: Path | None = setting(
        None, _MODEL, "Jinja file to use instead of the model's chat template."
    )
    tool_call_parser: ToolCallParser = setting(
        "auto",
        _MODEL,
        "Format of the model's tool calls. auto detects it from the chat template.",
    )
    reasoning_parser: ReasoningParser = setting(
        "auto",
        _MODEL,
        "Format of the model's reasoning. auto detects it from the chat template.",
    )
    dtype: NumberFormat = setting(
        "auto",
        _MODEL,
        "Number format of weights and KV cache. auto: on a GPU the checkpoint's, or float16 for "
        "bfloat16 where the GPU lacks it; on a CPU bfloat16 if there are native kernels for it or "
        "the processor computes in it, else float32. half and float are float16 and float32.",
    )
    quantization: Quantization | None = setting(
        None,
        _MODEL,
        "Quantise the weights at load: int8 or fp8 (one scale per output), int4 (one per 32 "
        "inputs) or nf4 (one per 64). With int8 and fp8, steps of many tokens round activations "
        "as well, if that is faster. Refused for checkpoints that are quantised already.",
    )
    loras: AdapterList = setting(
        [],
        _MODEL,
        "LoRA adapter in PEFT format, as NAME=DIRECTORY or with its name on the Hub "
        "(NAME=org/name); repeatable. Clients request it by its name instead of the model's.",
        name="lora",
    )
    lora_dir: Path | None = setting(
        None,
        _MODEL,
        "Directory from which adapters can be loaded at run time. Without it, the routes for "
        "that are off.",
    )
    max_loras: int = setting(
        8,
        _MODEL,
        "Adapters kept on the device; more if one step needs more. 0 disables adapters.",
        ge=0,
    )
    max_cpu_loras: int = setting(64, _MODEL, "Adapters kept in host memory.", ge=1)
    device: Device = setting("auto", _MODEL, "Device to run on. auto uses a GPU if there is one.")
    load_format: LoadFormat = setting(
        "auto",
        _MODEL,
        "Format of the weights. auto and safetensors read safetensors files; bin reads PyTorch "
        "pickles (pytorch_model.bin), which can contain code: use it for trusted files only. For "
        "benchmarks, dummy makes random weights from the config alone, and stub has no model at "
        "all.",
    )
    max_model_len: Length = setting(
        None,
        _MODEL,
        "Longest context in tokens, prompt and output together (8k = 8000, 8K = 8192). Default, "
        "also with auto: the model's own, reduced to what the KV cache holds.",
    )
    attention_backend: str = setting(
        "auto",
        _MODEL,
        "Implementation of attention and the other kernels: triton on a GPU, cpu (native, on a "
        "CPU) or reference (plain torch, on both). auto uses the fastest that supports the model.",
    )
    batch_invariant: bool = setting(
        False,
        _MODEL,
        "Give a sequence the same logits, bit for bit, whatever else is in the batch and however "
        "its prompt is chunked. Slower.",
    )
    enforce_eager: bool = setting(
        False, _MODEL, "Do not capture CUDA graphs or, on a CPU, record steps."
    )
    pooling_type: PoolingKind | None = setting(
        None,
        _MODEL,
        "Which hidden states make an embedding: the last token's, the mean, the first token's "
        "(cls) or the maximum. Default: what the model was made for.",
    )
    seed: int = setting(0, _MODEL, "Seed of the weights that --load-format dummy makes.", ge=0)
    stub_step_ms: float = setting(
        0.0, _MODEL, "Milliseconds that a step takes with --load-format stub.", ge=0, le=10_000
    )

    # Server
    host: Host = setting(
        "127.0.0.1",
        _SERVER,
        "Address to listen on. 0.0.0.0 accepts connections from other machines.",
    )
    port: int = setting(8000, _SERVER, "Port to listen on. 0 picks a free one.", ge=0, le=65535)
    api_workers: int = setting(
        1,
        _SERVER,
        "API processes that share engine and port, for when a single one is the bottleneck.",
        ge=1,
        le=64,
    )
    default_deadline_s: float | None = setting(
        None,
        _SERVER,
        "Seconds that a request may take unless it sets its own limit; after that it ends with a "
        "504. Default: no limit.",
        gt=0,
    )
    step_timeout_s: float = setting(
        300.0,
        _SERVER,
        "Seconds after which an engine step counts as hung: the engine process is replaced, and "
        "its requests continue in the new one. 0 waits forever.",
        ge=0,
    )
    shutdown_timeout_s: float = setting(
        30.0, _SERVER, "Seconds that requests in flight have to finish after SIGTERM.", ge=0
    )
    data_dir: Path | None = setting(
        None,
        _SERVER,
        "Directory for data that survives restarts: stored responses, files, batches, usage. "
        "Default: $XDG_DATA_HOME/quire (~/.local/share/quire).",
    )
    reasoning_fields: ReasoningFields = setting(
        "both",
        _SERVER,
        "Name of the field that carries reasoning in chat responses; clients expect one or the "
        "other.",
    )
    store_days: int = setting(
        30,
        _SERVER,
        "Days for which responses, chats, unused conversations, batches and their files are "
        "stored. 0 keeps them until they are deleted.",
        ge=0,
    )
    max_store_bytes: ScaledInt = setting(
        16 * 2**30,
        _SERVER,
        "Most data stored; the least recently used is deleted first. 0 is no limit.",
        ge=0,
    )
    heartbeat_s: float = setting(
        15.0, _SERVER, "Seconds between comment lines on a stream while its request waits.", gt=0
    )

    # Access and limits
    api_keys: KeyList = setting(
        [],
        _LIMITS,
        "Key that clients must send as a bearer token; repeatable. Default: no key is required.",
        name="api_key",
        repr=False,
    )
    api_key_file: Path | None = setting(
        None,
        _LIMITS,
        "YAML or TOML file of hashed keys with their scopes, limits and shares; read again when "
        "it changes. See docs/access.md.",
    )
    cors_origins: OriginList = setting(
        [],
        _LIMITS,
        "Origin whose pages may call the API from a browser, such as https://app.example, or * "
        "for all; repeatable. Default: none.",
        name="cors_origin",
    )
    trusted_proxies: ProxyList = setting(
        [],
        _LIMITS,
        "Address or network of a proxy, such as 10.0.0.0/8, or * for all; repeatable. Its "
        "X-Forwarded-* headers are believed, as those from this machine are. See docs/deploy.md.",
        name="trusted_proxy",
    )
    ssl_certfile: Path | None = setting(
        None, _LIMITS, "PEM file of a certificate (chain). Turns HTTPS on, and plain HTTP off."
    )
    ssl_keyfile: Path | None = setting(
        None, _LIMITS, "PEM file of the certificate's key, if it is not in the same file."
    )
    ssl_ca_certs: Path | None = setting(
        None,
        _LIMITS,
        "PEM file of CA certificates; clients must present a certificate signed by one of them.",
    )
    strict: bool = setting(
        False,
        _LIMITS,
        "Refuse requests with unknown fields, instead of naming the fields in a header.",
    )
    max_queued_requests: int = setting(
        1024,
        _LIMITS,
        "Sequences that may wait in addition to those that run; further requests get a 503.",
        ge=0,
    )
    max_body_bytes: ScaledInt = setting(
        16 * 2**20, _LIMITS, "Largest request body, such as 16MiB.", ge=1
    )
    max_file_bytes: ScaledInt = setting(
        512 * 2**20, _LIMITS, "Largest file that can be uploaded to /v1/files.", ge=1
    )
    max_messages: int = setting(10_000, _LIMITS, "Most messages in a chat request.", ge=1)
    max_prompts: int = setting(
        1024,
        _LIMITS,
        "Most prompts in a completion request. Prompts times 'n' may not exceed the sequences that "
        "can run and wait, either.",
        ge=1,
    )
    dashboard: bool | None = setting(
        None,
        _LIMITS,
        "Serve the live page at /dashboard. Default: on if keys are required or no other machine "
        "can connect. See docs/dashboard.md.",
    )
    header_timeout_s: float = setting(
        10.0, _LIMITS, "Seconds a client has to send a request's headers.", gt=0
    )
    body_timeout_s: float = setting(
        30.0, _LIMITS, "Seconds that may pass without a byte of a request's body.", gt=0
    )

    # Logs and metrics
    log_level: LogLevel = setting("info", _LOGS, "Lowest severity that is logged.")
    log_format: LogFormat = setting("text", _LOGS, "Plain lines, or one JSON object per line.")
    disable_log_requests: bool = setting(
        False, _LOGS, "Do not log a line for each request. Prompts are never logged."
    )
    metrics_prefix: MetricsPrefix = setting(
        "quire",
        _LOGS,
        "Prefix of the metric names; vllm gives the names that existing dashboards use.",
    )
    profile: Path | None = setting(
        None,
        _LOGS,
        "Directory for traces made with POST /start_profile. Without it, the route is off.",
    )
    profile_steps: int = setting(
        DEFAULT_PROFILE_STEPS,
        _LOGS,
        "Engine steps per trace, unless the request gives a number.",
        ge=1,
        le=MAX_PROFILE_STEPS,
    )

    @classmethod
    def load(cls, flags: Mapping[str, Any]) -> Self:
        """Read the settings from ``flags`` (by field name), the environment and the YAML they name.

        Raises:
            InvalidSettings: a value, a key or the YAML file cannot be used; one line.
        """
        try:
            settings = cls(**flags)
            check_parsers(settings.tool_call_parser, settings.reasoning_parser)
        except ValidationError as error:
            raise InvalidSettings(explain(settings_table(), error, flags)) from None
        except MismatchedParsers as error:
            raise InvalidSettings(str(error)) from None
        return settings

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Restore what ``model_dump_json`` wrote in another process, ignoring all other sources."""
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
        """Flags, then our own readers of the environment and YAML, in order of precedence."""
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
        """The names clients may request, never empty; responses carry the first."""
        if self.served_model_names:
            return list(self.served_model_names)
        if self.model is None:
            return [DEMO_MODEL_NAME]
        return [re.sub(r"(\.gguf|@.*)$", "", os.path.basename(os.path.abspath(self.model)))]

    @property
    def adapters(self) -> dict[str, str]:
        """Directories of the adapters, by name."""
        rows = (row.partition("=") for row in self.loras)
        return {name: path for name, _, path in rows}

    @property
    def policy(self) -> Policy:
        """The scheduling policy: fair, if keys have owners, unless another one was given."""
        return self.scheduling_policy or ("fair" if self.api_key_file else "fcfs")

    @property
    def is_dashboard_enabled(self) -> bool:
        """Whether the dashboard is served."""
        if self.dashboard is not None:
            return self.dashboard
        return bool(self.api_keys or self.api_key_file) or is_loopback(self.host)

    def engine_config(self) -> EngineConfig:
        """The engine process's part of these settings."""
        return engine_config(self)


def settings_table() -> list[Setting]:
    """All settings, in the order in which they are documented."""
    return sorted(table_of(Settings), key=lambda row: _GROUPS.index(row.group))
