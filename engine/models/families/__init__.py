"""Family readers: a Hugging Face config becomes a DecoderSpec, or is refused by name.

A reader reads the keys that its family has. Any other key that is not known to be harmless is an
error: a key that is ignored today is a wrong answer tomorrow.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ModelLoadError
from engine.models.config_reader import ConfigReader
from engine.models.encoder.families import ENCODERS
from engine.models.encoder.spec import EncoderSpec
from engine.models.families import (
    alibi,
    audio_text,
    bailing,
    cohere,
    dbrx,
    deepseek,
    ernie,
    falcon,
    flint,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt,
    gpt_oss,
    granite,
    hunyuan,
    hybrid,
    image_text,
    kimi_linear,
    laguna,
    llama,
    llama4,
    longcat,
    mamba,
    mamba1,
    mamba2,
    mimo,
    moe,
    multimodal,
    muse,
    nemotron_h,
    nemotron_omni,
    olmo,
    omni,
    phi,
    step,
    ungated,
    whisper,
)
from engine.models.families.embedding_gemma import BIDIRECTIONAL, EMBEDDING_GEMMAS
from engine.models.families.family import Family
from engine.models.output_head import with_head
from engine.models.spec import DecoderSpec

# Each module has a table of the families that it reads: model_type -> Family.
MODULES = (
    alibi,
    audio_text,
    bailing,
    cohere,
    dbrx,
    deepseek,
    ernie,
    falcon,
    flint,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt,
    gpt_oss,
    granite,
    hunyuan,
    hybrid,
    image_text,
    kimi_linear,
    laguna,
    llama,
    llama4,
    longcat,
    mamba,
    mamba1,
    mamba2,
    mimo,
    moe,
    multimodal,
    muse,
    nemotron_h,
    nemotron_omni,
    olmo,
    omni,
    phi,
    step,
    ungated,
    whisper,
)
FAMILIES: dict[str, Family] = {
    name: family for module in MODULES for name, family in module.FAMILIES.items()
}

_ENCODERS = ENCODERS | EMBEDDING_GEMMAS


def read_spec(config: dict[str, Any]) -> DecoderSpec | EncoderSpec:
    """Return the spec of a model from its parsed config.json.

    Raises:
        ModelLoadError: the architecture is unknown, a value is out of range, or a key is not
            understood; one line that names it.
    """
    reader = ConfigReader(config)
    model_type = reader.text("model_type", "")
    family, encoder = FAMILIES.get(model_type), _ENCODERS.get(model_type)
    if model_type in BIDIRECTIONAL and reader.flag("use_bidirectional_attention"):
        encoder = BIDIRECTIONAL[model_type]
    known = encoder or family
    if known is not None and known.has_remote_code:
        reader.ignore("auto_map")
    else:
        reader.refuse("auto_map", "asks for code from the model's directory, which is never run")
    if encoder is not None:
        reader.refuse("quantization_config", "is set: encoders are supported unquantised only")
        spec = encoder.read(reader)
        reader.finish()
        return spec
    if family is None:
        names = ", ".join(sorted({*FAMILIES, *_ENCODERS}))
        raise ModelLoadError(
            f"config.json: architecture {model_type[:80]!r} is not supported (known: {names})"
        )
    reader.section("quantization_config")  # see engine/quantization/formats
    reader.require("is_causal", True)
    spec = with_head(family.read(reader), reader)
    reader.finish()
    return spec
