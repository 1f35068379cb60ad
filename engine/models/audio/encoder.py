"""An audio encoder: one implementation for all families, made from a spec and weights."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping

import torch
from torch.nn import functional

from engine.audio.types import AudioRules
from engine.models.audio.config import AudioConfig
from engine.models.audio.features import log_mel, mel_filters
from engine.models.audio.spec import AudioSpec, FrameConvSpec, PlaneConvSpec
from engine.models.loader import dummy_weights, load_weights
from engine.models.safetensors import Header
from engine.models.vision.layers import ACTIVATIONS, Block, Merger, read_norm
from engine.models.vision.patches import Windows
from engine.models.vision.tower import ImageEmbeddings, merge_chunks, run_to_end

# States per piece: at most a tenth of a second on two cores, with the widest encoders.
_MAX_STATES_ON_CPU = 256
_GROUP_STATES = 1536  # computed together, or one window if it has more
_CHUNKS_PER_PIECE = 4  # of a second, in convolutions over planes
_OWN_BYTES = 16 * 2**20  # used by torch's kernels for any clip
_MAX_PERIOD = 10_000.0  # of sinusoidal positions


class AudioEncoder:
    """A loaded audio encoder.

    Args:
        spec: of the encoder.
        rules: of the model.
        tensors: its parameters, as ``load_audio_encoder`` makes them.
    """

    def __init__(
        self, spec: AudioSpec, rules: AudioRules, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self.spec = spec
        self.rules = rules
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        count = 2 if isinstance(spec.convolutions, FrameConvSpec) else 3
        self._convolutions = tuple(
            (tensors[f"conv.{i}.weight"], tensors[f"conv.{i}.bias"]) for i in range(count)
        )
        self._join = tensors.get("join.weight")
        self._positions = tensors["positions"]
        self._blocks = tuple(Block(spec, tensors, str(i)) for i in range(spec.num_layers))
        self._final_norm = read_norm(spec.norm, tensors, "final_norm")
        self._projector: Merger | None = None
        if spec.projector is not None:
            self._projector = Merger(spec, spec.projector, tensors, "projector")
        self._dtype = self._convolutions[0][0].dtype
        self._filters = mel_filters(spec.mel).to(self._positions.device)
        self._activate = ACTIVATIONS["gelu"]

    def embed(self, samples: torch.Tensor) -> ImageEmbeddings:
        """Embed a clip.

        Args:
            samples: [n] float32 at the model's rate, on the encoder's device.
        """
        return run_to_end(self.embed_chunks(samples))

    def embed_chunks(self, samples: torch.Tensor) -> Generator[None, None, ImageEmbeddings]:
        """Run ``embed`` in pieces: each iteration computes one, and the embeddings are returned at
        the end.

        Other work between two pieces does not affect the result. On a CPU a piece is a part of a
        layer for some hundred states, on a GPU for all of them.
        """
        spec = self.spec
        left = self.rules.num_states(samples.shape[0])
        frames = log_mel(self._filled_up(samples), self._filters, spec.mel)
        yield
        parts = []
        # Windows do not see each other, so some at a time are all that is in memory.
        for group in frames.split(self._frames_per_group(), dim=1):
            x = yield from self._convolve(group)
            x = x[:left].contiguous()  # [num_states, hidden_size]
            left -= x.shape[0]
            parts.append((yield from self._transform(x)))
        found = torch.cat(parts)
        rest = self.rules.num_tokens(samples.shape[0]) - found.shape[0]  # places of nothing
        return ImageEmbeddings(functional.pad(found, (0, 0, 0, rest)) if rest else found, ())

    def activation_bytes(self, num_tokens: int) -> int:
        """Return an upper bound of ``embed``'s memory for a clip, beside the samples.

        It does not grow with the square of the tokens; see ``VisionTower``.
        """
        spec, size, mel = self.spec, self._dtype.itemsize, self.spec.mel
        hidden = spec.hidden_size
        states = num_tokens * spec.pool * spec.joined
        of_a_state = max(
            5 * size * hidden + 12 * hidden, (3 * hidden + 2 * spec.intermediate_size) * size
        )
        of_a_state += (3 * spec.out_size + 2 * hidden) * size
        in_group = min(states, self._states_per_group())
        plane = 4 * size * hidden  # of the convolutions, for each frame
        if isinstance(spec.convolutions, PlaneConvSpec):
            plane = size * spec.convolutions.channels * mel.num_mels
            in_piece = _CHUNKS_PER_PIECE * spec.convolutions.chunk_frames
        else:
            in_piece = spec.convolutions.chunk_frames
        num_frames = states * self._frames_per_group() // self._states_per_group() + in_piece
        of_a_frame = 4 * (2 * mel.hop + 4 * mel.num_mels)
        kept = 2 * num_tokens * spec.out_size * size
        work = in_group * of_a_state + in_piece * plane
        return _OWN_BYTES + num_frames * of_a_frame + work + kept

    def _states_per_group(self) -> int:
        """States that are computed together, whole windows."""
        spec = self.spec
        return max(1, _GROUP_STATES // spec.window) * spec.window

    def _frames_per_group(self) -> int:
        """The frames that become these."""
        spec = self.spec
        chunks = self._states_per_group() // spec.convolutions.num_states
        return chunks * spec.convolutions.chunk_frames

    def _transform(self, x: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """[num_states, hidden_size], which is overwritten -> [num_tokens, out_size]."""
        spec, num_states = self.spec, x.shape[0]
        most = num_states
        if x.device.type == "cpu":
            most = min(most, _MAX_STATES_ON_CPU // spec.joined * spec.joined)
        windows = tuple(_windows(num_states, spec.window))
        for block in self._blocks:
            yield from block.forward_chunks(x, None, windows, most)
        if spec.pool > 1:
            whole = num_states - num_states % spec.pool
            x = x[:whole].unflatten(0, (-1, spec.pool)).mean(1)
        x = self._final_norm(x)
        if self._projector is None:
            return x
        return (yield from merge_chunks(self._projector, x, most))

    def _convolve(self, frames: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """[num_mels, num_frames] -> [num_states, hidden_size]."""
        spec = self.spec.convolutions
        if isinstance(spec, FrameConvSpec):
            return (yield from self._over_frames(frames, spec))
        return (yield from self._over_planes(frames, spec))

    def _filled_up(self, samples: torch.Tensor) -> torch.Tensor:
        """Add the silence at the end that the model expects."""
        spec, num_samples = self.spec, max(samples.shape[0], self.rules.min_samples)
        if isinstance(spec.convolutions, FrameConvSpec):
            chunk = spec.convolutions.chunk_frames * spec.mel.hop
            num_samples = -(-num_samples // chunk) * chunk
        return functional.pad(samples, (0, num_samples - samples.shape[0]))

    def _over_frames(
        self, frames: torch.Tensor, spec: FrameConvSpec
    ) -> Generator[None, None, torch.Tensor]:
        """[num_mels, num_frames], whole chunks -> [num_frames // 2, hidden_size]."""
        parts = []
        for chunk in frames.split(spec.chunk_frames, dim=1):
            x = chunk[None].to(self._dtype)
            for stride, (weight, bias) in enumerate(self._convolutions, 1):
                x = self._activate(functional.conv1d(x, weight, bias, stride=stride, padding=1))
                yield
            parts.append((x[0].T + self._positions).to(self._dtype))
        return torch.cat(parts)

    def _over_planes(
        self, frames: torch.Tensor, spec: PlaneConvSpec
    ) -> Generator[None, None, torch.Tensor]:
        """[num_mels, num_frames] -> [num_chunks * states of a chunk, hidden_size]."""
        assert self._join is not None
        rest = -frames.shape[1] % spec.chunk_frames
        filled = functional.pad(frames, (0, rest)).to(self._dtype)
        chunks = filled.unflatten(1, (-1, spec.chunk_frames)).transpose(0, 1)[:, None]
        parts = []
        for x in chunks.split(_CHUNKS_PER_PIECE):  # [chunks, 1, num_mels, chunk_frames]
            for weight, bias in self._convolutions:
                x = self._activate(functional.conv2d(x, weight, bias, stride=2, padding=1))
            states = functional.linear(x.permute(0, 3, 1, 2).flatten(2), self._join)
            parts.append((states + self._positions).to(self._dtype).flatten(0, 1))
            yield
        return torch.cat(parts)


def load_audio_encoder(
    config: AudioConfig,
    headers: list[Header],
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None = None,
) -> AudioEncoder:
    """Load the encoder of a checkpoint, or make a random one from a seed.

    Raises:
        ModelLoadError: a tensor has no place, a place has no tensor, or a shape differs; one line
            that names the tensor and the file.
    """
    spec = config.spec
    if seed is None:
        weights = load_weights(spec, headers, dtype, device)
    else:
        weights = dummy_weights(spec, dtype, device, seed)
    tensors = {name: weights[name] for name in weights}
    if not spec.key_bias:
        for i in range(spec.num_layers):
            query, value = tensors.pop(f"{i}.query.bias"), tensors.pop(f"{i}.value.bias")
            tensors[f"{i}.qkv.bias"] = torch.cat((query, torch.zeros_like(query), value))
    if isinstance(spec.convolutions, PlaneConvSpec):
        states = spec.convolutions.num_states
        tensors["positions"] = sinusoids(states, spec.hidden_size).to(device)
    return AudioEncoder(spec, config.rules, tensors)


def sinusoids(length: int, width: int) -> torch.Tensor:
    """Return positions as sines and cosines of geometrically growing periods (Vaswani et al. 2017).

    [length, width] float32, all sines first.
    """
    half = width // 2
    steps = torch.arange(half, dtype=torch.float64)
    frequencies = torch.exp(-math.log(_MAX_PERIOD) / (half - 1) * steps)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), 1).float()


def _windows(num_states: int, window: int) -> Generator[Windows, None, None]:
    """Yield the whole windows, and the rest as one."""
    count, rest = divmod(num_states, window)
    if count:
        yield Windows(0, count, window)
    if rest:
        yield Windows(count * window, 1, rest)
