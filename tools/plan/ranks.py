"""A replica on one or several devices that are known by their ceilings.

The share of each rank follows from the rules by which the engine shards models
(``engine/parallel``): its parameters, its heads' keys and values, its states. The communication
follows from the collectives that the layers use. The scheduler's capacity is that of the rank with
the least memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.kv_cache.sizing import MAX_EMPTY_BLOCKS, MAX_SNAPSHOTS, SNAPSHOT_SHARE, STATE_SHARE
from engine.limits import num_row_lines
from engine.models.checkpoint import read_config
from engine.models.loader import num_parameters
from engine.models.recurrence import ChannelScanSpec, MambaSpec
from engine.models.spec import DecoderSpec
from engine.parallel.shard import Shard, num_elements, parameter_slices, shard_spec
from engine.parallel.sharding_support import check_sharding_support
from tools.plan.cost import Communication, Cost, Link, ParallelCost, Roofline, Stage
from tools.plan.errors import PlanError
from tools.plan.simulate import Replica

_GIB = 2**30
_USABLE = 0.9  # of a device's memory, as for --gpu-memory-utilization
_BLOCK = 64  # tokens per block, on a GPU
_MAX_BLOCKS = 2**22  # more than any traffic needs; the bookkeeping of more takes memory here
_ITEMSIZE = 2  # bytes of a weight, a KV cache element, and an all-reduce element
_ID_BYTES = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One of the devices that a replica runs on.

    Attributes:
        bytes_per_s: memory bandwidth.
        flops_per_s: matrix throughput.
        memory_bytes: memory size.
        efficiency: the share of both ceilings that is reached.
        overhead_s: additional time per step.
        layer_launch_s: host time to launch a layer's kernels if steps are not captured, as with
            several stages.
        link: the interconnect with the other devices.
    """

    bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    efficiency: float
    overhead_s: float
    layer_launch_s: float
    link: Link


def read_spec(model: str) -> DecoderSpec:
    """The spec of the model in a directory. Raises PlanError or ModelLoadError."""
    spec = read_config(model).spec
    if not isinstance(spec, DecoderSpec):
        raise PlanError(f"{model}: the model does not generate text")
    return spec


def replica_of(config: EngineConfig, spec: DecoderSpec, device: Device) -> Replica:
    """An engine with the ranks of ``config``, each on such a device, in bfloat16.

    Raises:
        ModelLoadError: the model cannot be sharded this way.
        PlanError: a rank's weights do not fit.
    """
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if config.enable_expert_parallel and size == 1:
        raise ModelLoadError("enable_expert_parallel needs a tensor_parallel_size above 1")
    check_sharding_support(config, spec)
    ranks = [_Rank.of(spec, Shard.of(config, number)) for number in range(config.num_ranks)]
    rooms = [_capacity(rank, config, device) for rank in ranks]
    num_blocks = min(_MAX_BLOCKS, *(room.num_blocks for room in rooms))
    keeping = [room for room in rooms if room.num_states]
    return Replica(
        name=Path(config.model).name,
        device="cuda",
        num_blocks=num_blocks,
        block_size=_BLOCK,
        max_model_len=min(spec.default_context_len, num_blocks * _BLOCK),
        num_states=min((room.num_states for room in keeping), default=0),
        num_snapshots=min((room.num_snapshots for room in keeping), default=0),
        scheduler=config.scheduler.for_device("cuda", device.memory_bytes),
        cost=_cost(ranks, device, size, num_stages),
        tensor_parallel_size=size,
        pipeline_parallel_size=num_stages,
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """The share of one rank."""

    spec: DecoderSpec
    num_parameters: int
    kv_bytes_per_token: int
    state_bytes: int

    @classmethod
    def of(cls, spec: DecoderSpec, shard: Shard) -> _Rank:
        if shard.num_ranks == 1:
            share, count = spec, num_parameters(spec)
        else:
            share, count = shard_spec(spec, shard), num_elements(parameter_slices(spec, shard))
        kv_bytes, state_bytes = share.kv_bytes_per_token(_ITEMSIZE), share.state_bytes(_ITEMSIZE)
        return cls(share, count, kv_bytes, state_bytes)

    @property
    def weights_bytes(self) -> int:
        return self.num_parameters * _ITEMSIZE


@dataclass(frozen=True, slots=True)
class _Capacity:
    """What a rank has memory for besides its weights."""

    num_blocks: int
    num_states: int
    num_snapshots: int


def _capacity(rank: _Rank, config: EngineConfig, device: Device) -> _Capacity:
    """The engine's memory plan (``engine/kv_cache/sizing.py``). Raises PlanError."""
    room = device.memory_bytes * _USABLE - rank.weights_bytes
    num_states = num_snapshots = 0
    if each := rank.state_bytes:
        lines_a_state = num_row_lines(config, 1)
        fitting = (int(room * STATE_SHARE["cuda"]) // each - 1) // lines_a_state
        num_states = max(0, min(config.scheduler.max_num_seqs, fitting))
        num_snapshots = max(0, min(MAX_SNAPSHOTS, int(room * SNAPSHOT_SHARE) // each))
        room -= (lines_a_state * num_states + 1 + num_snapshots) * each
    if rank.kv_bytes_per_token:
        num_blocks = int(room // (rank.kv_bytes_per_token * _BLOCK))
    else:  # without keys and values, blocks take no memory
        num_blocks = MAX_EMPTY_BLOCKS
    if num_blocks < 1 or (rank.state_bytes and not num_states):
        needs = rank.weights_bytes / _GIB
        whose = "the weights" if config.num_ranks == 1 else "a rank's weights"
        raise PlanError(f"--memory-gib: {whose} alone take {needs:.1f} GiB")
    return _Capacity(num_blocks, num_states, num_snapshots)


def _cost(ranks: list[_Rank], device: Device, size: int, num_stages: int) -> Cost:
    """The cost of steps; each stage counts as its rank with the most to read."""
    launch_s = device.layer_launch_s if num_stages > 1 else 0.0
    stages: list[Stage] = []
    for stage in range(num_stages):
        of_stage = ranks[stage * size : (stage + 1) * size]
        rank = max(of_stage, key=lambda each: each.num_parameters)
        share = Roofline(
            weights_bytes=rank.weights_bytes,
            kv_bytes_per_token=max(each.kv_bytes_per_token for each in of_stage),
            num_parameters=rank.num_parameters,
            bytes_per_s=device.bytes_per_s,
            flops_per_s=device.flops_per_s,
            attention_flops=4.0 * _attended_size(rank.spec),
            state_bytes=rank.state_bytes,
            efficiency=device.efficiency,
            overhead_s=device.overhead_s,
            launch_s=launch_s * rank.spec.num_layers,
        )
        if len(ranks) == 1:
            return share
        stages.append(Stage(share, size, communication_of(rank.spec, size)))
    return ParallelCost(tuple(stages), device.link)


def _attended_size(spec: DecoderSpec) -> int:
    """The total query width of all attention layers."""
    return sum(spec.for_layer(layer).query_size for layer in spec.layers if not layer.recurrent)


def communication_of(share: DecoderSpec, size: int) -> Communication:
    """The communication of a stage's ranks in a pass, derived from a rank's share of the model.

    Args:
        share: the share of one rank.
        size: the number of ranks in the stage.
    """
    stage = share.stage
    handed = returned = 0
    if stage is not None and not stage.is_last:
        behind = share.num_remaining_layers - share.num_layers
        handed = (share.hidden_size + behind * share.per_layer_size) * _ITEMSIZE
    elif stage is not None and not stage.is_first:
        returned = share.hidden_size * _ITEMSIZE
    said = Communication(activation_bytes=handed, returned_bytes=returned)
    if size == 1:
        return said
    sums = [
        each for layer in range(share.num_layers) for each in _all_reduces_of_layer(share, layer)
    ]
    tables = [share.hidden_size] if share.has_embed_and_head else []
    if share.has_embed_and_head and share.per_layer_size:
        tables.append(share.num_remaining_layers * share.per_layer_size)
    sums += [width * _ITEMSIZE for width in tables]
    choice = 0.0
    if share.has_embed_and_head and share.is_generative:
        others = share.vocab_size * (size - 1) / size * _FLOAT_BYTES  # logits
        choice = share.hidden_size * _ITEMSIZE + others
    return Communication(
        num_all_reduces=len(sums),
        all_reduce_bytes=sum(sums),
        num_broadcasts=len(tables),
        broadcast_bytes=len(tables) * _ID_BYTES,
        sampling_bytes=choice,
        activation_bytes=handed,
        returned_bytes=returned,
    )


def _all_reduces_of_layer(share: DecoderSpec, place: int) -> Iterator[int]:
    """The bytes per token of each all-reduce of a layer."""
    layer, stream = share.layers[place], share.hidden_size * _ITEMSIZE
    if layer.has_recurrence:
        recurrence = share.recurrence
        if isinstance(recurrence, ChannelScanSpec):
            yield recurrence.shared_size * _ITEMSIZE
        if (
            isinstance(recurrence, MambaSpec)
            and recurrence.is_group_sharded
            and recurrence.has_norm
        ):
            yield _FLOAT_BYTES
    if not layer.recurrent and share.wide_qk_norm:
        yield _FLOAT_BYTES
        yield _FLOAT_BYTES
    yield stream
    beside = share.moe is not None and share.moe.with_mlp and layer.experts
    if layer.mlp:
        yield 2 * stream if beside else stream
