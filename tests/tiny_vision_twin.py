"""What Hugging Face answers to a conversation about images, all of it done by its own code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import tiny_vision
from tests.tiny_vision import IMAGE, IMAGE_END, ROW_END
from tests.tiny_vision_text import LLAVA, MISTRAL, QWEN, save_text


class Twin:
    """A tiny model that reads images, saved with its tokenizer and template."""

    def __init__(self, kind: str, directory: Path, seed: int = 0) -> None:
        from transformers import PreTrainedTokenizerFast

        self.directory = directory
        longer = {"max_position_embeddings": 512}
        self._model = tiny_vision.save(kind, directory, seed=seed, text=longer)
        self._family = kind.split("_")[0]
        template = {"mistral3": MISTRAL, "llava": LLAVA}.get(self._family, QWEN)
        save_text(directory, template)
        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"), chat_template=template
        )
        self._processor = tiny_vision.processor(kind)
        self._processor.save_pretrained(directory)

    def prompt(self, messages: Sequence[Any], images: Sequence[Any]) -> list[int]:
        """The prompt's tokens; parts of type image in the messages stand for ``images``."""
        return self._inputs(messages, images)["input_ids"][0].tolist()

    def answer(self, messages: Sequence[Any], images: Sequence[Any], num_tokens: int) -> list[int]:
        """The likeliest tokens."""
        inputs = self._inputs(messages, images)
        output = self._model.generate(
            **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return output[0, inputs["input_ids"].shape[1] :].tolist()

    def text(self, token_ids: Sequence[int]) -> str:
        """What tokens say, without special ones."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _inputs(self, messages: Sequence[Any], images: Sequence[Any]) -> dict[str, Any]:
        import torch

        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        written = self._tokenizer.encode(text, add_special_tokens=False)
        seen: dict[str, Any] = {}
        shapes: list[list[int]] = []
        if images and self._family == "llava":
            seen = self._processor(list(images), return_tensors="pt")
            side = seen["pixel_values"].shape[-1] // self._model.config.vision_config.patch_size
            shapes = [[side, side] for _ in images]
        elif images and self._family == "mistral3":
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
        if images and self._family.startswith("qwen"):
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
        return inputs

    def _tokens(self, rows: int, columns: int) -> list[int]:
        if self._family != "mistral3":
            return [IMAGE] * (rows * columns)
        return [*([*[IMAGE] * columns, ROW_END] * rows)[:-1], IMAGE_END]
