"""Messages between rank 0 and the other ranks; ``engine/framing.py`` defines the encoding.

Only rank 0 knows of requests. Other ranks receive what one forward pass needs, as little-endian
int32 arrays, and keep nothing between steps except the KV cache and the sequences' recurrent
states. Token ids are not in the messages: rank 0 may not have them on the host yet, so they are
broadcast from its device.
"""

from __future__ import annotations

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.framing import Framing
from engine.runner.step_peers import GraphKey
from engine.types import Adapter


class Join(msgspec.Struct, frozen=True, tag="join", array_like=True):
    """To a rank, first of all: what to load, and where to meet."""

    config: EngineConfig
    rank: int
    rendezvous_file: str | None  # file through which ranks meet; None: through rank 0
    address: str  # of its machine, for the others


class AllocateCache(msgspec.Struct, frozen=True, tag="allocate_cache", array_like=True):
    """To a rank that has loaded: the cache size that fits on all ranks."""

    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0  # slots of each rank in host memory
    num_states: int = 0  # sequences with a recurrent state at once
    num_snapshots: int = 0  # of recurrent states


class StoreValue(msgspec.Struct, frozen=True, tag="store_value", array_like=True):
    """To and from a rank: a value that ranks publish in order to find each other."""

    key: str
    value: bytes


class RendezvousDone(msgspec.Struct, frozen=True, tag="rendezvous_done", array_like=True):
    """From a rank: it has met the others. To a rank of several machines: all have."""


class SwapBlocks(msgspec.Struct, frozen=True, tag="swap_blocks", array_like=True):
    """To a rank: copy blocks to host slots and then from them, before anything is written."""

    offloads: bytes  # [o, 2]: block, slot
    loads: bytes  # [l, 2]: slot, block


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy_blocks", array_like=True):
    """To a rank: copy blocks, before the next pass writes."""

    pairs: bytes  # [c, 2]: source, target


class CopyStates(msgspec.Struct, frozen=True, tag="copy_states", array_like=True):
    """To a rank: copy recurrent states, before the next message."""

    pairs: bytes  # [c, 2]: source line, target line


class Forward(msgspec.Struct, frozen=True, tag="forward", array_like=True):
    """To a rank: compute these rows. Later stages start from the previous stage's result."""

    query_start: bytes  # [R + 1], where each row's tokens begin
    starts: bytes  # [R], positions of the first of them
    tables: bytes  # [R, blocks], as many blocks as the longest row has
    sampling_rows: bytes | None  # [S], rows whose last token is needed; None: all tokens
    adapters: tuple[Adapter, ...] = ()  # those of the rows
    adapter_rows: bytes = b""  # [R], each row's adapter, an index; -1: none; empty if all are
    lines: bytes = b""  # [R], each row's line of recurrent states, if there are any
    # [3, N], or [N] in a captured step; empty if they are the tokens' positions
    rotary_positions: bytes = b""
    query_ends: bytes = b""  # [N], see ``BatchGeometry``; where some tokens look ahead
    # [n], the step's image tokens. Rank 0 broadcasts their embeddings in its stage, and as many
    # numbers again for each of the ``num_deepstack`` first layers with image features.
    image_places: bytes = b""
    num_deepstack: int = 0
    graph: GraphKey | None = None  # which captured step computes it; None: it is not captured


class CaptureStep(msgspec.Struct, frozen=True, tag="capture_step", array_like=True):
    """To a rank: capture a step as all ranks do at once."""

    graph: GraphKey


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", array_like=True):
    """To a rank: load an adapter, which rank 0 was able to read."""

    adapter: Adapter


class ComputeLogits(msgspec.Struct, frozen=True, tag="compute_logits", array_like=True):
    """To a rank of the first stage: compute logits of rows that rank 0 broadcasts."""

    num_rows: int


class Sleep(msgspec.Struct, frozen=True, tag="sleep", array_like=True):
    """To a rank: free its cache, and weights according to the level (``Runner.sleep``)."""

    level: int


class Wake(msgspec.Struct, frozen=True, tag="wake", array_like=True):
    """To a sleeping rank: allocate a cache again, and bring its weights back to the device."""


class ReadWeights(msgspec.Struct, frozen=True, tag="read_weights", array_like=True):
    """To a sleeping rank: read its shard of other weights, and keep the current ones as well."""

    model: str  # their directory or file
    generation: int


class FinishReload(msgspec.Struct, frozen=True, tag="finish_reload", array_like=True):
    """To a rank that has read other weights: which of the two it keeps."""

    adopt: bool  # the new ones


class Loaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    """From a rank: its weights are loaded."""

    num_blocks: int  # KV blocks that fit in its memory
    num_host_blocks: int  # blocks that fit in its part of host memory
    weights_bytes: int
    num_states: int  # sequences' states that fit; 0: not recurrent
    num_snapshots: int  # snapshots of states that fit
    captures_steps: bool = False  # see ``LoadPlan``


class Prepared(msgspec.Struct, frozen=True, tag="prepared", array_like=True):
    """From a rank: its cache is allocated, and it is about to meet the others."""


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """From a rank: it is asleep, is awake, has read, or has captured."""


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """From a rank: why it could not load, as the last message; or not wake or read, while it
    keeps sleeping; or not capture."""

    message: str


Copy = SwapBlocks | CopyBlocks | CopyStates
SleepMessage = Sleep | Wake | ReadWeights | FinishReload
ToRank = (
    Join
    | AllocateCache
    | StoreValue
    | RendezvousDone
    | Copy
    | LoadAdapter
    | Forward
    | ComputeLogits
    | CaptureStep
    | SleepMessage
)
FromRank = Loaded | Prepared | StoreValue | RendezvousDone | Done | Failed

_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


class ToRankReader(Framing[ToRank]):
    """Reads messages of rank 0."""

    def __init__(self) -> None:
        super().__init__(_to_rank)


class FromRankReader(Framing[FromRank]):
    """Reads messages of a rank."""

    def __init__(self) -> None:
        super().__init__(_from_rank)


def pack(array: np.ndarray) -> bytes:
    """Encode an array of any shape and integer dtype."""
    return np.ascontiguousarray(array, "<i4").tobytes()


def unpack(data: bytes) -> np.ndarray:
    """Return what ``pack`` was given, flat and writable, int32."""
    return np.frombuffer(bytearray(data), "<i4")
