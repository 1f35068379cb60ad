"""Tiny videos, and tiny models of ``tests/tiny_vision.py`` that are asked about videos."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.images.types import Image
from tests import tiny_vision, tiny_vision_pixels
from tests.tiny_vision import END, IMAGE, START, VIDEO
from tests.tiny_vision_text import INTERNVL_SPECIAL, QWEN, SPECIAL, TURN_END, save_text

SHOWN = "<|vision_start|><|video_pad|><|vision_end|>"  # by the template
TEMPLATE = QWEN.replace(
    "{% elif 'text' in part %}",
    f"{{% elif part.type == 'video' %}}{SHOWN}{{% elif 'text' in part %}}",
)


def moving(count: int, height: int = 60, width: int = 88, seed: int = 0) -> list[np.ndarray]:
    """Frames [height, width, 3] uint8 of a block that moves over a background."""
    rng = np.random.default_rng(seed)
    background, block = rng.integers(0, 256, (2, 3), np.uint8)
    frames = []
    for number in range(count):
        frame = np.full((height, width, 3), background, np.uint8)
        left = number * (width - 10) // max(1, count - 1)
        frame[height // 4 : height // 2, left : left + 10] = block + np.uint8(number)
        frames.append(frame)
    return frames


def recorded(
    frames: Sequence[np.ndarray],
    fps: int = 10,
    codec: str = "libx264",
    format: str = "mp4",
    **options: str,
) -> bytes:
    """A file of these frames; libx264's are exact up to the conversion of colours."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv444p" if codec == "libx264" else "yuv420p"
        stream.options = {"qp": "0", **options} if codec == "libx264" else options
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


class VideoTwin:
    """A tiny model, saved with its tokenizer and template, and Hugging Face's answers of it."""

    def __init__(self, kind: str, directory: Path, **vision: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        self.kind, self.directory = kind, directory
        longer = {"max_position_embeddings": 2048}
        self.model = tiny_vision.save(kind, directory, text=longer, **vision)
        self.model.get_output_embeddings().weight.data[VIDEO] = 0.0  # it is never generated
        self.model.save_pretrained(directory)
        self.is_internvl = kind.startswith("internvl")
        self.special = {**INTERNVL_SPECIAL, VIDEO: "<video>"} if self.is_internvl else SPECIAL
        self.shown = "<video>" if self.is_internvl else SHOWN
        template = TEMPLATE.replace(SHOWN, self.shown)
        save_text(directory, template, self.special)
        tiny_vision_pixels.processor(kind).save_pretrained(directory)
        self.tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"),
            chat_template=template,
            pad_token=self.special[TURN_END],
        )

    def prompt(
        self, messages: Sequence[Any], indices: Sequence[int], fps: float, grid: Sequence[int]
    ) -> list[int]:
        """The tokens of messages with one video, as Hugging Face's processor has them.

        Args:
            messages: in whose parts it is a placeholder.
            indices: of the frames that are shown.
            fps: of the video.
            grid: of patches: time, rows, columns.
        """
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert text.count(self.shown) == 1
        text = text.replace(*self._replacement(indices, fps, grid))
        return self.tokenizer.encode(text, add_special_tokens=False)

    def inputs(self, asked: Any, more: Sequence[int] = ()) -> dict[str, Any]:
        """The model's inputs for a prompt with parts of videos, and tokens behind it."""
        import torch

        ids = torch.tensor([[*asked[0], *more]])
        if self.is_internvl:
            frames = self._normal(asked[1], 1)[:, 0]
            pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
            mask = torch.ones_like(ids)
            return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
        kinds = torch.zeros_like(ids)
        pixels, grids = [], []
        for parts in _videos(asked[1]):
            first = parts[0]
            side = first.height * first.width // first.num_tokens
            side = round(side**0.5) // 2  # of a patch
            pixels.append(self._patches(parts, side))
            grids.append([len(parts), first.height // side, first.width // side])
            for part in parts:
                kinds[0, part.start : part.start + part.num_tokens] = 2
        found = {
            **{"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            **{"pixel_values_videos": torch.cat(pixels), "video_grid_thw": torch.tensor(grids)},
        }
        return found if self.kind == "lfm3_vl" else {**found, "mm_token_type_ids": kinds}

    def answer(self, asked: Any, num_tokens: int, **inputs: Any) -> list[int]:
        """The greedy continuation of a prompt: its tokens, and the parts of its videos."""
        given = {**self.inputs(asked), **inputs}
        output = self.model.generate(
            **given, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return output[0, len(asked[0]) :].tolist()

    def _patches(self, parts: Sequence[Image], side: int) -> Any:
        """The published layout of pixels: [patches, 3 * 2 * side * side]."""
        import torch

        cells = torch.from_numpy(self._normal(parts, 2)).flatten(0, 1).permute(0, 3, 1, 2)
        rows, columns = parts[0].height // side // 2, parts[0].width // side // 2
        split = cells.reshape(len(parts), 2, 3, rows, 2, side, columns, 2, side)
        return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 6 * side**2)

    def _normal(self, parts: Sequence[Image], num_frames: int) -> np.ndarray:
        """[parts, num_frames, height, width, 3], normalised."""
        shape = (num_frames, parts[0].height, parts[0].width, 3)
        frames = [np.frombuffer(part.pixels, np.uint8).reshape(shape) for part in parts]
        mean, std = _NORMALISED.get(self.kind[:5], _CLIP)
        return (np.stack(frames) / np.float32(255) - np.float32(mean)) / np.float32(std)

    def _replacement(self, indices: Sequence[int], fps: float, grid: Sequence[int]) -> Any:
        """What of a text Hugging Face's processor replaces, and by what."""
        import torch
        import transformers
        from transformers.video_utils import VideoMetadata

        if self.kind.startswith("qwen2"):
            cells = grid[0] * grid[1] * grid[2] // 4
            return SPECIAL[VIDEO], SPECIAL[VIDEO] * cells
        kinds = {
            "qwen3": "Qwen3VL",
            "lfm3_": "Lfm3Vl",
            "glm46": "Glm46V",
            "glm4v": "Glm4v",
            "inter": "InternVL",
        }
        kind: Any = getattr(transformers, f"{kinds[self.kind[:5]]}Processor")
        processor = kind.__new__(kind)
        processor.video_processor = _VideoProcessor
        processor.video_token = SPECIAL[VIDEO]
        processor.image_token = SPECIAL[IMAGE]
        processor.vision_start_token = SPECIAL[START]
        processor.vision_end_token = SPECIAL[END]
        if self.is_internvl:
            processor.image_seq_length = 4
            processor.start_image_token, processor.end_image_token = "<img>", "</img>"
            processor.image_token = self.special[IMAGE]
            seen = {"pixel_values_videos": [np.empty((grid[0], 1))]}
            return self.shown, processor.replace_video_token(seen, 0)
        metadata = VideoMetadata(0, fps=fps, frames_indices=list(indices))
        found = {"video_grid_thw": torch.tensor([list(grid)]), "video_metadata": [metadata]}
        text = processor.replace_video_token(found, 0)
        if self.kind.startswith("glm"):
            for name, own in (("<|begin_of_image|>", START), ("<|end_of_image|>", END)):
                text = text.replace(name, SPECIAL[own])
            return SPECIAL[VIDEO], text
        return SHOWN, text


class _VideoProcessor:
    """What the processors ask of a video processor, which would need torchvision."""

    merge_size = temporal_patch_size = 2


_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_NORMALISED = {
    "inter": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "qwen3": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


def _videos(parts: Sequence[Image]) -> list[list[Image]]:
    found: list[list[Image]] = []
    for part in parts:
        assert part.video is not None
        if part.begins_video:
            found.append([])
        found[-1].append(part)
    return found
