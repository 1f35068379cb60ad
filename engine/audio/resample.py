"""Band-limited resampling by a windowed sinc (Smith, Digital Audio Resampling, 2002).

An output sample at time ``t`` is the sum of the input samples around ``t``, weighted by a sinc of
the lower of both rates' bandwidths under a Kaiser window. With ``up / down`` the ratio of rates in
lowest terms, output ``n`` lies at input ``n * down / up``, so the weights repeat every ``up``
outputs: each such phase is one strided product of matrix and vector.
"""

from __future__ import annotations

import functools
import math

import numpy as np

_ZERO_CROSSINGS = 32  # of the sinc, on each side
_BETA = 12.9846  # of the Kaiser window: side lobes below -120 dB
_ROLLOFF = 0.9175  # of the band, below which nothing is lost; the rest is the transition


def resample(samples: np.ndarray, rate: int, wanted_rate: int) -> np.ndarray:
    """Resample a signal; outside of it is silence.

    Args:
        samples: [n] float32.
        rate: its sampling rate in Hz.
        wanted_rate: the output's.

    Returns:
        [ceil(n * wanted_rate / rate)] float32.
    """
    if rate == wanted_rate or not samples.size:
        return np.ascontiguousarray(samples, np.float32)
    divisor = math.gcd(rate, wanted_rate)
    up, down = wanted_rate // divisor, rate // divisor
    bandwidth = min(1.0, wanted_rate / rate) * _ROLLOFF
    reach = math.ceil(_ZERO_CROSSINGS / bandwidth)  # input samples on each side
    num_taps = 2 * reach
    # Rows of a product must not overlap, or it would be copied: several periods make a row.
    periods = -(-num_taps // down)
    up, down = up * periods, down * periods
    count = -(-samples.size * wanted_rate // rate)
    num_rows = -(-count // up)
    padded = np.zeros((num_rows + 1) * down + num_taps + reach, np.float32)
    padded[reach : reach + samples.size] = samples
    found = np.empty((num_rows, up), np.float32)
    offsets = np.arange(1 - reach, reach + 1)  # of the taps, from the sample at or before
    for phase in range(up):
        whole, part = divmod(phase * down, up)
        begin = whole + 1  # of the first tap, as ``padded`` begins ``reach`` before the signal
        rows = np.lib.stride_tricks.as_strided(
            padded[begin:], (num_rows, num_taps), (down * padded.itemsize, padded.itemsize)
        )
        found[:, phase] = rows @ _weights(offsets - part / up, bandwidth, reach)
    return found.ravel()[:count]


def _weights(distances: np.ndarray, bandwidth: float, reach: int) -> np.ndarray:
    """Return the weights of input samples at these distances from an output sample."""
    window = np.interp(np.abs(distances) / reach, *_window())
    return (bandwidth * np.sinc(bandwidth * distances) * window).astype(np.float32)


@functools.cache
def _window() -> tuple[np.ndarray, np.ndarray]:
    """Return places from the centre (0) to the edge (1) of the Kaiser window, and its values."""
    places = np.linspace(0, 1, 2**14)
    return places, np.i0(_BETA * np.sqrt(1 - places**2)) / np.i0(_BETA)
