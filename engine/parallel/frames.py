"""What rank 0 tells the other ranks, and they it; ``engine/framing.py`` says how it is sent.

Nobody but rank 0 knows of requests. Other ranks are told what one forward pass needs, as arrays of
int32 in little-endian order, and keep nothing from one step to the next but the KV cache and the
states of sequences. Tokens are not among it: rank 0 may not know them yet, so they come from its
device by a broadcast.
"""

from __future__ import annotations

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.framing import Framing
from engine.types import Adapter


class Join(msgspec.Struct, frozen=True, tag="join", array_like=True):
    """To a rank, first of all: what to load, and where to meet."""

    config: EngineConfig
    rank: int
    meeting: str | None  # the file through which ranks find each other; None: they ask rank 0
    address: str  # of its machine, for the others


class Serve(msgspec.Struct, frozen=True, tag="serve", array_like=True):
    """To a rank that has loaded: the size of the cache that all have room for."""

    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0  # slots that each rank has in the host's memory
    num_states: int = 0  # sequences that may have one at once
    num_snapshots: int = 0  # of states


class Posted(msgspec.Struct, frozen=True, tag="posted", array_like=True):
    """To and from a rank: what one has to tell the others, to find each other."""

    key: str
    value: bytes


class Met(msgspec.Struct, frozen=True, tag="met", array_like=True):
    """From a rank: it has met the others. To a rank of several machines: all have."""


class Exchange(msgspec.Struct, frozen=True, tag="exchange", array_like=True):
    """To a rank: copy blocks to slots of the host, and then from there, before anything is
    written."""

    offloads: bytes  # [o, 2]: block, slot
    loads: bytes  # [l, 2]: slot, block


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy", array_like=True):
    """To a rank: copy blocks, before the next pass writes."""

    pairs: bytes  # [c, 2]: source, target


class CopyStates(msgspec.Struct, frozen=True, tag="copy_states", array_like=True):
    """To a rank: copy states, before what comes next."""

    pairs: bytes  # [c, 2]: the lines they come from and go to


class Forward(msgspec.Struct, frozen=True, tag="forward", array_like=True):
    """To a rank: compute these rows; in a stage behind the first, from where the one before it came
    to."""

    query_start: bytes  # [R + 1], where each row's tokens begin
    starts: bytes  # [R], positions of the first of them
    tables: bytes  # [R, blocks], as many blocks as the longest row has
    sampling_rows: bytes | None  # [S], whose last tokens are wanted; None: all tokens
    adapters: tuple[Adapter, ...] = ()  # those of the rows
    adapter_rows: bytes = b""  # [R], each row's place among them, -1 for none; where there are any
    lines: bytes = b""  # [R], where each row's states lie; where the model keeps any
    turns: bytes = b""  # [3, N], the positions that tokens turn by, where these are not their own
    ends: bytes = b""  # [N], see ``BatchGeometry``; where some tokens look ahead
    # [n], where images' tokens stand in the step, whose embeddings rank 0 broadcasts in its stage,
    # and behind them as many numbers again for each of the first layers that are told of images.
    image_places: bytes = b""
    num_told: int = 0


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", array_like=True):
    """To a rank: have an adapter ready, which rank 0 could read."""

    adapter: Adapter


class Score(msgspec.Struct, frozen=True, tag="score", array_like=True):
    """To a rank of the first stage: logits of so many rows, which rank 0 broadcasts."""

    num_rows: int


class Rest(msgspec.Struct, frozen=True, tag="rest", array_like=True):
    """To a rank: give its cache back, and of its weights what a level says (``Runner.rest``)."""

    level: int


class Wake(msgspec.Struct, frozen=True, tag="wake", array_like=True):
    """To a rank that rests: have a cache again, and its weights where they are to be computed."""


class Reread(msgspec.Struct, frozen=True, tag="reread", array_like=True):
    """To a rank that rests: read its share of other weights of the model, beside those it has."""

    model: str  # their directory, or file
    generation: int


class Settle(msgspec.Struct, frozen=True, tag="settle", array_like=True):
    """To a rank that has read weights beside those it had: which of them it keeps."""

    adopts: bool  # the new ones


class Loaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    """From a rank: it has its weights."""

    num_blocks: int  # of the KV cache that it would have room for
    num_host_blocks: int  # that its part of the host's memory has room for
    weights_bytes: int
    num_states: int  # of sequences that it would have room for; 0: its layers keep none
    num_snapshots: int  # of states that it would have room for


class Prepared(msgspec.Struct, frozen=True, tag="prepared", array_like=True):
    """From a rank: it has its cache too, and comes to the meeting."""


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """From a rank: it rests, is awake, or has read."""


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """From a rank: why it could not load, last of all; or not wake or read, while it rests on."""

    message: str


Copy = Exchange | CopyBlocks | CopyStates
ToRest = Rest | Wake | Reread | Settle
ToRank = Join | Serve | Posted | Met | Copy | LoadAdapter | Forward | Score | ToRest
FromRank = Loaded | Prepared | Posted | Met | Done | Failed

_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


class RankFrames(Framing[ToRank]):
    """Reads what rank 0 says."""

    def __init__(self) -> None:
        super().__init__(_to_rank)


class LeaderFrames(Framing[FromRank]):
    """Reads what a rank says."""

    def __init__(self) -> None:
        super().__init__(_from_rank)


def pack(array: np.ndarray) -> bytes:
    """Of any shape and integer dtype."""
    return np.ascontiguousarray(array, "<i4").tobytes()


def unpack(data: bytes) -> np.ndarray:
    """What ``pack`` was given, flat and writable, int32."""
    return np.frombuffer(bytearray(data), "<i4")
