"""Tiny random models that hear, in Hugging Face format, one for each kind of encoder.

    model = tiny_audio.save("voxtral", tmp_path)

They hear chunks of one or two seconds. The token ``AUDIO`` stands for a clip, in a vocabulary of
160.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny_models
from tests.tiny_vision_text import TURN_END, save_text

AUDIO, BEGIN, END, TRANSCRIBE, ASR_TEXT = range(150, 155)
RATE = 16_000
_WHISPER = {"num_mel_bins": 16, "max_source_positions": 50}
_OLDER = {
    **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32},
}
_NEWER = {
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    "hidden_size": 32,
}
# kind -> (Hugging Face class, text model's kind, audio config, whole config)
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "voxtral": (
        *("Voxtral", "llama"),
        *({**_NEWER, **_WHISPER, "max_source_positions": 100}, {"audio_token_id": AUDIO}),
    ),
    "qwen2_audio": (
        *("Qwen2Audio", "qwen2"),
        *({**_OLDER, **_WHISPER}, {"audio_token_index": AUDIO}),
    ),
    "qwen3_asr": (
        *("Qwen3ASR", "qwen3"),
        {
            **{**_OLDER, "num_mel_bins": 16, "output_dim": 48, "downsample_hidden_size": 6},
            **{"n_window": 50, "n_window_infer": 200},
        },
        {"audio_token_id": AUDIO, "tie_word_embeddings": False, "eos_token_id": TURN_END},
    ),
}
_QWEN2_AUDIO = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if 'audio' in part or 'audio_url' in part or part.type == 'audio' %}"
    "Audio: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN3_ASR = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'audio' or 'audio' in part or 'audio_url' in part %}"
    "<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VOXTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST]"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'audio' %}[BEGIN_AUDIO][AUDIO]"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}[/INST]"
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
_TEXTS = {
    "voxtral": (
        _VOXTRAL,
        {
            **{148: "[INST]", 149: "</s>", AUDIO: "[AUDIO]", BEGIN: "[BEGIN_AUDIO]"},
            **{END: "[/INST]", TRANSCRIBE: "[TRANSCRIBE]"},
        },
    ),
    "qwen2_audio": (
        _QWEN2_AUDIO,
        {
            **{148: "<|im_start|>", 149: "<|im_end|>", AUDIO: "<|AUDIO|>"},
            **{BEGIN: "<|audio_bos|>", END: "<|audio_eos|>"},
        },
    ),
    "qwen3_asr": (
        _QWEN3_ASR,
        {
            **{148: "<|im_start|>", 149: "<|im_end|>", AUDIO: "<|audio_pad|>"},
            **{BEGIN: "<|audio_start|>", END: "<|audio_end|>"},
            **{TRANSCRIBE: "<timestamp>", ASR_TEXT: "<asr_text>"},
        },
    ),
}


def build(kind: str, *, seed: int = 0, text: dict[str, Any] | None = None) -> Any:
    """A Hugging Face model with random weights, large enough for each of its parts to matter."""
    import torch
    import transformers

    name, text_kind, shape, whole = KINDS[kind]
    part = tiny_models.build(text_kind, **{"max_position_embeddings": 512, **(text or {})})
    config = getattr(transformers, f"{name}Config")(
        text_config=part.config.to_dict(), audio_config=shape, **whole
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        for parameter_name, parameter in model.named_parameters():
            is_norm = "norm" in parameter_name or "ln_post" in parameter_name
            is_norm &= parameter_name.endswith("weight")
            parameter.data.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.25)
        model.get_output_embeddings().weight.data[AUDIO] = 0.0  # never generated
    return model


def save(kind: str, directory: Path, **options: Any) -> Any:
    """Save ``build(kind)`` with its tokenizer, template and settings; returns the model."""
    model = build(kind, **options)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = TURN_END
    model.save_pretrained(directory)
    template, special = _TEXTS[kind]
    save_text(directory, template, special)
    if kind == "qwen3_asr":  # what it writes before a text is no special token
        path = directory / "tokenizer.json"
        written = json.loads(path.read_text())
        for token in written["added_tokens"]:
            token["special"] = token["id"] != ASR_TEXT
        path.write_text(json.dumps(written))
    extractor(kind).save_pretrained(directory)
    return model


def extractor(kind: str) -> Any:
    """Hugging Face's feature extractor for it."""
    import transformers

    if kind == "qwen3_asr":
        return transformers.Qwen3ASRFeatureExtractor(feature_size=16)
    return transformers.WhisperFeatureExtractor(
        feature_size=16, chunk_length=2 if kind == "voxtral" else 1
    )


def speech(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """Something that varies over time: [seconds * rate] float32."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    pitch = 200 + 150 * np.sin(2 * np.pi * (2 + seed) * time)
    loudness = 0.3 + 0.2 * np.sin(2 * np.pi * 3 * time)
    noise = rng.normal(0, 0.01, time.size)
    return (loudness * np.sin(2 * np.pi * np.cumsum(pitch) / rate) + noise).astype(np.float32)


def encoded(samples: np.ndarray, rate: int = RATE, format: str = "WAV", **options: Any) -> bytes:
    """A file with these samples, in float32 if the format has it."""
    import soundfile

    file = io.BytesIO()
    if format == "WAV":
        options.setdefault("subtype", "FLOAT")
    soundfile.write(file, samples, rate, format=format, **options)
    return file.getvalue()


def wav_base64(samples: np.ndarray, rate: int = RATE) -> str:
    """The same in base64."""
    import base64

    return base64.b64encode(encoded(samples, rate)).decode()


def special_tokens(kind: str) -> dict[int, str]:
    """The spellings of special tokens."""
    return dict(_TEXTS[kind][1])


def template_of(directory: Path) -> str:
    """The chat template of a saved model."""
    return (directory / "chat_template.jinja").read_text()
