"""Hugging Face's reference answers to conversations with audio, computed only by its own code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny_audio
from tests.tiny_audio import AUDIO, BEGIN, END, RATE, TURN_END


class AudioTwin:
    """A tiny model that hears, saved with its tokenizer and template."""

    def __init__(self, kind: str, directory: Path, seed: int = 0) -> None:
        import transformers

        self.directory = directory
        self.kind = kind
        self._model = tiny_audio.save(kind, directory, seed=seed)
        special = tiny_audio.special_tokens(kind)
        self._tokenizer: Any = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"),
            chat_template=tiny_audio.template_of(directory),
            pad_token=special[TURN_END],
            extra_special_tokens={
                "audio_token": special[AUDIO],
                "audio_bos_token": special[BEGIN],
                "audio_eos_token": special[END],
            },
            model_input_names=["input_ids", "attention_mask"],
        )
        self._extractor = tiny_audio.extractor(kind)
        self._whole: Any = None  # Voxtral's needs a library for its tokenizer
        if kind == "qwen2_audio":
            self._whole = transformers.Qwen2AudioProcessor(self._extractor, self._tokenizer)
        elif kind == "qwen3_asr":
            self._whole = transformers.Qwen3ASRProcessor(self._extractor, self._tokenizer)

    def prompt(self, messages: Sequence[Any], clips: Sequence[np.ndarray]) -> list[int]:
        """The prompt's tokens; audio parts in the messages stand for ``clips``."""
        return self._inputs(messages, clips)["input_ids"][0].tolist()

    def answer(
        self, messages: Sequence[Any], clips: Sequence[np.ndarray], count: int, suffix: str = ""
    ) -> list[int]:
        """The greedy continuation."""
        inputs = self._inputs(messages, clips, suffix)
        output = self._model.generate(
            **inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return output[0, inputs["input_ids"].shape[1] :].tolist()

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _inputs(
        self, messages: Sequence[Any], clips: Sequence[np.ndarray], suffix: str = ""
    ) -> dict[str, Any]:
        import torch

        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        text += suffix
        if self._whole is not None and clips:
            asked = {"text": text, "audio": list(clips), "return_tensors": "pt"}
            return dict(self._whole(**asked, sampling_rate=RATE))
        ids: list[int] = []
        seen: list[Any] = []
        for id_ in self._tokenizer.encode(text, add_special_tokens=False):
            if id_ != AUDIO:
                ids.append(id_)
                continue
            features = self._extractor(
                clips[len(seen)],
                truncation=False,
                padding=True,
                pad_to_multiple_of=2 * RATE,
                sampling_rate=RATE,
                return_tensors="pt",
            )["input_features"][0]
            seen.append(features.unflatten(1, (-1, 200)).transpose(0, 1))
            ids += [AUDIO] * (25 * seen[-1].shape[0])
        inputs = {"input_ids": torch.tensor([ids])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if seen:
            inputs["input_features"] = torch.cat(seen)
        return inputs
