"""How an engine is built. Frozen; made by ``server/settings.py`` or by the offline ``LLM``."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.pooling import PoolingKind

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "bin", "dummy", "stub"]
Quantization = Literal["int8", "int4", "nf4", "fp8"]
CacheDtype = Literal["auto", "int8", "fp8", "fp8_e4m3"]
Policy = Literal["fcfs", "priority", "sjf", "lpm", "fair"]
Speculation = Literal["draft", "mtp", "eagle", "ngram", "suffix"]
DraftSampling = Literal["coupled", "rejection"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


_GPU_STEP_TOKENS = 2048
_CPU_STEP_PASSES = 8
# Beyond this a CPU makes no more tokens a second, and whoever runs waits longer for each of them.
_CPU_STEP_TOKENS = 256
# Of prompts, that a step on a CPU has room for, whoever runs: prompts go on beside them.
LEAST_PROMPT_TOKENS = 64


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one step and the order of the queue."""

    max_num_seqs: int = 256  # sequences running at once
    # Tokens computed by one step; None: what suits the device. All who run wait for a step, and a
    # CPU takes a second for the thousands of tokens that fill a GPU.
    max_num_batched_tokens: int | None = None
    policy: Policy = "fcfs"
    # Fewer tokens while few sequences run (``step_budget``), and of prompts no more than are soon
    # computed while others wait for their next token (``engine/prompt_pace.py``).
    fits_running: bool = False
    whole_prompts: bool = False  # no chunks: a prompt joins a step that has room for all of it
    overlap: bool | None = None  # plan and launch a step while the one before runs; None: on a GPU
    # Steps under way at once, each of other sequences: those of a pipeline's stages.
    num_micro_batches: int = 1
    # Tokens of a sequence that one step computes one after the other, where nobody waits and that
    # is soon done; None: what suits the device.
    max_step_passes: int | None = None
    # Batching window: hold new prompts back until one of these is reached. 0 ms: off.
    batching_window_ms: float = 0.0
    batching_window_prompts: int = 0  # 0: no limit by count
    batching_window_tokens: int = 0  # 0: max_num_batched_tokens

    @property
    def step_tokens(self) -> int:
        """The most tokens of one step."""
        return self.max_num_batched_tokens or _GPU_STEP_TOKENS

    def on(self, device: str) -> SchedulerConfig:
        """The same, with what was left open decided for a device such as ``cuda:0``."""
        is_cpu, passes, tokens = device == "cpu", self.max_step_passes, self.max_num_batched_tokens
        if passes is None:
            passes = _CPU_STEP_PASSES if is_cpu else 1
        if tokens is not None:
            return msgspec.structs.replace(self, max_step_passes=passes)
        tokens = _GPU_STEP_TOKENS
        if is_cpu:
            tokens = max(_CPU_STEP_TOKENS, self.max_num_seqs + LEAST_PROMPT_TOKENS)
        return msgspec.structs.replace(
            self, max_step_passes=passes, max_num_batched_tokens=tokens, fits_running=is_cpu
        )

    def step_budget(self, num_running: int) -> int:
        """Tokens of a step while so many sequences run."""
        if not self.fits_running:
            return self.step_tokens
        return min(self.step_tokens, max(_CPU_STEP_TOKENS, num_running + LEAST_PROMPT_TOKENS))


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: int | None = None  # tokens a block; None: what suits the device
    dtype: CacheDtype = "auto"  # of keys and values; auto: the model's; else codes of eight bits
    enable_prefix_caching: bool = True
    memory_bytes: int | None = None  # None: a share of what the device has free
    memory_utilization: float = 0.9  # of a GPU's memory, weights included
    num_blocks: int | None = None  # overrides the memory budget
    offload_bytes: int = 0  # of the host's memory, for blocks that this one has no room for


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters that are kept."""

    max_loaded: int = 8  # on the device, unless one step needs more; 0: none are taken
    max_on_host: int = 64


class NodesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that the ranks of an engine lie on, as many on each, the first ones on the first
    machine (``engine/parallel/gathering.py``)."""

    size: int
    rank: int  # which of them this is; 0 has the scheduler
    master_addr: str  # of the first, where the others come to while ranks are gathered
    master_port: int
    secret_file: str  # shared by all, so that nobody else can join
    timeout_s: float = 0.0  # waited for one another; 0: for ever

    @property
    def place(self) -> str:
        """Address and port of the first, for people."""
        address = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"{address}:{self.master_port}"


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are guessed ahead, to be verified several at once (``engine/speculation``)."""

    method: Speculation
    draft_model: str | None = None  # a directory, for ``draft`` and ``eagle``
    num_draft_tokens: int = 4  # most for a sequence and step
    # Last tokens of a text that are looked up in it, the longest match first.
    max_ngram: int = 4
    min_ngram: int = 2
    # How drafts of a sampled text are judged; greedy texts are the same under both.
    draft_sampling: DraftSampling = "coupled"
    adaptive: bool = True  # as many drafts as pay for themselves; else always the most

    @property
    def has_head(self) -> bool:
        """Whether a head guesses from the model's own hidden states."""
        return self.method in ("mtp", "eagle")

    @property
    def in_step(self) -> bool:
        """Whether the runner guesses, with keys and values of its own; else the scheduler does."""
        return self.has_head or self.method == "draft"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process is told. Crosses the boundary at start."""

    model: str  # a directory in Hugging Face format
    tokenizer: str | None = None  # another directory to take the tokenizer from
    dtype: Dtype = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None  # of the weights, while they load
    max_model_len: int | None = None  # None: the model's own, cut to what the KV cache holds
    attention_backend: str = "auto"
    batch_invariant: bool = False  # a sequence's logits have the same bits in any batch
    enforce_eager: bool = False  # no CUDA graphs, no recorded steps
    pooling_type: PoolingKind | None = None  # of embeddings; None: what the model was made for
    tensor_parallel_size: int = 1  # processes that each layer is shared out to, a GPU for each
    pipeline_parallel_size: int = 1  # stages of consecutive layers, of so many processes each
    enable_expert_parallel: bool = False  # ranks have whole experts, not a part of each
    nodes: NodesConfig | None = None  # None: all ranks are on this machine
    replica: int = 0  # which of several engines on this machine that serve the same model
    num_replicas: int = 1  # how many there are; on a CPU they share its cores
    host_share_bytes: int | None = None  # of the machine's memory, for this one; None: what is free
    num_threads: int | None = None  # CPU threads of each rank; None: all have one a core together
    seed: int = 0  # of dummy weights
    generation: int = 0  # how many times the weights have been exchanged for others
    stub_step_ms: float = 0.0  # milliseconds that a step takes under load_format "stub"
    step_timeout_s: float = 0.0  # after which the engine process ends itself; 0: never
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    lora: LoraConfig = LoraConfig()
    max_images: int = 16  # in one prompt; 0: none are taken, and what embeds them is not loaded
    # As which a larger image is not seen; None: the model's own bound, and on a CPU less.
    max_image_tokens: int | None = None
    speculation: SpeculationConfig | None = None
    profile_dir: str | None = None  # where traces of steps are written; None: there are none
    log_level: LogLevel = "info"  # of the engine's own process, where it has one
    log_format: LogFormat = "text"

    @property
    def engine_name(self) -> str:
        """Which engine this is, for people."""
        return name_engine(self.replica, self.num_replicas)

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_here(self) -> int:
        """Those of them on each machine."""
        return self.num_ranks // (1 if self.nodes is None else self.nodes.size)

    @property
    def first_device(self) -> int:
        """The GPU of its first rank; the others have those that follow."""
        return self.replica * self.num_ranks


def name_engine(number: int, count: int) -> str:
    """Which of ``count`` engines is meant, for people, in the middle of a line."""
    return f"engine {number}" if count > 1 else "the engine"
