"""A vision encoder: one implementation for all families, made from a spec and weights."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from engine.images.types import Region
from engine.models.loader import dummy_weights, load_weights
from engine.models.safetensors import Header
from engine.models.vision.canvas import assemble_tiles
from engine.models.vision.config import VisionConfig
from engine.models.vision.convolution import ConvBlock
from engine.models.vision.gemma import PatchPooler, SandwichBlock
from engine.models.vision.inner_merge import InnerMerger
from engine.models.vision.layers import Block, Merger, Normalisation, read_norm, read_projection
from engine.models.vision.mergers import Adapter, GatedMerger
from engine.models.vision.patches import PatchLayout, Windows, chunk_slices, make_layout, patchify
from engine.models.vision.positions import (
    bucket_positions,
    learned_positions,
    make_rotation,
    sample_positions,
    stored_pairs,
)
from engine.models.vision.spec import (
    AdapterSpec,
    GatedMergerSpec,
    MergerSpec,
    PoolSpec,
    VisionSpec,
)
from engine.models.vision.weights import is_vision_tensor
from kernels.transfer import to_device

# Patches per piece: at most a tenth of a second on two cores, with the widest encoders.
_MAX_PATCHES_ON_CPU = 256
_OWN_BYTES = 16 * 2**20  # used by torch's kernels for any image


class ImageEmbeddings(NamedTuple):
    """An image's embeddings for the text model, in its dtype."""

    # [num_cells, out_size], row by row; of a region, with those that end rows
    embeddings: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]  # each [num_cells, out_size]; added after its first layers


class VisionTower:
    """A loaded vision encoder.

    Args:
        spec: of the encoder.
        tensors: its parameters, as ``load_tower`` makes them.
    """

    def __init__(self, spec: VisionSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self.spec = spec
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._patch = read_projection(tensors, "patch")  # of images
        self._frame_patch = self._patch
        if "frame_patch.weight" in tensors:
            self._frame_patch = replace(self._patch, weight=tensors["frame_patch.weight"])
        self._pixel_norm: Normalisation | None = None
        if spec.pixel_norm is not None:
            self._pixel_norm = read_norm(spec.pixel_norm, tensors, "pixel_norm")
        self._class_token = tensors.get("class_token")
        self._positions = tensors.get("positions")
        self._patch_norm: Normalisation | None = None
        if spec.patch_norm:
            self._patch_norm = read_norm(spec.norm, tensors, "patch_norm")
        block = SandwichBlock if spec.sandwich else Block
        self._blocks = tuple(
            (ConvBlock if i in spec.conv_layers else block)(spec, tensors, str(i))
            for i in range(spec.num_layers)
        )
        self._inner_merger: InnerMerger | None = None
        if spec.inner_merge is not None:
            self._inner_merger = InnerMerger(spec, spec.inner_merge, tensors)
        self._final_norm: Normalisation | None = None
        if spec.final_norm:
            self._final_norm = read_norm(spec.norm, tensors, "final_norm")
        self._deepstack_mergers: dict[int, Merger] = {}
        if isinstance(spec.merger, MergerSpec):
            self._merger = Merger(spec, spec.merger, tensors, "merger")
            for i, layer in enumerate(spec.deepstack_layers):
                name = f"deep.{i}"
                deep = replace(spec.merger, norm_of_cells=True)
                self._deepstack_mergers[layer] = Merger(spec, deep, tensors, name)
        elif isinstance(spec.merger, GatedMergerSpec):
            self._merger = GatedMerger(spec, spec.merger, tensors)
        elif isinstance(spec.merger, AdapterSpec):
            self._merger = Adapter(spec, tensors)
        else:
            self._merger = PatchPooler(spec, spec.merger, tensors)
        self._newline: torch.Tensor | None = None
        if spec.newline:
            self._newline = tensors["newline"] * spec.out_scale
        widest = "0.up.weight" if spec.num_layers else "merger.projection.weight"
        self._dtype = tensors[widest].dtype

    def embed(self, pixels: torch.Tensor, region: Region | None = None) -> ImageEmbeddings:
        """Embed an image, or frames of a video that are seen together.

        Args:
            pixels: [height, width, 3] or [num_frames, height, width, 3] uint8, RGB, on the tower's
                device; whole cells. Frames are as many as ``VisionSpec.num_frames`` says.
            region: the cells of a canvas of tiles that are shown; None: the pixels are no canvas.
        """
        return run_to_end(self.embed_chunks(pixels, region))

    def embed_chunks(
        self, pixels: torch.Tensor, region: Region | None = None
    ) -> Generator[None, None, ImageEmbeddings]:
        """Run ``embed`` in pieces: each iteration computes one, and the embeddings are returned at
        the end.

        Other work between two pieces does not affect the result. On a CPU a piece is a part of a
        layer for some hundred patches, on a GPU for all of them.
        """
        if region is None:
            return (yield from self._embed(pixels))
        assert self.spec.image_size is not None, "the side of a tile"
        side = self.spec.image_size // self.spec.cell_size * self.spec.cell_size
        cut = [tile for row in pixels.split(side) for tile in row.split(side, dim=1)]
        tiles: list[torch.Tensor] = []
        for tile in cut:
            embedded = yield from self._embed(tile.contiguous())
            tiles.append(embedded.embeddings)
        columns = pixels.shape[1] // side
        return ImageEmbeddings(assemble_tiles(tiles, columns, region, self._newline), ())

    def _embed(self, pixels: torch.Tensor) -> Generator[None, None, ImageEmbeddings]:
        spec = self.spec
        side = spec.patch_size
        project = self._frame_patch if pixels.dim() == 4 else self._patch
        pixels = pixels.view(-1, *pixels.shape[-3:])
        _, height, width, _ = pixels.shape
        size = height // side, width // side
        layout = make_layout(*size, spec, pixels.device)
        most = layout.full_window.end
        if pixels.device.type == "cpu":
            most = min(most, max(1, _MAX_PATCHES_ON_CPU // spec.merge_size**2) * spec.merge_size**2)
        parts = []
        for rows in chunk_slices(layout.full_window.end, most):
            patches = patchify(pixels, layout.select(rows), side, spec.pixels)
            if self._pixel_norm is not None:
                patches = self._pixel_norm(patches)
            parts.append(project(patches))
            yield
        x = _joined(parts)  # [num_patches, hidden_size]
        if self._class_token is not None:
            x = torch.cat((self._class_token[None], x))
        positions = None if self._positions is None else self._positions_of(layout, size)
        if positions is not None and not spec.norm_before_positions:
            x += positions
        x = x.to(self._dtype)
        if self._patch_norm is not None:
            x = self._patch_norm(x)
        if positions is not None and spec.norm_before_positions:
            x += positions
        turns = None
        if spec.rope is not None:
            turns = make_rotation(spec.rope, spec.head_dim, layout.rows, layout.columns)
            if self._class_token is not None:
                turns = turns.after_origin()
        yield
        everything = (Windows(0, 1, x.shape[0]),)
        deep = []
        features: dict[int, torch.Tensor] = {}
        for i, block in enumerate(self._blocks):
            if isinstance(block, ConvBlock):
                yield from block.forward_chunks(x, layout.raster(size[1]), size, most)
            else:
                windows = layout.windows if spec.is_windowed(i) else everything
                yield from block.forward_chunks(x, turns, windows, most)
            if self._inner_merger is not None and self._inner_merger.layer == i:
                x = yield from self._inner_merger.merge_chunks(x, most)
                everything = (Windows(0, 1, x.shape[0]),)
            if i + 1 in spec.feature_layers:
                features[i + 1] = x.clone()
            if i in self._deepstack_mergers:
                deep.append(
                    layout.to_row_major(
                        (yield from merge_chunks(self._deepstack_mergers[i], x, most))
                    )
                )
        if features:
            x = torch.cat([features[layer] for layer in spec.feature_layers], dim=-1)
        if self._class_token is not None:
            x = x[1:]
        if self._final_norm is not None:
            x = self._final_norm(x)
        merged = yield from merge_chunks(self._merger, x, most)
        if spec.out_scale != 1.0:
            merged *= spec.out_scale
        return ImageEmbeddings(layout.to_row_major(merged), tuple(deep))

    def _positions_of(self, layout: PatchLayout, size: tuple[int, int]) -> torch.Tensor:
        """Return the learned position embeddings of patches: [num_patches, hidden_size] float32.

        ``size`` is the image's rows and columns of patches.
        """
        assert self._positions is not None
        spec, table = self.spec, self._positions
        if spec.sampled_positions is not None:
            at = layout.rows, layout.columns
            return sample_positions(table, *at, size, spec.sampled_positions)
        if spec.image_size is None:
            return learned_positions(table, layout.rows, layout.columns)
        side, rows, columns = spec.image_size // spec.patch_size, layout.rows, layout.columns
        if spec.bucketed_positions:
            buckets = to_device(bucket_positions(side), rows.device)
            rows, columns = buckets[rows], buckets[columns]
        at = rows * side + columns
        num_before = int(spec.class_token)
        return torch.cat((table[:num_before], table[num_before:][at]))

    def activation_bytes(self, num_cells: int) -> int:
        """Return an upper bound of ``embed``'s memory for an image or frames, beside the pixels.

        It grows with the number of cells, not with its square, where torch's attention is fused: on
        a CPU always, on a GPU in every supported dtype.
        """
        spec = self.spec
        hidden, size, pixels = spec.hidden_size, self._dtype.itemsize, 3 * spec.patch_size**2
        pixels *= spec.num_frames or 1
        of_inner = 4 if spec.clipped else 3 if spec.gated else 2
        merged = hidden
        if isinstance(spec.merger, MergerSpec):
            merged = (spec.merger.inner_size or spec.out_size) * (1 + spec.merger.gated)
        elif isinstance(spec.merger, GatedMergerSpec):
            merged = spec.merger.inner_size + 2 * spec.out_size
        elif isinstance(spec.merger, AdapterSpec):
            merged = 2 * spec.merger.inner_size
        of_a_patch = max(
            # Cut as bytes and again in order, normalised, embedded.
            (10 if spec.pixel_norm else 6) * pixels + 4 * hidden,
            16 * hidden if spec.position_grid_size or spec.num_axis_positions else 0,
            # Attention, which rotates heads in float32.
            max(9 * size, (7 if spec.sandwich else 5) * size + 12) * hidden,
            3 * hidden * size + of_inner * spec.intermediate_size * size,
            3 * hidden * size + 3 * merged * size // spec.cell_patches,
        )
        of_a_patch += 8 * spec.head_dim + 128  # positions and rotations
        of_a_patch += 2 * len(spec.feature_layers) * hidden * size  # kept, and side by side
        of_a_cell = (2 + len(spec.deepstack_layers)) * spec.out_size * size
        return _OWN_BYTES + num_cells * (of_a_patch * spec.merge_size**2 + of_a_cell)


def run_to_end(pieces: Generator[None, None, ImageEmbeddings]) -> ImageEmbeddings:
    """Compute all pieces of an embedding."""
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            return done.value


def tower_unsupported_reason(
    headers: list[Header], is_own: Callable[[str], bool] = is_vision_tensor
) -> str | None:
    """Return why a checkpoint's encoder cannot be loaded while its text model can; None if it can.

    The encoder may be missing or quantised. ``is_own`` is whether a tensor of this name belongs to
    it.
    """
    entries = [
        entry
        for header in headers
        for entry in header.entries.values()
        if is_own(entry.name) and not entry.name.endswith(".position_ids")
    ]
    if not entries:
        return "the checkpoint has no tensors of its encoder"
    codes = (e for e in entries if not e.dtype.is_floating_point or e.dtype.itemsize == 1)
    packed = next(codes, None)
    return f"its encoder is quantised ('{packed.name[:80]}')" if packed else None


def load_tower(
    vision: VisionConfig,
    headers: list[Header],
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None = None,
) -> VisionTower:
    """Load the encoder of a checkpoint, or make a random one from a seed.

    Args:
        vision: from its config.
        headers: of the checkpoint's files; unused with a seed.
        dtype: of its layers. Patches are embedded in float32 in any case.
        device: of its weights.
        seed: of random weights.

    Raises:
        ModelLoadError: a tensor of the encoder is missing, has no place or another shape than the
            config says, or the device is out of memory; one line that names the tensor and the
            file.
    """
    spec = vision.spec
    if seed is None:
        weights = load_weights(spec, headers, dtype, device)
    else:
        weights = dummy_weights(spec, dtype, device, seed)
    tensors = {name: weights[name] for name in weights}
    return VisionTower(spec, _to_compute_layout(spec, tensors, is_random=seed is not None))


def _to_compute_layout(
    spec: VisionSpec, tensors: dict[str, torch.Tensor], *, is_random: bool
) -> dict[str, torch.Tensor]:
    """Convert the parameters from checkpoints' layouts to those of the computation."""
    patch, frames = tensors["patch.weight"], None
    if spec.channels_last:  # of a pixel
        patch = _channels_first(patch)
    elif spec.num_frames is not None:
        if spec.flat_patches:
            patch = patch.unflatten(1, (3, spec.num_frames, -1))
        # [hidden_size, 3, frames, side, side]: all frames of an image are the same.
        frames, patch = patch.flatten(1), patch.sum(2)
    arranged = {**tensors, "patch.weight": patch.flatten(1).contiguous()}
    if frames is not None:
        arranged["frame_patch.weight"] = frames.contiguous()
    if spec.pixel_norm is not None and spec.channels_last:
        for name in ("pixel_norm", "pixel_norm.bias"):
            arranged[name] = _channels_first(tensors[name]).flatten()
    if spec.paired_positions:
        arranged["positions"] = tensors["positions"].transpose(0, 1).contiguous()
    if spec.squared_positions:
        arranged["positions"] = tensors["positions"].flatten(0, 1)
    if spec.class_last:
        arranged["positions"] = tensors["positions"].roll(1, 0)
    if spec.rope is not None and spec.rope.interleaved:
        order = stored_pairs(spec.head_dim, columns_first=spec.rope.columns_first)
        for name in tensors:
            if name.rpartition(".")[0].endswith(".qkv"):
                arranged[name] = _rotated_in_halves(tensors[name], order, spec.num_heads)
    if spec.batched_positions:
        arranged["positions"] = tensors["positions"].flatten(0, 1)
        arranged["class_token"] = tensors["class_token"].flatten()
    if isinstance(spec.merger, PoolSpec):
        if spec.merger.inputs_first:
            projection = tensors["merger.projection.weight"].T
            arranged["merger.projection.weight"] = projection.contiguous()
    elif isinstance(spec.merger, GatedMergerSpec) or (
        isinstance(spec.merger, MergerSpec) and spec.merger.joined
    ):
        # Checkpoints have a cell's patches within each dimension; here it is the reverse.
        stored = tensors["merger.join.weight"].flatten(1).unflatten(1, (spec.hidden_size, -1))
        arranged["merger.join.weight"] = stored.transpose(1, 2).flatten(1).contiguous()
    if is_random:  # random weights have no calibrated bounds
        arranged = {name: held for name, held in arranged.items() if not name.endswith(".bounds")}
    return arranged


def _channels_first(stored: torch.Tensor) -> torch.Tensor:
    """[..., side * side * 3] -> [..., 3, side * side], the pixels of a patch."""
    return stored.unflatten(-1, (-1, 3)).transpose(-1, -2)


def _rotated_in_halves(stored: torch.Tensor, order: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows [3 * hidden_size, ...] that make queries and keys; see ``stored_pairs``."""
    heads = stored.unflatten(0, (3, num_heads, -1)).clone()
    heads[:2] = heads[:2, :, to_device(order, stored.device)]
    return heads.flatten(0, 2)


def merge_chunks(
    merger: Merger | GatedMerger | Adapter | PatchPooler, x: torch.Tensor, most: int
) -> Generator[None, None, torch.Tensor]:
    """Apply ``merger(x)`` to ``most`` rows at a time, whole cells."""
    parts = []
    for rows in chunk_slices(x.shape[0], most):
        parts.append(merger(x[rows]))
        yield
    return _joined(parts)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
