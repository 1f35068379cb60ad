"""Family readers: a Hugging Face config becomes a DecoderSpec, or is refused by name.

A reader asks for the keys its family has. What is left over and not known to be harmless is an
error: a key that is ignored today is a wrong answer tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import ModelLoadError
from engine.models.config_reader import ConfigReader
from engine.models.families import gemma, gpt, llama, moe
from engine.models.spec import DecoderSpec

_FAMILIES: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "cohere": llama.cohere,
    "cohere2": llama.cohere2,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "gpt2": gpt.gpt2,
    "gpt_neox": gpt.gpt_neox,
    "granite": llama.granite,
    "llama": llama.llama,
    "mistral": llama.mistral,
    "mixtral": moe.mixtral,
    "olmo2": llama.olmo2,
    "phi3": llama.phi3,
    "qwen2": llama.qwen2,
    "qwen2_moe": moe.qwen2_moe,
    "qwen3": llama.qwen3,
    "qwen3_moe": moe.qwen3_moe,
    "smollm3": llama.smollm3,
    "stablelm": llama.stablelm,
}


def read_spec(config: dict[str, Any]) -> DecoderSpec:
    """The spec of a model from its parsed config.json.

    Raises:
        ModelLoadError: the architecture is not known, a value is out of range, or a key is not
            understood; one line that names it.
    """
    reader = ConfigReader(config)
    reader.refuse("auto_map", "asks for code from the model's directory, which is never run")
    reader.refuse("quantization_config", "is set: quantised checkpoints are not supported yet")
    model_type = reader.text("model_type", "")
    family = _FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelLoadError(
            f"config.json: architecture {model_type[:80]!r} is not supported (known: {known})"
        )
    spec = family(reader)
    reader.finish()
    return spec
