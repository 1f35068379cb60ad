"""Log-mel spectrograms as Whisper's feature extractor computes them (Radford et al. 2022)."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from engine.models.audio.spec import MelSpec

_HIGHEST_HZ = 8_000.0
_BLOCK_FRAMES = 3000  # transformed at once, to bound the memory
_FLOOR = 1e-10  # of a mel's energy
_RANGE = 8.0  # decades below the loudest that are kept
_BREAK_HZ, _BREAK_MEL = 1_000.0, 15.0  # the scale is linear below, and logarithmic above
_LOG_STEP = math.log(6.4) / 27.0


def log_mel(samples: torch.Tensor, filters: torch.Tensor, spec: MelSpec) -> torch.Tensor:
    """Compute the log-mel frames of a clip.

    Args:
        samples: [n] float32, at least ``spec.window`` of them.
        filters: ``mel_filters``, on the samples' device.
        spec: of the spectrogram.

    Returns:
        [num_mels, n // hop] float32.
    """
    window = torch.hann_window(spec.window, device=samples.device)
    half = spec.window // 2
    mirrored = functional.pad(samples[None], (half, half), mode="reflect")[0]
    num_frames = samples.shape[0] // spec.hop
    parts = []
    for first in range(0, num_frames, _BLOCK_FRAMES):
        last = min(first + _BLOCK_FRAMES, num_frames) - 1
        block = mirrored[first * spec.hop : last * spec.hop + spec.window]
        spectrum = torch.stft(
            block, spec.window, spec.hop, window=window, center=False, return_complex=True
        )
        parts.append((filters @ spectrum.abs().square()).clamp_(min=_FLOOR).log10_())
    found = torch.cat(parts, 1)
    found = torch.maximum(found, found.max() - _RANGE)
    return found.add_(4.0).div_(4.0)


def mel_filters(spec: MelSpec) -> torch.Tensor:
    """Return triangles of equal area, evenly spaced on Slaney's mel scale.

    [num_mels, window // 2 + 1] float32; the columns are the frequencies of the transform. (Slaney,
    Auditory Toolbox, 1998.)
    """
    num_bins = spec.window // 2 + 1
    bins = torch.linspace(0, spec.sampling_rate / 2, num_bins, dtype=torch.float64)
    last = _mel(_HIGHEST_HZ)
    corners = _hertz(torch.linspace(0, last, spec.num_mels + 2, dtype=torch.float64))
    left, centre, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (bins - left) / (centre - left), (right - bins) / (right - centre)
    triangles = torch.minimum(rising, falling).clamp_(min=0)
    return (triangles * (2.0 / (right - left))).float()


def _mel(hertz: float) -> float:
    if hertz < _BREAK_HZ:
        return hertz * _BREAK_MEL / _BREAK_HZ
    return _BREAK_MEL + math.log(hertz / _BREAK_HZ) / _LOG_STEP


def _hertz(mels: torch.Tensor) -> torch.Tensor:
    linear = mels * (_BREAK_HZ / _BREAK_MEL)
    return torch.where(
        mels < _BREAK_MEL, linear, _BREAK_HZ * torch.exp(_LOG_STEP * (mels - _BREAK_MEL))
    )
