"""Hugging Face's reference answers to conversations with images, computed only by its own code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import tiny_vision, tiny_vision_pixels
from tests.tiny_processors import Gemma4UnifiedProcessor
from tests.tiny_vision import END, IMAGE, IMAGE_END, ROW_END, START, VIDEO
from tests.tiny_vision_text import (
    AYA,
    COHERE,
    COHERE_SPECIAL,
    GEMMA3,
    GEMMA4,
    GEMMA_SPECIAL,
    IDEFICS3,
    IDEFICS3_SPECIAL,
    INTERNVL,
    INTERNVL_SPECIAL,
    LFM2_SPECIAL,
    LLAMA4,
    LLAMA4_SPECIAL,
    LLAVA,
    MINICPM,
    MINICPM_SPECIAL,
    MISTRAL,
    QWEN,
    SMOLVLM_SPECIAL,
    SPECIAL,
    TURN_END,
    save_text,
)

_TEMPLATES = {
    **{"mistral3": MISTRAL, "llava": LLAVA, "gemma3": GEMMA3, "gemma4": GEMMA4},
    **{"idefics3": IDEFICS3, "smolvlm": IDEFICS3, "internvl": INTERNVL},
    **{"aya": AYA, "cohere2": COHERE, "lfm2": IDEFICS3, "llama4": LLAMA4},
    "minicpmv4": MINICPM,
}
_SPECIAL = {
    **{"gemma3": GEMMA_SPECIAL, "gemma4": GEMMA_SPECIAL, "idefics3": IDEFICS3_SPECIAL},
    **{"smolvlm": SMOLVLM_SPECIAL, "internvl": INTERNVL_SPECIAL},
    **{"aya": COHERE_SPECIAL, "cohere2": COHERE_SPECIAL, "lfm2": LFM2_SPECIAL},
    **{"llama4": LLAMA4_SPECIAL, "minicpmv4": MINICPM_SPECIAL},
}
# What MiniCPM-V's processor reads of its tokenizer.
_MARKS = {
    **{"image_start_token": "<image>", "image_end_token": "</image>"},
    **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
    **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
}


class Twin:
    """A tiny vision-language model, saved with its tokenizer and template."""

    def __init__(self, kind: str, directory: Path, seed: int = 0) -> None:
        from transformers import PreTrainedTokenizerFast

        self.directory = directory
        longer = {"max_position_embeddings": 512}
        if kind.startswith("gemma4"):
            longer["sliding_window"] = 70  # the minimum that its processor accepts
        if kind == "cohere2_vision":
            longer["sliding_window"] = 400  # or the images would hardly matter
        self._model = tiny_vision.save(kind, directory, seed=seed, text=longer)
        self.family = kind.split("_")[0]
        template = _TEMPLATES.get(self.family, QWEN)
        special = _SPECIAL.get(self.family, SPECIAL)
        save_text(directory, template, special)
        self._tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"),
            chat_template=template,
            pad_token=special[TURN_END],
            extra_special_tokens={
                "boi_token": special[START],
                "image_token": special[IMAGE],
                "eoi_token": special[END],
                # The audio tokens, without which Gemma 4's processor does nothing.
                **dict.fromkeys(("audio_token", "boa_token", "eoa_token"), special[VIDEO]),
                "start_image_token": special[START],
                "context_image_token": special[IMAGE],
                "end_image_token": special[END],
                "video_token": special[VIDEO],
                "img_line_break_token": special[VIDEO],
                **(_MARKS if self.family == "minicpmv4" else {}),
            },
            model_input_names=["input_ids", "attention_mask"],
        )
        self._processor = tiny_vision_pixels.processor(kind)
        self._processor.save_pretrained(directory)
        self._whole = _whole_processor(kind, self._processor, self._tokenizer)
        self._nested = kind == "llava_onevision"

    def prompt(self, messages: Sequence[Any], images: Sequence[Any]) -> list[int]:
        """The prompt's tokens; image parts in the messages stand for ``images``."""
        return self._inputs(messages, images)["input_ids"][0].tolist()

    def answer(self, messages: Sequence[Any], images: Sequence[Any], num_tokens: int) -> list[int]:
        """The greedy continuation."""
        inputs = self._inputs(messages, images)
        output = self._model.generate(
            **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return output[0, inputs["input_ids"].shape[1] :].tolist()

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _inputs(self, messages: Sequence[Any], images: Sequence[Any]) -> dict[str, Any]:
        import torch

        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        if self._whole is not None:
            shown = [[*images]] if self._nested and images else [*images]
            return dict(self._whole(text=text, images=shown or None, return_tensors="pt"))
        written = self._tokenizer.encode(text, add_special_tokens=False)
        seen: dict[str, Any] = {}
        shapes: list[list[int]] = []
        if images and self.family == "llava":
            seen = self._processor(list(images), return_tensors="pt")
            side = seen["pixel_values"].shape[-1] // self._model.config.vision_config.patch_size
            shapes = [[side, side] for _ in images]
        elif images and self.family == "mistral3":
            seen = self._processor(list(images), patch_size=28, return_tensors="pt")
            shapes = [[int(side) // 28 for side in size] for size in seen["image_sizes"]]
        elif images:
            seen = self._processor(list(images), return_tensors="pt")
            shapes = [[int(side) // 2 for side in grid[1:]] for grid in seen["image_grid_thw"]]
        ids: list[int] = []
        for id_ in written:
            ids += self._tokens(*shapes.pop(0)) if id_ == IMAGE else [id_]
        inputs = {"input_ids": torch.tensor([ids]), **seen}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if images and self.family.startswith(("qwen", "glm")):
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
        return inputs

    def _tokens(self, rows: int, columns: int) -> list[int]:
        if self.family != "mistral3":
            return [IMAGE] * (rows * columns)
        return [*([*[IMAGE] * columns, ROW_END] * rows)[:-1], IMAGE_END]


def _whole_processor(kind: str, images: Any, tokenizer: Any) -> Any:
    """A family's processor for text and images together; None: none is needed."""
    import transformers
    from transformers.models.smolvlm import processing_smolvlm as processing

    family = kind.split("_")[0]
    if kind == "llava_next":
        return transformers.LlavaNextProcessor(
            images, tokenizer, 14, "default", num_additional_image_tokens=1
        )
    if family == "gemma3":
        return transformers.Gemma3Processor(images, tokenizer, image_seq_length=9)
    if family == "idefics3":
        return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)

    class WithoutVideo:
        """Processors without audio and video, which need other libraries."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            pass

    class Gemma4(WithoutVideo, transformers.Gemma4Processor):
        pass

    class Gemma4Unified(WithoutVideo, transformers.Gemma4UnifiedProcessor):
        pass

    class InternVL(WithoutVideo, transformers.InternVLProcessor):
        pass

    class SmolVLM(WithoutVideo, transformers.SmolVLMProcessor):
        pass

    class Onevision(WithoutVideo, transformers.LlavaOnevisionProcessor):
        pass

    class MiniCPM(WithoutVideo, transformers.MiniCPMV4_6Processor):
        pass

    class Llama4(WithoutVideo, transformers.Llama4Processor):
        pass

    class Cohere(WithoutVideo, transformers.Cohere2VisionProcessor):
        pass

    class Lfm2(WithoutVideo, transformers.Lfm2VlProcessor):
        pass

    if family == "minicpmv4":
        return MiniCPM(images, images, tokenizer)
    if family == "llama4":
        return Llama4(images, tokenizer, 7, image_token="<|image|>")
    if kind == "llava_onevision":
        return Onevision(images, tokenizer, None, 4, "full", vision_aspect_ratio="anyres_max_1")
    if family == "lfm2":
        return Lfm2(images, tokenizer)
    if family == "aya":
        return transformers.AyaVisionProcessor(images, tokenizer, 7, 28, downsample_factor=2)
    if family == "cohere2":
        return Cohere(images, tokenizer)
    if family == "gemma4":
        if isinstance(images, Gemma4UnifiedProcessor):
            return Gemma4Unified(None, images, tokenizer, None)
        return Gemma4(None, images, tokenizer, None)
    if family == "internvl":
        return InternVL(images, tokenizer, None, image_seq_length=4)
    if family == "smolvlm":
        vars(processing)["num2words"] = str  # a library that only videos need
        return SmolVLM(images, tokenizer, None, image_seq_len=4)
    return None
