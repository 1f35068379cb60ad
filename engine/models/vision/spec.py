"""A vision encoder as data, without its weights. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# quick_gelu is ``x * sigmoid(1.702 x)`` (CLIP).
VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]


@dataclass(frozen=True)
class VisionNorm:
    """How norms are computed. Layer norms have a bias, RMS norms have none."""

    kind: Literal["layer", "rms"]
    eps: float
    by_head: bool = False  # of queries and keys: over each head, not over all


@dataclass(frozen=True)
class AxialRope:
    """Rotary positions in two dimensions (Su et al. 2021, by axis).

    The first half of a head's pairs rotates by the patch's row, the second by its column; halves of
    the head are rotated against each other. With ``staggered`` the columns have frequencies between
    those of the rows (Pixtral), else the same ones. With ``split_halves`` the first half of a head
    rotates by the column and the second by the row, and the halves of each half are rotated against
    each other (Gemma 4). ``interleaved`` is how queries and keys are stored: adjacent dimensions of
    a head are a pair, and every other pair, the first included, rotates by the column (MoonViT); or
    with ``columns_first`` the first half of the pairs does (Llama 4).
    """

    theta: float
    staggered: bool = False
    split_halves: bool = False
    interleaved: bool = False
    columns_first: bool = False
    first: int = 0  # the position of the first row and column; a class token has 0


@dataclass(frozen=True)
class MergerSpec:
    """How the patches of a cell become one embedding of the text model.

    norm ─► concatenate patches [─► joined: as wide as one patch] ─► up ─► activation ─► down
    """

    norm: VisionNorm | None
    inner_size: int | None  # between ``up`` and ``down``; None: ``up`` is all there is (Idefics3)
    activation: VisionActivation = "gelu"
    bias: bool = True
    joined: bool = False  # by a bare projection (Mistral Small 3.1)
    norm_of_cells: bool = False  # the norm is over a cell's concatenated patches, not each patch
    # ``up`` makes twice as much; the second half's activation multiplies the first (Aya Vision).
    gated: bool = False


@dataclass(frozen=True)
class GatedMergerSpec:
    """How the patches of a cell become one embedding in GLM-4.1V and its successors.

    concatenate patches ─► joined: as wide as the text model ─► projection ─► layer norm ─► GELU
    ─► gated MLP
    """

    inner_size: int  # of the MLP
    activation: VisionActivation = "silu"
    norm: VisionNorm = VisionNorm("layer", 1e-5)


@dataclass(frozen=True)
class AdapterSpec:
    """How the patches of a cell become one embedding in Llama 4, without biases.

    concatenate patches ─► up ─► GELU ─► down ─► GELU ─► projection
    """

    inner_size: int  # of what GELU is applied to


@dataclass(frozen=True)
class PoolSpec:
    """How the patches of a cell become one of Gemma's embeddings.

    average, times ``scale`` [─► standardised] ─► RMS norm ─► projection
    """

    eps: float  # of the norm
    scale: float = 1.0
    weighted: bool = False  # the norm has a weight, stored less one (Gemma 3)
    inputs_first: bool = False  # stored layout of the projection's weights
    standardised: bool = False  # by a mean and scale per number (Gemma 4)


@dataclass(frozen=True)
class PixelSpec:
    """How bytes become the first layer's input: ``(x * rescale - mean) / std`` by channel."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float = 1 / 255


@dataclass(frozen=True)
class InnerMergeSpec:
    """Patches that become one within the encoder (MiniCPM-V 4.6).

    attention within each square of patches ─► their concatenation ─► layer norm ─► MLP, added to
    their mean
    """

    layer: int  # behind which, counted from 0
    side: int  # of a square, in patches


@dataclass(frozen=True)
class VisionSpec:
    """A vision transformer (Dosovitskiy et al. 2020) and its connection to a text model."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    patch_size: int  # pixels, a side
    merge_size: int  # patches along a side of a cell
    out_size: int  # of the text model's embeddings
    norm: VisionNorm
    activation: VisionActivation
    merger: MergerSpec | GatedMergerSpec | AdapterSpec | PoolSpec
    pixels: PixelSpec
    num_kv_heads: int | None = None  # fewer than heads (EXAONE 4.5); None: as many
    architecture: str = ""  # Hugging Face model_type of the whole model
    gated: bool = False  # the MLP
    bias: bool = True  # of attention's projections
    output_bias: bool = False  # of attention's last projection, even without ``bias``
    qk_norm: VisionNorm | None = None  # of queries and keys (InternViT 6B, GLM-OCR)
    # What attention and MLP add is multiplied by learned factors (Touvron et al. 2021).
    layer_scale: bool = False
    mlp_bias: bool = True
    patch_bias: bool = False
    channels_last: bool = False  # stored layout of the patch weights
    flat_patches: bool = False  # they are stored as a projection's
    # Frames that a patch spans, all filled with the image; None: the weights have no time
    # dimension.
    num_frames: int | None = None
    pixel_norm: VisionNorm | None = None  # of the normalised pixels of a patch (Gemma 4 12B)
    patch_norm: bool = False  # of patches before the first layer
    norm_before_positions: bool = False  # that norm is of patches without their positions
    final_norm: bool = False  # after the last layer
    # Norms on both sides of attention and MLP, and of queries, keys and values; scores are not
    # scaled (Gemma 4).
    sandwich: bool = False
    clipped: bool = False  # projections clamp inputs and outputs to stored bounds
    rope: AxialRope | None = None
    # The side of a square table of learned positions, bilinearly interpolated over the image
    # between its corners (Qwen3-VL); 0: there is none.
    position_grid_size: int = 0
    # How that table is interpolated between the middles of its cells instead (GLM-4.1V); averaged:
    # bilinearly, where the image has fewer patches over all that a patch covers (SigLIP 2).
    # Nearest: each patch takes that of the cell in which it begins (MiniCPM-V).
    sampled_positions: Literal["bicubic", "bilinear", "averaged", "nearest"] | None = None
    # The side in pixels of all images, whose patches have a learned position each (CLIP, SigLIP);
    # None: images have any size.
    image_size: int | None = None
    class_token: bool = False  # a learned token before the patches, whose result is not read
    class_last: bool = False  # its position is stored after those of patches
    # Patches take their positions as Idefics3 computes them; see ``bucket_positions``.
    bucketed_positions: bool = False
    squared_positions: bool = False  # stored with a dimension for each side
    batched_positions: bool = False  # stored with leading dimensions of one, as is the class token
    num_skipped_layers: int = 0  # stored, but after the layer whose features are used
    # The length of two tables of learned positions, of columns and of rows (Gemma 4); 0: none.
    num_axis_positions: int = 0
    paired_positions: bool = False  # they are stored row by row of both tables
    # The side in pixels of what the processor calls a patch; None: it is the encoder's.
    processor_patch: int | None = None
    inner_merge: InnerMergeSpec | None = None
    # Layers that mix patches by gated convolutions of this many rows and columns instead of
    # attention (LFM3-VL).
    conv_layers: frozenset[int] = frozenset()
    conv_size: int = 0
    # The side in cells of the attention windows, except in full attention layers (Qwen2.5-VL);
    # None: no windows.
    window: int | None = None
    full_attention_layers: frozenset[int] = frozenset()
    # The layers after which a separate merger makes what is added after the text model's first
    # layers (DeepStack, Meng et al. 2024).
    deepstack_layers: tuple[int, ...] = ()
    # The numbers of layers after which features are taken, which the merger reads side by side
    # (Granite Vision); none: those of the last layer alone.
    feature_layers: tuple[int, ...] = ()
    out_scale: float = 1.0  # by which the embeddings are multiplied
    newline: bool = False  # a learned embedding ends rows of cells; see ``Region``

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return (self.num_kv_heads or self.num_heads) * self.head_dim

    @property
    def cell_size(self) -> int:
        """The side of a cell, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def num_positions(self) -> int:
        """Rows of the table of learned positions; 0: there is none."""
        if self.image_size is None:
            return self.position_grid_size**2
        return (self.image_size // self.patch_size) ** 2 + self.class_token

    @property
    def merged_size(self) -> int:
        """Width of a cell's concatenated patches, as they leave the last layer."""
        return self.feature_size * self.cell_patches

    @property
    def cell_patches(self) -> int:
        """The number of a cell's patches that leave the last layer."""
        inner = 1 if self.inner_merge is None else self.inner_merge.side
        return (self.merge_size // inner) ** 2

    @property
    def feature_size(self) -> int:
        """Width of what the merger reads of a patch."""
        return self.hidden_size * (len(self.feature_layers) or 1)

    def is_windowed(self, layer: int) -> bool:
        """Return whether a layer's attention stays within windows."""
        return self.window is not None and layer not in self.full_attention_layers
