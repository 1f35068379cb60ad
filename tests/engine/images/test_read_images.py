"""Files are decoded to the pixels of Hugging Face's image processors, or rejected clearly."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from engine.errors import InvalidParameter
from engine.images.read import MAX_PIXELS, process_image, read_image, scaled_size
from engine.images.types import (
    AreaScaling,
    BudgetScaling,
    EdgeScaling,
    FixedScaling,
    ImageRules,
    Resampling,
    Scaling,
)

QWEN = AreaScaling(min_pixels=56 * 56, max_pixels=28 * 28 * 30)
PIXTRAL = EdgeScaling(longest=140)
CLIP = FixedScaling(side=84, crop=True)
SIGLIP = FixedScaling(side=90, crop=False)
GEMMA4 = BudgetScaling(max_cells=70)
MODES = ["RGB", "RGBA", "L", "LA", "P", "1"]


def rules(scaling: Scaling, cell: int = 28, resampling: Resampling = "bicubic") -> ImageRules:
    return ImageRules(token_id=5, cell=cell, scaling=scaling, resampling=resampling, max_images=4)


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Noise over a gradient, so that flips and different filters are detected."""
    rng = np.random.default_rng(seed)
    ramp = np.add.outer(np.arange(height), np.arange(width))[..., None] % 200
    values = (ramp + rng.integers(0, 56, (height, width, 4))).astype(np.uint8)
    return Image.fromarray(values).convert(mode)


def file_of(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def seen_by_hugging_face(
    image: Image.Image, scaling: Scaling, cell: int, resampling: Resampling = "bicubic"
) -> np.ndarray:
    """The pixels [height, width, 3] that Hugging Face's image processor would normalise."""
    plain: dict[str, Any] = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    if isinstance(scaling, EdgeScaling):
        from transformers.models.pixtral.image_processing_pil_pixtral import (
            PixtralImageProcessorPil,
        )

        processor = PixtralImageProcessorPil(size={"longest_edge": scaling.longest}, **plain)
        return processor(image, patch_size=cell, **plain)["pixel_values"][0].transpose(1, 2, 0)
    if isinstance(scaling, FixedScaling):
        from transformers import Gemma3ImageProcessorPil
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        square = {"height": scaling.side, "width": scaling.side}
        processor = SiglipImageProcessorPil(size=square, do_convert_rgb=True, **plain)
        if resampling == "bilinear":
            processor = Gemma3ImageProcessorPil(size=square, **plain)
        elif scaling.crop:
            size = {"shortest_edge": scaling.side}
            processor = CLIPImageProcessorPil(size=size, crop_size=square, **plain)
        whole = processor(image, **plain)["pixel_values"][0].transpose(1, 2, 0)
        return whole[:84, :84]  # a convolution of whole cells sees no more
    if isinstance(scaling, BudgetScaling):
        from transformers import Gemma4ImageProcessorPil

        side, most = cell // 2, scaling.max_cells
        processor = Gemma4ImageProcessorPil(
            patch_size=side, pooling_kernel_size=2, max_soft_tokens=most
        )
        found = processor(image, **plain)
        places = found["image_position_ids"][0]
        columns, rows = places.max(0) + 1
        patches = found["pixel_values"][0, : rows * columns].reshape(rows, columns, side, side, 3)
        return patches.swapaxes(1, 2).reshape(rows * side, columns * side, 3)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": scaling.min_pixels, "longest_edge": scaling.max_pixels}
    processor = Qwen2VLImageProcessorPil(
        size=size, patch_size=cell // 2, merge_size=2, temporal_patch_size=1
    )
    found = processor(image, **plain)
    _, rows, columns = found["image_grid_thw"][0]
    # Patches of cells of two by two, with channels, rows and columns.
    patches = found["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, cell // 2, cell // 2)
    whole = patches.transpose(0, 2, 5, 1, 3, 6, 4)
    return whole.reshape(rows * cell // 2, columns * cell // 2, 3)


def test_pixels_equal_hugging_faces_in_every_mode_and_scaling() -> None:
    kinds: list[tuple[Scaling, Resampling]] = [
        *((scaling, "bicubic") for scaling in (QWEN, PIXTRAL, CLIP, SIGLIP, GEMMA4)),
        (SIGLIP, "bilinear"),  # Gemma 3
    ]
    for scaling, resampling in kinds:
        for mode in MODES:
            for width, height in ((56, 84), (31, 200), (300, 170), (20, 9)):
                data = file_of(picture(width, height, mode))
                seen = read_image(data, rules(scaling, 28, resampling))
                image = Image.open(io.BytesIO(data))
                wanted = seen_by_hugging_face(image, scaling, 28, resampling)
                assert (seen.height, seen.width) == wanted.shape[:2]
                assert seen.pixels == wanted.astype(np.uint8).tobytes(), (scaling, mode, width)


@pytest.mark.parametrize(("format", "options"), [
    ("PNG", {}), ("GIF", {}), ("WEBP", {"lossless": True}), ("WEBP", {}), ("JPEG", {}),
    ("JPEG", {"progressive": True}),
])  # fmt: skip
def test_each_format_is_read(format: str, options: dict[str, Any]) -> None:
    data = file_of(picture(70, 60), format, **options)
    decoded = Image.open(io.BytesIO(data)).convert("RGB")
    assert read_image(data, rules(QWEN)) == process_image(decoded, rules(QWEN))


def test_greyscale_of_16_bits_keeps_its_shades() -> None:
    """Pillow's conversion, which Hugging Face's processors use, makes all but the darkest white."""
    shades = np.arange(56 * 56, dtype=np.uint16).reshape(56, 56) * 20
    deep = Image.fromarray(shades)
    wanted = process_image(Image.fromarray((shades >> 8).astype(np.uint8)), rules(QWEN))
    for data in (file_of(deep), file_of(deep, transparency=700)):
        assert Image.open(io.BytesIO(data)).mode == "I;16"
        assert read_image(data, rules(QWEN)) == wanted
    assert process_image(deep, rules(QWEN)) == wanted


def test_transparency_is_over_white() -> None:
    clear = Image.new("RGBA", (56, 56), (200, 0, 0, 0))
    assert set(read_image(file_of(clear), rules(QWEN)).pixels) == {255}
    palette = picture(56, 56).quantize(4)
    palette.info["transparency"] = 0
    data = file_of(palette, transparency=0)
    wanted = seen_by_hugging_face(Image.open(io.BytesIO(data)), QWEN, 28)
    assert read_image(data, rules(QWEN)).pixels == wanted.astype(np.uint8).tobytes()


@pytest.mark.parametrize(("mode", "clear"), [
    ("RGBA", None), ("LA", None), ("P", 3), ("L", 7), ("RGB", (50, 60, 70)),
])  # fmt: skip
def test_a_large_image_is_over_white_everywhere(mode: str, clear: Any) -> None:
    """In several bands."""
    tile = picture(64, 64, mode)
    image = Image.new(mode, (1500, 1100), 0 if clear is None else clear)
    if mode == "P":
        image.putpalette(tile.getpalette() or [])
    for top in range(0, 1100, 70):
        image.paste(tile, (top, top))
    options = {} if clear is None else {"transparency": clear}
    data = file_of(image, **options)
    wanted = seen_by_hugging_face(Image.open(io.BytesIO(data)), PIXTRAL, 28)
    assert read_image(data, rules(PIXTRAL)).pixels == wanted.astype(np.uint8).tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_camera_that_was_turned_shows_upright(orientation: int) -> None:
    image = picture(84, 56)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for format in ("PNG", "WEBP"):
        data = file_of(image, format, exif=exif, lossless=True)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        seen = read_image(data, rules(QWEN))
        assert (seen.width, seen.height) == ((84, 56) if orientation < 5 else (56, 84))
        assert seen.pixels == upright.tobytes()


def test_of_an_image_that_moves_the_first_frame_is_seen() -> None:
    frames = [picture(56, 56, seed=seed).quantize(64) for seed in (1, 2)]
    for format, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        moving = file_of(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert read_image(moving, rules(QWEN)) == process_image(frames[0], rules(QWEN))


def test_the_digest_tells_pixels_and_sizes_apart() -> None:
    white = {
        size: process_image(Image.new("RGB", size, "white"), rules(QWEN)).digest
        for size in ((56, 112), (112, 56), (84, 84))
    }
    other = Image.new("RGB", (84, 84), "white")
    other.putpixel((3, 3), (255, 255, 254))
    assert len({*white.values(), process_image(other, rules(QWEN)).digest}) == 4
    assert process_image(Image.new("RGB", (84, 84), "white"), rules(QWEN)).digest == white[84, 84]


SIDES = st.integers(1, 6000)


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([28, 32]))
def test_sizes_within_an_area_are_smart_resizes(height: int, width: int, cell: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    bounds = {"min_pixels": 4 * cell * cell, "max_pixels": 1280 * cell * cell}
    try:
        wanted = smart_resize(height, width, cell, **bounds)
    except ValueError:
        with pytest.raises(InvalidParameter, match="too narrow"):
            scaled_size(height, width, rules(AreaScaling(**bounds), cell))
    else:
        assert scaled_size(height, width, rules(AreaScaling(**bounds), cell)) == wanted


@settings(deadline=None)
@given(SIDES, SIDES)
@example(8, 25)  # where cutting and rounding differ
@example(175, 10)
def test_sizes_of_two_frames_are_glms(height: int, width: int) -> None:
    """Limits are for two frames, and images thinner than a cell are scaled to one first."""
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    bounds = {"min_pixels": 12_544, "max_pixels": 2**21 + 1}
    scaling = AreaScaling(**bounds, num_frames=2, growing="cut")
    try:
        wanted = smart_resize(2, height, width, **bounds)
    except ValueError:
        with pytest.raises(InvalidParameter, match="too narrow"):
            scaled_size(height, width, rules(scaling, 28))
    else:
        assert scaled_size(height, width, rules(scaling, 28)) == wanted


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([(14, 1540), (28, 1540), (32, 1024)]))
def test_sizes_within_an_edge_are_pixtrals(height: int, width: int, kind: tuple[int, int]) -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    cell, longest = kind
    shape = np.broadcast_to(np.uint8(0), (3, height, width))
    wanted = get_resize_output_image_size(shape, longest, cell, "channels_first")
    if 0 in wanted:
        with pytest.raises(InvalidParameter, match="too narrow"):
            scaled_size(height, width, rules(EdgeScaling(longest), cell))
    else:
        assert scaled_size(height, width, rules(EdgeScaling(longest), cell)) == wanted


@given(SIDES, SIDES, st.sampled_from([(8, 2, 70), (16, 3, 280), (16, 3, 1120), (4, 1, 1)]))
@settings(deadline=None)
def test_sizes_within_a_budget_are_gemmas(
    height: int, width: int, kind: tuple[int, int, int]
) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    patch, merge, most = kind
    found = scaled_size(height, width, rules(BudgetScaling(most), patch * merge))
    try:
        wanted = get_aspect_ratio_preserving_size(height, width, patch, most * merge**2, merge)
    except ValueError:  # rounding has produced an empty side
        wanted = (patch * merge, patch * merge)
    assert found == wanted


def png_that_claims(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    parts = chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def webp_that_claims(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + (10).to_bytes(4, "little") + bytes(4) + size
    return b"RIFF" + len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize("claim", [png_that_claims, webp_that_claims])
def test_a_bomb_is_refused_by_its_header(claim: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"16000 x 16000 pixels is larger than"):
        read_image(claim(16000, 16000), rules(QWEN))
    with pytest.raises(InvalidParameter, match="larger than"):
        process_image(Image.new("1", (MAX_PIXELS // 1000 + 1, 1000)), rules(QWEN))


def test_a_jpeg_of_endless_scans_is_refused() -> None:
    exif = Image.Exif()
    thumbnails = b"\xff\xda\xff\xd9" * 300
    exif[0x010E] = thumbnails
    data = file_of(picture(64, 48), "JPEG", progressive=True, exif=exif)
    assert thumbnails in data
    read_image(data, rules(QWEN))
    read_image(data + data[-2000:] * 200, rules(QWEN))  # data after the end is ignored
    scan = data[data.rindex(b"\xff\xda") : -2]
    read_image(data[:-2] + scan * 50 + data[-2:], rules(QWEN))
    with pytest.raises(InvalidParameter, match="more than 128 scans"):
        read_image(data[:-2] + scan * 128 + data[-2:], rules(QWEN))


def test_an_image_of_no_pixels_is_refused() -> None:
    gif = bytearray(file_of(picture(8, 8), "GIF"))
    gif[6:10] = bytes(4)  # the screen's size
    at = gif.index(b",", 13 + 3 * 2 ** ((gif[10] & 7) + 1))
    gif[at + 5 : at + 9] = bytes(4)  # the frame's size
    for scaling in (QWEN, PIXTRAL, FixedScaling(28, True), FixedScaling(28, False)):
        with pytest.raises(InvalidParameter, match="damaged or cut off"):
            read_image(bytes(gif), rules(scaling))


@pytest.mark.parametrize("side", [(1, 201), (1, 8000)])
def test_what_is_too_narrow_is_refused(side: tuple[int, int]) -> None:
    scaling = QWEN if side[1] == 201 else PIXTRAL
    with pytest.raises(InvalidParameter, match="too narrow"):
        read_image(file_of(Image.new("RGB", side)), rules(scaling))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_that_is_cut_off_is_refused(format: str) -> None:
    data = file_of(picture(120, 90), format)
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(InvalidParameter, match="damaged or cut off"):
            read_image(data[: int(len(data) * share)], rules(QWEN))


@pytest.mark.parametrize("format", ["BMP", "TIFF", "ICO", "PPM"])
def test_other_formats_are_refused(format: str) -> None:
    with pytest.raises(InvalidParameter, match="neither PNG, JPEG, WebP nor GIF"):
        read_image(file_of(picture(32, 32), format), rules(QWEN))


def test_text_and_nothing_are_refused() -> None:
    for data, words in ((b"", "is empty"), (b"<svg/>", "neither"), (b"%PDF-1.7", "neither")):
        with pytest.raises(InvalidParameter, match=words):
            read_image(data, rules(QWEN))


FILES = [file_of(picture(40, 30), format) for format in ("PNG", "JPEG", "WEBP", "GIF")]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_a_damaged_file_is_read_or_refused(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    for at in draw.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=8)):
        damaged[at] = draw.draw(st.integers(0, 255))
    try:
        seen = read_image(bytes(damaged), rules(QWEN))
    except InvalidParameter:
        return
    assert len(seen.pixels) == seen.height * seen.width * 3
