"""Tiny random Whisper models in Hugging Face format, with a tokenizer.

    model = tiny_whisper.save(tmp_path)

They hear one second: 50 positions. The vocabulary is that of tiny text models, special tokens, and
timestamps of 0 to 1 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_vision_text import save_text

RATE = 16_000
POSITIONS, MELS = 50, 16
OTHER, EOT, SOT, EN, DE, TRANSLATE, TRANSCRIBE, PREV, NO_SPEECH, NO_STAMPS = range(148, 158)
STAMPS = NO_STAMPS + 1
VOCAB = STAMPS + POSITIONS + 1
MAX_TEXT = 96
SPECIAL = {
    **{OTHER: "<|startoflm|>", EOT: "<|endoftext|>"},
    **{SOT: "<|startoftranscript|>", EN: "<|en|>", DE: "<|de|>"},
    **{TRANSLATE: "<|translate|>", TRANSCRIBE: "<|transcribe|>", PREV: "<|startofprev|>"},
    **{NO_SPEECH: "<|nospeech|>", NO_STAMPS: "<|notimestamps|>"},
    **{STAMPS + i: f"<|{i * 0.02:.2f}|>" for i in range(POSITIONS + 1)},
}
SUPPRESSED = (7, 23, 88, SOT, TRANSLATE, TRANSCRIBE, PREV, NO_SPEECH)
BEGIN_SUPPRESSED = (12, EOT)


def build(seed: int = 5, **changes: Any) -> Any:
    """A Hugging Face model with random weights, large enough for each of its parts to matter."""
    import torch
    import transformers

    config = transformers.WhisperConfig(
        **{
            **{"vocab_size": VOCAB, "num_mel_bins": MELS, "d_model": 32},
            **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48},
            **{"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 80},
            **{"max_source_positions": POSITIONS, "max_target_positions": MAX_TEXT},
            **{"decoder_start_token_id": SOT, "pad_token_id": EOT, "bos_token_id": EOT},
            **{"eos_token_id": EOT, "begin_suppress_tokens": None},
            **changes,
        }
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.WhisperForConditionalGeneration(config).eval()
        for name, parameter in model.named_parameters():
            is_norm = "layer_norm" in name and name.endswith("weight")
            parameter.data.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.25)
    settings = {
        **{"is_multilingual": True, "lang_to_id": {"<|en|>": EN, "<|de|>": DE}},
        **{"task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}},
        **{"no_timestamps_token_id": NO_STAMPS, "prev_sot_token_id": PREV},
        **{"suppress_tokens": list(SUPPRESSED), "begin_suppress_tokens": list(BEGIN_SUPPRESSED)},
        **{"max_initial_timestamp_index": 20, "max_length": MAX_TEXT},
    }
    for key, value in settings.items():
        setattr(model.generation_config, key, value)
    return model


def save(directory: Path, seed: int = 5, **changes: Any) -> Any:
    """Save ``build()`` with its tokenizer and settings; returns the model."""
    model = build(seed, **changes)
    model.save_pretrained(directory)
    save_text(directory, "", SPECIAL)
    (directory / "chat_template.jinja").unlink()
    _add_surroundings(directory / "tokenizer.json")
    extractor().save_pretrained(directory)
    return model


def _add_surroundings(path: Path) -> None:
    """Surround texts with special tokens, as published tokenizers do."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[SOT]} {SPECIAL[NO_STAMPS]} $A {SPECIAL[EOT]}",
        special_tokens=[(SPECIAL[token], token) for token in (SOT, NO_STAMPS, EOT)],
    )
    tokenizer.save(str(path))


def extractor() -> Any:
    """Hugging Face's feature extractor for it."""
    import transformers

    return transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)


def features(samples: np.ndarray) -> Any:
    """Hugging Face's features of a clip: [1, mels, frames]."""
    return extractor()(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]


class Twin:
    """Hugging Face's reference answers, by its model and its rules, one token at a time."""

    def __init__(self, directory: Path, seed: int = 5, **changes: Any) -> None:
        self.directory = directory
        self.model = save(directory, seed, **changes)
        self._known: dict[tuple[bytes, tuple[int, ...], bool], list[int]] = {}

    def logits(self, samples: np.ndarray, text: Sequence[int]) -> Any:
        """[len(text), vocab]."""
        import torch

        with torch.no_grad():
            ids = torch.tensor([list(text)])
            return self.model(features(samples), decoder_input_ids=ids).logits[0]

    def greedy(
        self, samples: np.ndarray, prompt: Sequence[int], count: int, *, stamped: bool = False
    ) -> list[int]:
        """The transcript of a clip, with the token that ended it, of at most ``count`` tokens."""
        import torch

        key = samples.tobytes(), tuple(prompt), stamped
        found = list(self._known.get(key, ()))
        if len(found) >= count or EOT in found:
            return found[:count]
        processors = self.processors(len(prompt), stamped=stamped)
        with torch.no_grad():
            seen = self.model.model.encoder(features(samples))
            while len(found) < count and EOT not in found:
                ids = torch.tensor([[*prompt, *found]])
                scores = self.model(encoder_outputs=seen, decoder_input_ids=ids).logits[:, -1]
                for process in processors:
                    scores = process(ids, scores)
                found.append(int(scores.argmax()))
        self._known[key] = found
        return list(found)

    def processors(self, begin: int, *, stamped: bool) -> list[Any]:
        """Hugging Face's rules of transcripts."""
        from transformers.generation import logits_process as rules

        settings = self.model.generation_config
        found = [
            rules.SuppressTokensLogitsProcessor(settings.suppress_tokens, device="cpu"),
            rules.SuppressTokensAtBeginLogitsProcessor(
                settings.begin_suppress_tokens, begin, device="cpu"
            ),
        ]
        if stamped:
            found.append(rules.WhisperTimeStampLogitsProcessor(settings, begin))
        return found
