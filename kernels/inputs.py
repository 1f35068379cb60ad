"""The data types of the kernel that builds a step's inputs on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StepRows(NamedTuple):
    """The rows of a step; the tensors are slices of one packed transfer, all int32.

    A padding row of a captured batch has no tokens, or n that start at position -n. For recurrent
    layers rows may also be on trial, or without tokens (``kernels/recurrent.py``); if there are as
    many rows as tokens, each row has one token.
    """

    slots: torch.Tensor  # [rows], each row's line in the persistent tensors
    query_start: torch.Tensor  # [rows + 1], first token of each row in the batch
    starts: torch.Tensor  # [rows], position of each row's first token
    token_ids: torch.Tensor  # [tokens]; -1: the row's newest token, on the device
    # The most tokens of a row that is not padding; None: unknown. Recurrent layers do without
    # kernels for longer ones.
    longest: int | None = None


class StepInputs(NamedTuple):
    """The inputs of the layers and the attention."""

    input_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64; below 0 for padding
    slot_mapping: torch.Tensor  # [tokens] int64, block * block_size + offset; -1 for padding
    seq_lens: torch.Tensor  # [rows] int32, this step's tokens included; 0 for padding
    next_positions: torch.Tensor  # [rows] int64, of the following tokens: as seq_lens
