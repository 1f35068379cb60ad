"""Caches whose blocks are interleaved with those of other layers, as on a CPU."""

from __future__ import annotations

import torch

from kernels.attention import LayerCache

_OTHER = 77  # content of the neighbours' blocks


def side_by_side(cache: LayerCache) -> LayerCache:
    """The same contents, with a block of another layer before and after each block."""

    assert not cache.has_shared_values
    keys, values, *scales = map(_between, cache.tensors())
    return LayerCache(keys, values, *scales)


def others_are_untouched(cache: LayerCache) -> bool:
    """Whether the neighbours of a cache from ``side_by_side`` are unchanged."""
    for stored in cache.tensors():
        run = stored._base
        assert run is not None
        others = run.view(torch.uint8).view(len(stored), 3, -1)[:, ::2]
        if not bool((others == _OTHER).all()):
            return False
    return True


def _between(stored: torch.Tensor) -> torch.Tensor:
    run = stored.new_empty((stored.shape[0], 3, *stored.shape[1:]))
    run.view(torch.uint8).fill_(_OTHER)
    run[:, 1] = stored
    return run[:, 1]
