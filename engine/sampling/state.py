"""Per-request sampling state that persists between steps, in one slot per row.

A slot is written when its row is added. The parameters exist on the host and on the device. On a
CPU both are the same memory; on a GPU changed slots are sent with the next step's transfer.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.sampling.constraint import Constraint
from engine.sampling.counts import CountLines
from engine.sampling.masks import MaskLines
from engine.sampling.seeds import request_seed
from engine.types import AddedRow, Request
from kernels.sampling import LogitBias, SamplingTable, TokenCounts
from kernels.transfer import to_device

_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_INTEGERS = ("top_k", "count_line", "mask_line", "bias_begin", "bias_end")
_COLUMNS = _FLOATS + _INTEGERS
_FOREVER = 2**62
_ALIGNED = 4  # column alignment, in numbers
_NO_SLOTS = np.empty(0, np.int32)
_NO_COLUMNS, _NO_SEEDS = np.empty((len(_COLUMNS), 0), np.int32), np.empty((0, 2), np.int32)
# At lower temperatures dividing the logits overflows; the most likely token is certain long before.
_MIN_TEMPERATURE = 1e-4


class SamplingState:
    """The table, counts, masks and biases that ``Operations.sample`` reads.

    Args:
        capacity: number of slots.
        vocab_size: of the model.
        eos_token_ids: tokens that end a text, banned like stop ids until ``min_tokens``.
        device: of the kernels.
    """

    def __init__(
        self,
        capacity: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.vocab_size = vocab_size
        # A config may name tokens without logits, which need no ban.
        self._eos = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._device = device
        # Columns are aligned to 16 bytes, as separate tensors would be, so that a GPU's kernels are
        # compiled only once for both.
        width = -(-capacity // _ALIGNED) * _ALIGNED
        self._columns = np.zeros((len(_COLUMNS), width), np.int32)
        self._seeds = np.zeros(capacity, np.int64)
        self._host = {name: self._columns[i] for i, name in enumerate(_COLUMNS)}
        for name in _FLOATS:
            self._host[name] = self._host[name].view(np.float32)
        self._device_columns = torch.from_numpy(self._columns).to(device)
        self._device_seeds = torch.from_numpy(self._seeds).to(device)
        self.table = _table(self._device_columns, self._device_seeds)
        self.num_logprobs = np.full(capacity, -1)  # requested with each token; -1: none
        self._changed: list[int] = []
        self._lines = CountLines(vocab_size, device)
        self._masks = MaskLines(vocab_size, self._eos, device)
        self._biases: dict[int, tuple[list[int], list[float], list[int]]] = {}
        self._bias: LogitBias | None = None
        self._bias_is_stale = False
        self._host["count_line"][:] = -1
        self._host["mask_line"][:] = -1
        self._changed.extend(range(capacity))

    # ------------------------------------------------------------ adding and removing rows

    def set(self, slot: int, added: AddedRow) -> None:
        """Write a request's parameters, and initialise its counts and mask with its text so far."""
        request, output_ids = added.request, added.output_ids
        sampling, host = request.sampling, self._host
        temperature = sampling.temperature
        temperature = max(temperature, _MIN_TEMPERATURE) if temperature else 0.0
        host["temperature"][slot] = temperature
        host["top_p"][slot] = sampling.top_p
        host["min_p"][slot] = sampling.min_p
        host["top_k"][slot] = max(sampling.top_k, 0)
        host["presence"][slot] = sampling.presence_penalty
        host["frequency"][slot] = sampling.frequency_penalty
        host["repetition"][slot] = sampling.repetition_penalty
        self._seeds[slot] = request_seed(request)
        self.num_logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        is_penalised = (
            sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
            or sampling.repetition_penalty != 1.0
        )
        host["count_line"][slot] = (
            self._lines.allocate(slot, request.prompt_token_ids, output_ids) if is_penalised else -1
        )
        is_masked = Constraint.applies_to(request)
        host["mask_line"][slot] = (
            self._masks.allocate(slot, request, output_ids, added.grammar) if is_masked else -1
        )
        self._set_bias(slot, request, bans_ends=not is_masked)
        self._changed.append(slot)

    def clear(self, slot: int) -> None:
        """Free what a slot holds besides its columns, which the next ``set`` overwrites."""
        self._lines.free(slot)
        self._masks.free(slot)
        if self._biases.pop(slot, None) is not None:
            self._bias_is_stale = True

    def _set_bias(self, slot: int, request: Request, *, bans_ends: bool) -> None:
        sampling = request.sampling
        self._host["bias_begin"][slot] = self._host["bias_end"][slot] = 0
        ids = list(sampling.logit_bias)
        values = list(sampling.logit_bias.values())
        until = [_FOREVER] * len(ids)
        if sampling.min_tokens and bans_ends:  # otherwise the mask does
            ends = set(sampling.stop_token_ids)
            if not sampling.ignore_eos:
                ends.update(self._eos)
            ids += sorted(ends)
            values += [float("-inf")] * len(ends)
            until += [len(request.prompt_token_ids) + sampling.min_tokens] * len(ends)
        if ids:
            self._biases[slot] = ids, values, until
            self._bias_is_stale = True

    # ------------------------------------------------------------ read by a step

    def counts(self, slots: np.ndarray) -> TokenCounts | None:
        """The counts, if any of these rows has penalties."""
        return self._lines.counts if (self._host["count_line"][slots] >= 0).any() else None

    def bias(self, slots: np.ndarray) -> LogitBias | None:
        """The biases, if any of these rows has one. Call ``flush`` first."""
        has_bias = (self._host["bias_end"][slots] > self._host["bias_begin"][slots]).any()
        return self._bias if has_bias else None

    def is_masked(self, slots: np.ndarray) -> np.ndarray:
        """Which of these rows have a mask: [rows] bool."""
        return self._host["mask_line"][slots] >= 0

    def mask_lines(self, slots: np.ndarray) -> np.ndarray:
        """The lines of these rows in the masks: [rows] int32, -1 without a mask."""
        return self._host["mask_line"][slots]

    def temperature(self, slots: np.ndarray) -> np.ndarray:
        """The temperatures of these rows: [rows] float32, 0 for greedy ones."""
        return self._host["temperature"][slots]

    def count_lines(self, slots: np.ndarray) -> np.ndarray:
        """The lines of these rows in the counts: [rows] int32, -1 without penalties."""
        return self._host["count_line"][slots]

    @property
    def masks(self) -> MaskLines:
        """The lines of masks."""
        return self._masks

    # ------------------------------------------------------------ to the device

    def flush(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The changes that have not been written: slots [k], columns [fields, k], seeds [k, 2].

        All are int32, to be transferred with the step and passed to ``write``; empty on a CPU.
        """
        if self._bias_is_stale:
            self._rebuild_biases()
        if not self._changed or self._device.type == "cpu":
            self._changed.clear()
            return _NO_SLOTS, _NO_COLUMNS, _NO_SEEDS
        changed = np.array(self._changed, np.int32)
        columns = np.ascontiguousarray(self._columns[:, changed])
        return changed, columns, self._seeds[changed].view(np.int32)

    def write(self, slots: torch.Tensor, columns: torch.Tensor, seeds: torch.Tensor) -> None:
        """Apply changes from ``flush``, now on the device, to the table."""
        if slots.numel():
            self._changed.clear()
            at = slots.long()
            self._device_columns.index_copy_(1, at, columns)
            # Not a view as int64, since a slice of the transfer may be unaligned.
            pairs = torch.empty_like(seeds.view(-1, 2)).copy_(seeds.view(-1, 2))
            self._device_seeds.index_copy_(0, at, pairs.view(torch.int64).squeeze(1))

    def _rebuild_biases(self) -> None:
        """Rebuild the contiguous list of all biases; few requests have any, so this is rare."""
        ids: list[int] = []
        values: list[float] = []
        until: list[int] = []
        for slot, (own_ids, own_values, own_until) in self._biases.items():
            self._host["bias_begin"][slot] = len(ids)
            ids += own_ids
            values += own_values
            until += own_until
            self._host["bias_end"][slot] = len(ids)
            self._changed.append(slot)
        self._bias = LogitBias(
            to_device(torch.tensor(ids, dtype=torch.int32), self._device),
            to_device(torch.tensor(values, dtype=torch.float32), self._device),
            to_device(torch.tensor(until, dtype=torch.int64), self._device),
        )
        self._bias_is_stale = False


def _table(columns: torch.Tensor, seeds: torch.Tensor) -> SamplingTable:
    by_name = {name: columns[i] for i, name in enumerate(_COLUMNS)}
    for name in _FLOATS:
        by_name[name] = by_name[name].view(torch.float32)
    return SamplingTable(**by_name, seed=seeds)
