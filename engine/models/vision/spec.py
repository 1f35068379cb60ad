"""What a vision encoder is, apart from its weights. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# quick_gelu is ``x * sigmoid(1.702 x)`` (CLIP).
VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]


@dataclass(frozen=True)
class VisionNorm:
    """How norms are computed. Layer norms have a bias, RMS norms none."""

    kind: Literal["layer", "rms"]
    eps: float


@dataclass(frozen=True)
class AxialRope:
    """Rotary positions in two dimensions: the first half of a head's pairs turns by the row of a
    patch, the second by its column, halves of the head against each other (Su et al. 2021, by
    axis).

    With ``staggered`` the columns have the frequencies between those of the rows (Pixtral), else
    the same. With ``apart`` the first half of a head turns by the column and the second by the row,
    the halves of each half against each other (Gemma 4).
    """

    theta: float
    staggered: bool = False
    apart: bool = False


@dataclass(frozen=True)
class MergerSpec:
    """What makes one embedding of the text model out of the patches of a cell.

    norm ─► patches side by side [─► joined: as wide as one patch] ─► up ─► activation ─► down
    """

    norm: VisionNorm | None
    inner_size: int  # between ``up`` and ``down``
    activation: VisionActivation = "gelu"
    bias: bool = True
    joined: bool = False  # by a projection without a bias or an activation (Mistral Small 3.1)


@dataclass(frozen=True)
class PoolSpec:
    """What makes one embedding of Gemma's out of the patches of a cell.

    average, times ``scale`` [─► standardised] ─► RMS norm ─► projection
    """

    eps: float  # of the norm
    scale: float = 1.0
    weighted: bool = False  # the norm has a weight, stored less one (Gemma 3)
    inputs_first: bool = False  # in the projection's weights as they are stored
    standardised: bool = False  # each number has a mean and a scale of its own (Gemma 4)


@dataclass(frozen=True)
class PixelSpec:
    """How bytes become what the first layer reads: ``(x * rescale - mean) / std`` by channel."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float = 1 / 255


@dataclass(frozen=True)
class VisionSpec:
    """A vision transformer (Dosovitskiy et al. 2020) and what leads from it to a text model."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    patch_size: int  # pixels, a side
    merge_size: int  # patches along a side of a cell
    out_size: int  # of the text model's embeddings
    norm: VisionNorm
    activation: VisionActivation
    merger: MergerSpec | PoolSpec
    pixels: PixelSpec
    architecture: str = ""  # Hugging Face model_type of the whole model
    gated: bool = False  # the MLP
    bias: bool = True  # of the projections of attention
    mlp_bias: bool = True
    patch_bias: bool = False
    colours_last: bool = False  # in the weights of patches as they are stored, pixel by pixel
    # Frames that a patch spans, all of them the image; None: its weights know no time.
    num_frames: int | None = None
    patch_norm: bool = False  # of the patches before the first layer
    final_norm: bool = False  # behind the last one
    # Norms on both sides of attention and of the MLP, and of queries, keys and values, whose
    # scores are not scaled (Gemma 4).
    sandwich: bool = False
    clipped: bool = False  # what projections read and make stays within bounds of the checkpoint
    rope: AxialRope | None = None
    # The side of a square table of learned positions, stretched over the image between its corners
    # by bilinear interpolation (Qwen3-VL); 0: there is none.
    position_grid: int = 0
    # The side in pixels of the only images that it sees, whose patches have a learned position each
    # (CLIP, SigLIP); None: it sees images of all sizes.
    image_size: int | None = None
    class_token: bool = False  # a learned token before the patches, of which nothing is read
    num_unread_layers: int = 0  # in the checkpoint, behind those whose features are taken
    # The length of two tables of learned positions, of columns and of rows (Gemma 4); 0: none.
    position_axis: int = 0
    # Cells along a side of the windows that attention stays within, but for the layers that see
    # everything (Qwen2.5-VL); None: all layers do.
    window: int | None = None
    full_layers: frozenset[int] = frozenset()
    # Behind which layers a merger of its own makes what is added behind the text model's first
    # layers (DeepStack, Meng et al. 2024).
    deep_layers: tuple[int, ...] = ()

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def cell_size(self) -> int:
        """Pixels, the side of a cell."""
        return self.patch_size * self.merge_size

    @property
    def num_positions(self) -> int:
        """Rows of the table of learned positions; 0: there is none."""
        if self.image_size is None:
            return self.position_grid**2
        return (self.image_size // self.patch_size) ** 2 + self.class_token

    @property
    def merged_size(self) -> int:
        """Of the patches of a cell side by side."""
        return self.hidden_size * self.merge_size**2

    def is_windowed(self, layer: int) -> bool:
        """Whether attention stays within windows there."""
        return self.window is not None and layer not in self.full_layers
