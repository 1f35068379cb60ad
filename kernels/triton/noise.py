"""Counter-based randomness on the device, with the same bits as ``kernels.reference.sampling``
before the logarithms."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import INTERPRETED

_COMPILED: tl.constexpr = tl.constexpr(not INTERPRETED)


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

    Two rounds of MurmurHash3's finaliser (Appleby), then inversion: ``e = -log(1 - u)``.
    """
    hashed = _mix32(tokens.to(tl.uint32) * 0x9E3779B9 ^ key_0)
    hashed = _mix32(hashed + key_1) & 0x7FFFFFFF
    # (hashed + 0.5) / 2^31; a scale by a power of two does not change how the sum is rounded.
    u = hashed.to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10
    u = tl.minimum(u, 0.9999999403953552)  # 1 - 2^-24
    # Below 1/16 the rounding of 1 - u would matter: the series of -log(1 - u), whose next term,
    # u^6 / 7, is less than 1e-8 of it.
    series = 0.2 + u * 0.16666667
    series = 0.25 + u * series
    series = 0.33333334 + u * series
    series = 0.5 + u * series
    series = u + u * u * series
    return -_log(tl.where(u < 0.0625, series, -_log(1.0 - u)))


@triton.jit
def _log(x):
    """Return the natural logarithm of normal numbers, with an error of 3e-7 times the larger of 1
    and the result.

    It is the machine's own logarithm to base 2 (PTX ISA, ``lg2.approx``), one instruction instead
    of about twenty. Together the two of a variate err by less than 4e-6, a few roundings of the
    score that it is added to.
    """
    if _COMPILED:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.6931471805599453
    return tl.log(x)


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
