"""Counter-based randomness on the device, with the same bits as ``kernels.reference.sampling``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def position_keys(seed, position):
    """Return two uint32 keys of (seed, position), by splitmix64 (Steele et al. 2014)."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    mixed = _mix64(seed.to(tl.uint64, bitcast=True) + golden)
    mixed = _mix64(mixed + position.to(tl.uint64, bitcast=True) * golden)
    return mixed.to(tl.uint32), (mixed >> 32).to(tl.uint32)


@triton.jit
def gumbel(tokens, key_0, key_1):
    """Return Gumbel variates for token ids (int32): ``-log(e)`` with e standard exponential.

    Two rounds of MurmurHash3's finaliser (Appleby), then inversion. Kahan's correction makes
    ``log(1 - u)`` accurate for small u: the factor ``u / (1 - w)`` compensates for the rounding of
    ``1 - u``.
    """
    hashed = _mix32(tokens.to(tl.uint32) * 0x9E3779B9 ^ key_0)
    hashed = _mix32(hashed + key_1) & 0x7FFFFFFF
    u = (hashed.to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    u = tl.minimum(u, 0.9999999403953552)  # 1 - 2^-24
    w = 1.0 - u
    is_tiny = w == 1.0
    corrected = -tl.log(w) * (u / tl.where(is_tiny, 1.0, 1.0 - w))
    return -tl.log(tl.where(is_tiny, u, corrected))


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _mix32(x):
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)
