"""The shared types. Standard library and msgspec only; each type says who may write it.

    SamplingParams ──► Request ──► [Scheduler: Sequence, BlockTable]
                                        │ StepPlan
                                        ▼
                                    [Runner: HostBatch, BatchInputs]
                                        │ StepResult
                                        ▼
                                    EngineOutput ──► RequestOutput (one request's share)

Frozen types are never changed once made. ``Request`` and ``EngineOutput`` cross the process
boundary as msgpack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from engine.argument_types import settle_fields
from engine.audio.speech import SpeechRules
from engine.audio.types import AudioClip, AudioRules
from engine.errors import Failure, InvalidParameter
from engine.images.types import Image, ImageRules
from engine.media import Media
from engine.memory_plan import MemoryPlan
from engine.plan_rows import PlanRows
from engine.pooling import PoolingInfo, PoolingParams
from engine.prompt_progress import PromptProgress
from engine.stats import EngineStats
from engine.video.types import VideoRules

if TYPE_CHECKING:
    from engine.grammar.backend import CompiledGrammar

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20  # most that a client may request
MAX_RETURNED_LOGPROBS = 128  # most that the engine returns, for callers that search among them
PENDING_TOKEN = -1  # in a row: a token sampled by an earlier step that is still on the device
DRAFT_TOKEN = -2  # in a row: a token to be proposed by the runner's draft model in this step
_MAX_SEED = 2**63 - 1
_MAX_BIAS_ENTRIES = 1024
_MAX_BAD_WORD_CHARS = 256


class Grammar(msgspec.Struct, frozen=True):
    """What the text of a request must match; enforced by token masks (``engine/grammar``).

    ``text`` is a JSON schema, a regular expression for the whole text, a JSON list of the allowed
    strings, or a grammar in llguidance's dialect of Lark (which may embed schemas as
    ``%json {...}``). For ``json_object`` it is ignored. Whether a grammar can be served is checked
    by the grammar backend, not here.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    text: str = ""

    def __post_init__(self) -> None:
        settle_fields(self)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are sampled, and when it ends.

    Unsupported values raise :class:`InvalidParameter` at construction, so every existing
    ``SamplingParams`` is valid. Checks that depend on the model (token ids within the vocabulary,
    lengths within the context) are made where the model is known.
    """

    # The distribution. temperature 0 is greedy.
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: drawn when the request is made

    # Which tokens may be sampled.
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # the last of one never follows the rest
    speech: SpeechRules | None = None  # of a transcript; None: the text is none

    # When the request ends.
    max_tokens: int | None = None  # None: as many as the context allows
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    # What is reported besides tokens. 0: only the sampled token's log-probability; None: none.
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    # Read by the text layer and by fan_out(). The engine itself knows only token ids.
    n: int = 1
    stop: tuple[str, ...] = ()  # a string at construction stands for itself alone
    bad_words: tuple[str, ...] = ()  # likewise; become bad_token_ids where there is a tokenizer
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field in ("stop", "bad_words"):
            if isinstance(value := getattr(self, field), str):
                msgspec.structs.force_setattr(self, field, (value,))
        settle_fields(self)
        self._check_values()

    def _check_values(self) -> None:
        _check(0.0 <= self.temperature <= 2.0, "temperature", "must be between 0 and 2")
        _check(0.0 <= self.top_p <= 1.0, "top_p", "must be between 0 and 1")
        _check(-1 <= self.top_k < 2**31, "top_k", "must be -1 (off), 0 (off) or positive")
        _check(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        for field in ("presence_penalty", "frequency_penalty"):
            _check(-2.0 <= getattr(self, field) <= 2.0, field, "must be between -2 and 2")
        in_range = 0.01 <= self.repetition_penalty <= 10.0  # a tiny divisor makes logits overflow
        _check(in_range, "repetition_penalty", "must be between 0.01 and 10")
        biases = self.logit_bias
        _check(len(biases) <= _MAX_BIAS_ENTRIES, "logit_bias", "must have at most 1024 entries")
        in_range = all(-100.0 <= bias <= 100.0 for bias in biases.values())
        _check(in_range, "logit_bias", "must hold values between -100 and 100")
        seed = self.seed
        in_range = seed is None or -_MAX_SEED - 1 <= seed <= _MAX_SEED
        _check(in_range, "seed", "must be a 64-bit signed integer")
        limit = self.max_tokens
        _check(limit is None or 0 <= limit < 2**31, "max_tokens", "must be 0 or a positive integer")
        _check(0 <= self.min_tokens < 2**31, "min_tokens", "must not be negative")
        _check(limit is None or self.min_tokens <= limit, "min_tokens", "exceeds max_tokens")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            within = count is None or 0 <= count <= MAX_RETURNED_LOGPROBS
            _check(within, field, f"must be between 0 and {MAX_RETURNED_LOGPROBS}")
        _check(1 <= self.n <= 128, "n", "must be between 1 and 128")
        _check(all(self.stop), "stop", "must not hold an empty string")
        within = all(0 < len(word) <= _MAX_BAD_WORD_CHARS for word in self.bad_words)
        problem = f"must hold strings of 1 to {_MAX_BAD_WORD_CHARS} characters"
        _check(within, "bad_words", problem)
        _check(all(self.bad_token_ids), "bad_words", "must hold words that have tokens")
        _check(self.allowed_token_ids != (), "allowed_token_ids", "must not be empty")
        is_one = self.speech is None or self.grammar is None
        _check(is_one, "grammar", "cannot apply to a transcript")

    @property
    def depends_on_output(self) -> bool:
        """Whether the tokens allowed next depend on the output so far."""
        has_timestamps = self.speech is not None and self.speech.timestamps is not None
        masked = self.grammar is not None or any(len(ids) > 1 for ids in self.bad_token_ids)
        return masked or has_timestamps

    @property
    def is_plain(self) -> bool:
        """Whether sampling depends only on logits, seed and position, without log-probabilities."""
        return not (
            self.grammar is not None
            or self.allowed_token_ids is not None
            or self.bad_token_ids
            or self.speech is not None
            or self.logit_bias
            or self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logprobs is not None
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0


class Adapter(msgspec.Struct, frozen=True):
    """A registered LoRA adapter. The engine loads it when a request first needs it."""

    id: str  # unique to this registration: other weights under the same name have another id
    name: str  # the name that clients use
    path: str  # a directory in PEFT format
    # Of its files at registration (``engine/lora/files.py``); "": they may change, unnoticed.
    digest: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. Made by ``engine.requests.fan_out``; crosses the boundary."""

    id: str
    prompt_token_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()  # images in the prompt, in order
    audio: tuple[AudioClip, ...] = ()  # audio in the prompt, in order
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    pooling: PoolingParams | None = None  # the request is for a vector instead of tokens
    resumed_token_ids: tuple[int, ...] = ()  # output already delivered before an engine restart
    is_suspect: bool = False  # an engine may have died of it; see engine/suspects.py
    fork_of: str | None = None  # a sibling with the same prompt, whose computed blocks it shares
    priority: int = 0  # lower runs first, under the priority policy
    background: bool = False  # after all others under every policy, and preempted first
    cache_salt: str = ""  # cached prefixes are shared only between requests with the same salt
    adapter: Adapter | None = None  # and with the same adapter
    tenant: str = ""  # whose share of the engine it counts towards, under the fair policy
    weight: float = 1.0  # the tenant's share relative to others'; positive
    arrival_s: float = 0.0  # time.monotonic() on arrival at the server
    deadline_s: float | None = None  # time.monotonic() after which the request is abandoned
    report_progress: bool = False  # report the progress of the prompt until the first token
    # Of several in sequence that answer one question (``engine/follow_ups.py``).
    follows: bool = False  # it is not the first
    is_followed: bool = False  # it need not be the last

    @property
    def media(self) -> tuple[Media, ...]:
        """The images and the audio in the prompt; the images first."""
        return (*self.images, *self.audio) if self.audio else self.images


class Trace(msgspec.Struct, frozen=True):
    """A recorded profile. Made by ``engine.profiler``; crosses the process boundary."""

    path: str
    num_steps: int
    others: tuple[str, ...] = ()  # paths of the profiles recorded by other engines at the same time


# ---------------------------------------------------------------- scheduler -> runner


class AddedRow(msgspec.Struct, frozen=True):
    """A sequence that the runner has not seen, or has dropped because it was preempted."""

    request: Request
    output_ids: tuple[int, ...]  # output so far, after preemption or resumption
    grammar: CompiledGrammar | None = None  # the request's


class BlockCopy(NamedTuple):
    """A block that the runner copies before the step writes anything.

    Source and target are blocks of the KV cache, but an offload's target and a load's source are
    host slots.
    """

    source: int
    target: int


class StateCopy(NamedTuple):
    """A copy of a row's state to or from a line of the snapshot buffer."""

    row_id: str
    line: int


class StepPlan(msgspec.Struct, frozen=True):
    """What one step computes: decided by the scheduler, carried out by the runner."""

    rows: PlanRows = msgspec.field(default_factory=PlanRows)
    added: tuple[AddedRow, ...] = ()  # sequences new to the runner, applied before their first row
    removed: tuple[str, ...] = ()  # dropped by the runner: preempted or ended
    copies: tuple[BlockCopy, ...] = ()
    offloads: tuple[BlockCopy, ...] = ()  # before any writes to blocks
    loads: tuple[BlockCopy, ...] = ()  # after the offloads, before the copies
    restores: tuple[StateCopy, ...] = ()  # from snapshots, before the rows' tokens
    saves: tuple[StateCopy, ...] = ()  # to snapshots, after the rows' tokens
    num_preempted: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the runner to do."""
        return not (self.rows or self.removed or self.offloads or self.loads)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step over all rows."""
        return self.rows.num_tokens

    @property
    def num_passes(self) -> int:
        """The largest number of passes of any row."""
        return max(self.rows.num_passes.values(), default=1)


# ---------------------------------------------------------------- runner -> scheduler


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probability of the token at one position, and of the most likely alternatives.

    ``top_ids`` is sorted by descending probability and has as many entries as requested. If there
    are any, the first is the arg-max. If the token itself is among them, its ``logprob`` is the
    same float as that entry's.
    """

    token_id: int
    logprob: float  # natural log, of the distribution before temperature and truncation
    rank: int  # 1 for the most likely token
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """The result of a step, as columns over the rows that sampled or failed."""

    ids: tuple[str, ...] = ()
    # One tuple per id: the accepted drafts and one more token. For a row with several passes: one
    # token per pass, or for only the first of the passes.
    token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    # For rows that request them: log-probabilities of the prompt positions computed by this step,
    # in order. Position p has that of prompt token p given the tokens before it, so they start at
    # 1.
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    # For rows with ``pooling``: this step's contribution to the vector, little-endian float32.
    pooled: dict[str, bytes] = {}
    errors: dict[str, Failure] = {}  # rows that failed; the other rows are valid


# ---------------------------------------------------------------- engine -> clients


class RequestTimings(msgspec.Struct, frozen=True, gc=False):
    """When a request passed each stage: time.monotonic() seconds, comparable across processes."""

    arrival_s: float
    scheduled_s: float  # first included in a plan
    first_token_s: float
    finished_s: float
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # drafts proposed
    num_accepted_tokens: int = 0  # drafts accepted


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One request's output since its consumer last read it; several steps' worth if it lags."""

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: bytes | None = None  # little-endian float32; with the last output
    num_cached_tokens: int | None = None  # reported once, with the first output
    scheduled_s: float | None = None  # likewise; when it was first included in a plan
    progress: PromptProgress | None = None  # the newest, until the first token
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop or eos token that ended it; also in token_ids
    timings: RequestTimings | None = None  # with the last output


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The output of one step for all requests, as columns over ``ids``."""

    ids: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    finish_reasons: tuple[FinishReason | None, ...] = ()
    # Sparse columns: entries only for requests with such output.
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    embeddings: dict[str, bytes] = {}  # little-endian float32
    num_cached_tokens: dict[str, int] = {}
    scheduled_s: dict[str, float] = {}  # with the first output; timings come with the last
    progress: dict[str, PromptProgress] = {}
    stop_token_ids: dict[str, int] = {}
    timings: dict[str, RequestTimings] = {}
    errors: dict[str, Failure] = {}  # these ids have finish reason "error"
    stats: EngineStats = EngineStats()


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What clients need to know about a running engine."""

    model: str  # the directory it was loaded from
    architecture: str  # Hugging Face model_type
    num_parameters: int
    dtype: str
    device: str
    attention_backend: str
    vocab_size: int  # rows of the embedding; token ids at or above are refused
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    memory: MemoryPlan
    fingerprint: str  # short hash of build, weights and config, for system_fingerprint
    load_s: float
    generation: int = 0  # how many times the weights have been replaced
    is_generative: bool = True  # False: it has no language-model head
    pooling: PoolingInfo | None = None  # None: it does not make vectors
    window: int | None = None  # positions that a token attends to; None: some layer has no window
    # Some layers keep a state per sequence that starts at its first token and can only advance.
    is_recurrent: bool = False
    unchunked_prefill: bool = False  # a prompt is computed in one step, and none of it is cached
    images: ImageRules | None = None  # None: it does not take images
    audio: AudioRules | None = None  # None: it does not take audio
    video: VideoRules | None = None  # None: it does not take videos; those that do take images


def _check(condition: bool, param: str, problem: str) -> None:
    if not condition:
        raise InvalidParameter(f"'{param}' {problem}", param=param)
