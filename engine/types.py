"""The shared nouns. Standard library and msgspec only; every type says who may write it.

    SamplingParams ──► Request ──► [Scheduler: Sequence, BlockTable]
                                        │ StepPlan
                                        ▼
                                    [Runner: ForwardInput]
                                        │ StepResult
                                        ▼
                                    EngineOutput ──► RequestOutput (one request's share)

Frozen types are written by nobody after they are made. ``Request`` and ``EngineOutput`` cross
the process boundary as msgpack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from engine.errors import Failure, InvalidParameter
from engine.images.nouns import Image, ImageRules
from engine.memory_plan import MemoryPlan
from engine.plan_rows import PlanRows
from engine.pooling import PoolingInfo, PoolingParams
from engine.prompt_progress import PromptProgress

if TYPE_CHECKING:
    from engine.grammar.backend import CompiledGrammar

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20  # that a client may ask for
MAX_TOLD_LOGPROBS = 128  # that the engine tells, to whoever searches among them
PENDING_TOKEN = -1  # in a row: the token that an earlier step has chosen, still on the device
DRAFT_TOKEN = -2  # in a row: a token that the runner's draft model is to propose in this step
_MAX_SEED = 2**63 - 1
_MAX_BIAS_ENTRIES = 1024


class Grammar(msgspec.Struct, frozen=True):
    """What every text of a request must match; held by masks in the sampler (``engine/grammar``).

    ``text`` is a JSON schema, a regular expression for the whole text, a JSON list of strings of
    which the text is one, or a grammar in llguidance's dialect of Lark (which may embed schemas as
    ``%json {...}``); for ``json_object`` it says nothing. Whether it can be served is judged by the
    grammar backend, not here.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen, and when it ends.

    A value that cannot be served raises :class:`InvalidParameter` at construction, so a
    ``SamplingParams`` that exists is valid. What needs the model to be judged (token ids within
    the vocabulary, lengths within the context) is checked where the model is known.
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
    seed: int | None = None  # None: given one where the request is made

    # What may be chosen at all.
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences whose last token is not chosen

    # The end.
    max_tokens: int | None = None  # None: whatever the context leaves
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    # What is told besides tokens. 0 means the chosen token alone, None nothing.
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    # Read by the text layer and by fan_out(); the engine loop itself knows token ids only.
    n: int = 1
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()  # becomes bad_token_ids where a tokenizer is at hand
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check(0.0 <= self.temperature <= 2.0, "temperature", "must be between 0 and 2")
        _check(0.0 <= self.top_p <= 1.0, "top_p", "must be between 0 and 1")
        _check(-1 <= self.top_k < 2**31, "top_k", "must be -1 (off), 0 (off) or positive")
        _check(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        for field in ("presence_penalty", "frequency_penalty"):
            _check(-2.0 <= getattr(self, field) <= 2.0, field, "must be between -2 and 2")
        penalty = self.repetition_penalty
        _check(0.0 < penalty <= 10.0, "repetition_penalty", "must be above 0 and at most 10")
        biases = self.logit_bias
        _check(len(biases) <= _MAX_BIAS_ENTRIES, "logit_bias", "must have at most 1024 entries")
        in_range = all(-100.0 <= bias <= 100.0 for bias in biases.values())
        _check(in_range, "logit_bias", "values must be between -100 and 100")
        seed = self.seed
        in_range = seed is None or -_MAX_SEED - 1 <= seed <= _MAX_SEED
        _check(in_range, "seed", "must be a 64-bit signed integer")
        limit = self.max_tokens
        _check(limit is None or 0 <= limit < 2**31, "max_tokens", "must be 0 or a positive integer")
        _check(0 <= self.min_tokens < 2**31, "min_tokens", "must not be negative")
        _check(limit is None or self.min_tokens <= limit, "min_tokens", "exceeds max_tokens")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            within = count is None or 0 <= count <= MAX_TOLD_LOGPROBS
            _check(within, field, f"must be between 0 and {MAX_TOLD_LOGPROBS}")
        _check(1 <= self.n <= 128, "n", "must be between 1 and 128")
        _check(all(self.stop), "stop", "a stop string must not be empty")
        _check(all(self.bad_words), "bad_words", "a bad word must not be empty")
        _check(all(self.bad_token_ids), "bad_words", "a bad word must have tokens")
        _check(self.allowed_token_ids != (), "allowed_token_ids", "must not be empty")

    @property
    def follows_output(self) -> bool:
        """Whether which tokens may be chosen depends on those chosen before."""
        return self.grammar is not None or any(len(ids) > 1 for ids in self.bad_token_ids)

    @property
    def is_plain(self) -> bool:
        """Whether a token is chosen by its logits, the seed and its position alone, and told
        without log-probabilities."""
        return not (
            self.grammar is not None
            or self.allowed_token_ids is not None
            or self.bad_token_ids
            or self.logit_bias
            or self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logprobs is not None
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that has been registered. Made where it is; the engine reads it when asked."""

    id: str  # of this registration: an adapter of the same name with other weights has another
    name: str  # under which clients ask for it
    path: str  # a directory as PEFT saves it


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to be continued. Crosses the boundary; made by ``engine.requests.fan_out``."""

    id: str
    prompt_token_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()  # in it, in order
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    pooling: PoolingParams | None = None  # a vector is asked for, and no token
    resumed_token_ids: tuple[int, ...] = ()  # output already delivered before an engine restart
    fork_of: str | None = None  # a sibling with the same prompt, whose computed blocks are shared
    priority: int = 0  # lower runs first, under the priority policy
    background: bool = False  # after all others under every policy, and preempted before them
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    adapter: Adapter | None = None  # and only with the same adapter
    tenant: str = ""  # whose share of the engine it uses, under the fair policy
    weight: float = 1.0  # of that share against other tenants'; positive
    arrival_s: float = 0.0  # time.monotonic() at the door
    deadline_s: float | None = None  # time.monotonic() after which nobody wants the answer
    tells_progress: bool = False  # of its prompt, while that is waited for


class Trace(msgspec.Struct, frozen=True):
    """A profile that has been written. Crosses the boundary; made by ``engine.profiler``."""

    path: str
    num_steps: int
    others: tuple[str, ...] = ()  # paths of those of other engines, which served beside this one


# ---------------------------------------------------------------- scheduler -> runner


class AddedRow(msgspec.Struct, frozen=True):
    """A sequence the runner has not seen, or has been told to forget (preempted)."""

    request: Request
    output_ids: tuple[int, ...]  # generated so far (after preemption or resumption)
    grammar: CompiledGrammar | None = None  # the request's


class BlockCopy(NamedTuple):
    """A block whose contents the runner copies before the step's own writes.

    Both are blocks of the KV cache; of a plan's offloads the target is a slot of the host's memory,
    and of its loads the source is.
    """

    source: int
    target: int


class StateCopy(NamedTuple):
    """A row's state that goes to a line of snapshots, or comes from there."""

    row_id: str
    line: int


class StepPlan(msgspec.Struct, frozen=True):
    """What one step computes. The scheduler decides, the runner obeys."""

    rows: PlanRows = msgspec.field(default_factory=PlanRows)
    added: tuple[AddedRow, ...] = ()  # before their first row
    removed: tuple[str, ...] = ()  # preempted, finished or aborted since the last plan: forget
    copies: tuple[BlockCopy, ...] = ()
    offloads: tuple[BlockCopy, ...] = ()  # before anything that is written to blocks
    loads: tuple[BlockCopy, ...] = ()  # after the offloads, before the copies
    restores: tuple[StateCopy, ...] = ()  # from snapshots, before the rows' tokens
    saves: tuple[StateCopy, ...] = ()  # to snapshots, behind them
    num_preempted: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the runner to do."""
        return not (self.rows or self.removed or self.offloads or self.loads)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step, over all rows."""
        return self.rows.num_tokens

    @property
    def num_passes(self) -> int:
        """The most that a row has."""
        return max(self.rows.num_passes.values(), default=1)


# ---------------------------------------------------------------- runner -> scheduler


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probability of one position's token and of the likeliest alternatives.

    ``top_ids`` is sorted by falling probability and holds the number asked for; the arg-max is
    always its first entry when that number is above 0. When the token itself is among them, its
    ``logprob`` is the same float as the entry's.
    """

    token_id: int
    logprob: float  # natural log, of the distribution before temperature and truncation
    rank: int  # 1 for the most likely token
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced, columnar over the rows that sampled or failed."""

    ids: tuple[str, ...] = ()
    # One list per id: the drafts that were kept, and one more token; of a row of several passes a
    # token for each, or for the first of them.
    token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    # For rows that asked: the prompt positions computed by this step, in order. The logprobs of
    # position p are those of the prompt's token p given what precedes it, so they start at 1.
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    # For rows with ``pooling``: what this step's tokens add to their vector, little-endian float32.
    pooled: dict[str, bytes] = {}
    errors: dict[str, Failure] = {}  # rows that failed; the others are whole


# ---------------------------------------------------------------- engine -> clients


class RequestTimings(msgspec.Struct, frozen=True, gc=False):
    """When things happened to a request: time.monotonic() seconds, comparable across processes."""

    arrival_s: float
    scheduled_s: float  # first time in a plan
    first_token_s: float
    finished_s: float
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # proposed for it
    num_accepted_tokens: int = 0  # of those, kept


class DraftStats(msgspec.Struct, frozen=True):
    """What came of speculation. Counters only ever rise."""

    num_drafts: int = 0  # rows that verified at least one draft
    num_draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # first draft of a row, second, ...

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts kept."""
        return sum(self.accepted_per_position)


class BlockStats(msgspec.Struct, frozen=True):
    """How the KV blocks are used. ``total == held + free``; cached blocks are free ones too."""

    total: int = 0
    held: int = 0  # referenced by at least one sequence
    shared: int = 0  # referenced by more than one
    cached: int = 0  # holding a reusable prefix (held or free)
    free: int = 0  # allocatable, cached ones included
    wasted_slots: int = 0  # token slots in held blocks that hold no token
    block_size: int = 0  # tokens a block
    snapshots: int = 0  # of states, at the ends of blocks, that texts could begin with

    @property
    def utilisation(self) -> float:
        """Share of blocks held, 0 to 1."""
        return self.held / self.total if self.total else 0.0

    @property
    def waste(self) -> float:
        """Share of the slots in held blocks that hold no token, 0 to 1."""
        slots = self.held * self.block_size
        return self.wasted_slots / slots if slots else 0.0


class TierStats(msgspec.Struct, frozen=True):
    """Blocks in the host's memory. Counters only ever rise while the engine lives."""

    total: int = 0  # that there is room for; 0: there is no such tier
    used: int = 0
    num_offloaded: int = 0  # blocks copied from the device
    num_loaded: int = 0  # blocks copied back
    num_queries: int = 0  # prompt tokens looked for here, as the device did not have them
    num_hits: int = 0  # of these, found; prefix_cache_hits has them too


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot after a step. Counters only ever rise while the engine lives."""

    num_running: int = 0
    num_waiting: int = 0  # those that are not queued yet included
    blocks: BlockStats = BlockStats()
    tier: TierStats = TierStats()
    num_preemptions: int = 0
    num_recomputed: int = 0  # tokens that preempted sequences had to compute once more
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    num_steps: int = 0
    step_tokens: int = 0  # tokens of the step that made this snapshot
    # Summed over steps, for a mean over a whole run (slots held, and slots wasted, per step).
    slots_held_sum: int = 0
    slots_wasted_sum: int = 0
    drafts: DraftStats = DraftStats()
    running_adapters: tuple[str, ...] = ()  # names, of the sequences that run
    waiting_adapters: tuple[str, ...] = ()


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one request gained since its consumer last looked (several steps when it lags)."""

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: bytes | None = None  # little-endian float32; with the last output
    num_cached_tokens: int | None = None  # told once, with the first output
    progress: PromptProgress | None = None  # the newest, until the first token
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop or eos token that ended it; also in token_ids
    timings: RequestTimings | None = None  # with the last output


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step's news for all requests, columnar over ``ids``."""

    ids: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    finish_reasons: tuple[FinishReason | None, ...] = ()
    # Sparse: only the requests that have something to tell.
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    embeddings: dict[str, bytes] = {}  # little-endian float32
    num_cached_tokens: dict[str, int] = {}
    progress: dict[str, PromptProgress] = {}
    stop_token_ids: dict[str, int] = {}
    timings: dict[str, RequestTimings] = {}
    errors: dict[str, Failure] = {}  # these ids have finish reason "error"
    stats: EngineStats = EngineStats()


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client must know of a started engine."""

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
    generation: int = 0  # how many times the weights have been exchanged for others
    generates: bool = True  # False: it has no head that scores tokens
    pooling: PoolingInfo | None = None  # None: it makes no vectors
    window: int | None = None  # positions that a token sees at most; None: some layer sees all
    # Some layers keep a state of each sequence, which begins at its first token and only goes on.
    is_recurrent: bool = False
    whole_prompts: bool = False  # a prompt is computed in one step, and nothing of it is cached
    images: ImageRules | None = None  # None: it takes none


def _check(condition: bool, param: str, problem: str) -> None:
    if not condition:
        raise InvalidParameter(f"'{param}' {problem}", param=param)
