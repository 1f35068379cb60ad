"""A rank's shard of a model (Shoeybi et al. 2019, Megatron-LM).

A product ``y = x W^T`` is cut in one of two ways. By *outputs* (rows of W): every rank reads all of
x and computes some of y. By *inputs* (columns of W): a rank reads its own part of x and computes a
partial sum of all of y. The first projection of attention or an MLP is cut by outputs, by whole
heads, and the last one by inputs, so that what lies between needs no communication:

    x ──► qkv [heads / N] ──► attention of these heads ──► output [inputs / N] ──► sum over ranks
    x ──► gate, up [inner / N] ──► activation ──► down [inputs / N] ──► sum over ranks

A rank is therefore a smaller model of the same kind, with fewer heads and narrower MLPs:
``shard_spec`` makes its spec, and the comparison of both parameter tables gives its part of each
parameter.

The experts of a mixture are narrow already. They may be distributed whole instead (Lepikhin et al.
2020, GShard): a rank has a range of them, and its result is the sum over those of a token's experts
that it has. All ranks have all tokens and sum after the MLP anyway, so there is no additional
communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.config import EngineConfig
from engine.models.recurrence import GatedDeltaSpec, MambaSpec, RecurrenceSpec
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec
from engine.models.weights import Parameter, parameters
from engine.parallel.stages import stage_of

# Cut by tokens; some ranks may have one more than others.
_VOCAB_TABLES = ("embedding", "head", "head.bias", "per_layer.embedding")
# Biases added to a sum over ranks: the first rank has them, the others have zeros.
_FIRST_RANK_BIASES = (".output.bias", ".down.bias", ".experts.down.bias")


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a stage, and how the model is sharded."""

    rank: int  # number within its stage
    size: int  # ranks of a stage
    expert_parallel: bool = False  # experts are distributed whole
    stage: int = 0
    num_stages: int = 1

    @classmethod
    def of(cls, config: EngineConfig, number: int) -> Shard:
        """Return the shard of rank ``number`` of all, as the config specifies."""
        stage, rank = divmod(number, config.tensor_parallel_size)
        return cls(
            rank,
            config.tensor_parallel_size,
            config.enable_expert_parallel,
            stage,
            config.pipeline_parallel_size,
        )

    @property
    def number(self) -> int:
        """Number among all ranks; rank 0 has the scheduler."""
        return self.stage * self.size + self.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.num_stages * self.size

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the final norm."""
        return self.stage == self.num_stages - 1

    def __str__(self) -> str:
        """Describe the sharding, by the names of the settings."""
        experts = ", whole experts" if self.expert_parallel else ""
        stages = f", pipeline_parallel_size {self.num_stages}" if self.num_stages > 1 else ""
        return f"tensor_parallel_size {self.size}{experts}{stages}"

    def bounds(self, total: int) -> tuple[int, int]:
        """Return its range of ``total`` things, [begin, end); ranges differ by at most one."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size


class RowRange(NamedTuple):
    """A range of rows: where it is in a parameter, and where in the rank's part of that."""

    full: slice
    local: slice


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A rank's part of a parameter.

    Attributes:
        full: the parameter.
        local: the rank's, with the same number of parts.
        run_starts: its first row of each run of each part.
        columns: its range of the second dimension; None: all, or there is no such dimension.
        is_zero: it holds zeros instead of the values.
    """

    full: Parameter
    local: Parameter
    run_starts: tuple[tuple[int, ...], ...]
    columns: slice | None
    is_zero: bool = False

    def has(self, part: int | None) -> bool:
        """Return whether the rank has anything of a part, or of any part."""
        return any(self.local.parts[slice(None) if part is None else slice(part, part + 1)])

    def for_part(self, part: int | None) -> ParameterSlice:
        """Return the rank's part of one part, as if that were the parameter."""
        if part is None:
            return self
        at = slice(part, part + 1)
        whole, own = (
            replace(parameter, parts=parameter.parts[at], runs=parameter.runs[at])
            for parameter in (self.full, self.local)
        )
        return replace(self, full=whole, local=own, run_starts=self.run_starts[at])

    def row_ranges(self, part: int | None) -> Iterator[RowRange]:
        """Yield the row ranges of a part, or of all parts: their places in what fills it, and in
        the rank's parameter."""
        parts = range(len(self.run_starts)) if part is None else (part,)
        filled = self.full.rows(part).start
        for at in parts:
            if not self.local.parts[at]:
                continue
            run, own = self.full.rows(at).start - filled, self.local.rows(at).start
            lengths = self.full.runs_of(at), self.local.runs_of(at), self.run_starts[at]
            for length, share, begin in zip(*lengths, strict=True):
                yield RowRange(slice(run + begin, run + begin + share), slice(own, own + share))
                run, own = run + length, own + share


def shard_spec(spec: DecoderSpec, shard: Shard) -> DecoderSpec:
    """Return a rank's model: a stage of the whole, with fewer heads and narrower MLPs.

    It keeps the whole vocabulary, which all ranks use. KV heads fewer than the ranks are
    replicated. What does not divide has been refused by ``engine.parallel.sharding_support``.
    """
    size = shard.size
    if shard.num_stages > 1:
        spec = stage_of(spec, shard.stage, shard.num_stages)
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        alibi_slopes=_own_slopes(spec, shard),
        layers=tuple(_shard_layer(layer, size) for layer in spec.layers),
        intermediate_size=spec.intermediate_size // size,
        moe=None if spec.moe is None else _shard_experts(spec.moe, shard),
        recurrence=None if spec.recurrence is None else _shard_recurrence(spec.recurrence, size),
    )


def _own_slopes(spec: DecoderSpec, shard: Shard) -> tuple[float, ...] | None:
    begin, end = shard.bounds(spec.num_heads)
    return None if spec.alibi_slopes is None else spec.alibi_slopes[begin:end]


def parameter_slices(spec: DecoderSpec, shard: Shard) -> dict[str, ParameterSlice]:
    """Return the rank's part of each parameter of the whole model in its stage."""
    own = parameters(shard_spec(spec, shard))

    def is_zero(name: str) -> bool:
        is_whole = shard.expert_parallel and ".experts." in name  # then already distributed
        return shard.rank > 0 and name.endswith(_FIRST_RANK_BIASES) and not is_whole

    return {
        name: _slice_table(whole, shard)
        if name in _VOCAB_TABLES
        else _slice_parameter(whole, own[name], shard, is_zero=is_zero(name))
        for name, whole in parameters(spec).items()
        if name in own
    }


def local_parameters(cuts: Mapping[str, ParameterSlice]) -> dict[str, Parameter]:
    """Return the rank's parameters by name."""
    return {name: cut.local for name, cut in cuts.items()}


def num_elements(cuts: Mapping[str, ParameterSlice]) -> int:
    """Return how many numbers the rank has."""
    return sum(math.prod(cut.local.shape) for cut in cuts.values())


def _shard_experts(moe: MoeSpec, shard: Shard) -> MoeSpec:
    shared = moe.shared_intermediate_size // shard.size
    moe = replace(moe, identity_scale=moe.identity_scale / shard.size)
    if shard.expert_parallel:
        held = shard.bounds(moe.num_experts)
        return replace(moe, local_expert_range=held, shared_intermediate_size=shared)
    inner = moe.intermediate_size // shard.size
    return replace(moe, intermediate_size=inner, shared_intermediate_size=shared)


def _shard_layer(layer: LayerSpec, size: int) -> LayerSpec:
    """Shard the heads and widths in which a layer differs from the model."""
    heads, inner = layer.heads, layer.intermediate_size
    if heads is not None:
        heads = replace(
            heads,
            num_kv_heads=max(1, heads.num_kv_heads // size),
            num_heads=None if heads.num_heads is None else heads.num_heads // size,
        )
    return replace(layer, heads=heads, intermediate_size=None if inner is None else inner // size)


def _shard_recurrence(spec: RecurrenceSpec, size: int) -> RecurrenceSpec:
    """Divide heads or channels. Key heads fewer than the ranks are replicated, as are the
    projections that the heads of a group share."""
    if isinstance(spec, GatedDeltaSpec):
        return replace(
            spec,
            num_key_heads=max(1, spec.num_key_heads // size),
            num_value_heads=spec.num_value_heads // size,
        )
    if isinstance(spec, MambaSpec):
        return replace(
            spec,
            num_heads=spec.num_heads // size,
            num_groups=max(1, spec.num_groups // size),
            is_group_sharded=size > spec.num_groups,
        )
    return replace(spec, channels=spec.channels // size)


def _slice_parameter(
    whole: Parameter, own: Parameter, shard: Shard, *, is_zero: bool
) -> ParameterSlice:
    """Cut a parameter to the rank's lengths, in every dimension where these are shorter."""
    own = _in_place(whole, own, shard)
    begins = tuple(
        tuple(
            _slice_start(length, share, shard)
            for length, share in zip(whole.runs_of(part), own.runs_of(part), strict=True)
        )
        for part in range(len(whole.parts))
    )
    columns = None
    if whole.trailing != own.trailing:
        begin = _slice_start(whole.trailing[0], own.trailing[0], shard)
        columns = slice(begin, begin + own.trailing[0])
    return ParameterSlice(whole, own, begins, columns, is_zero)


def _in_place(whole: Parameter, own: Parameter, shard: Shard) -> Parameter:
    """Return the rank's parameter with as many parts as the whole has: it has fewer of equal ones
    (those of its heads), and nothing of the others."""
    if len(own.parts) == len(whole.parts):
        return own
    count = len(own.parts)
    begin = _slice_start(len(whole.parts), count, shard)
    places = range(begin, begin + count)
    return replace(
        own, parts=tuple(size if at in places else 0 for at, size in enumerate(whole.parts))
    )


def _slice_table(whole: Parameter, shard: Shard) -> ParameterSlice:
    begin, end = shard.bounds(whole.parts[0])
    return ParameterSlice(whole, replace(whole, parts=(end - begin,)), ((begin,),), None)


def _slice_start(length: int, share: int, shard: Shard) -> int:
    """Return where a rank's ``share`` of ``length`` begins; with fewer shares than ranks,
    neighbours have the same one."""
    if share in (0, length):
        return 0
    return share * (shard.rank * (length // share) // shard.size)
