"""The text models of Nemotron's models that see and hear; their encoders are not read."""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.multimodal import text_part
from engine.models.families.nemotron_h import nemotron_h
from engine.models.families.shared import set_aliases
from engine.models.spec import DecoderSpec

# Of the encoders, in Hugging Face's spelling and in the published one, and of the prompts that
# NVIDIA's code writes.
_ENCODERS = (
    *("audio_config", "sound_config", "downsample_ratio", "force_image_size", "norm_mean"),
    *("norm_std", "patch_size", "projector_hidden_size", "ps_version", "use_thumbnail"),
    *("video_pruning_rate", "video_temporal_patch_size", "vision_hidden_size", "vit_hidden_size"),
    *("use_backbone_lora", "use_llm_lora", "image_tag_type", "template", "attn_implementation"),
    *("audio_token_id", "video_token_id", "img_context_token_id", "video_context_token_id"),
    *("sound_context_token_id", "img_context_token", "video_context_token", "sound_context_token"),
    *("img_start_token", "img_end_token"),
)


def nemotron_h_omni(reader: ConfigReader) -> DecoderSpec:
    """Nemotron Nano 2 VL, 3 Nano Omni and 3.5 Super VL: Nemotron-H beside encoders."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.require("model_type", "nemotron_h")
        text.ignore("auto_map")  # transformers has the code
        text.set_defaults({"model_type": "nemotron_h"})
        return nemotron_h(text)

    set_aliases(reader, {"llm_config": "text_config"})
    if "text_config" not in reader:
        raise reader.error("text_config", "is missing")
    spec = text_part(reader, read, _ENCODERS)
    return dataclasses.replace(spec, naming="whole/nemotron_h")


_DIFFERENCES = "as `nemotron_h`; text only"
FAMILIES: dict[str, Family] = {
    "NemotronH_Nano_Omni_Reasoning_V3": Family(
        nemotron_h_omni, "Nemotron 3 Nano Omni 30B-A3B", _DIFFERENCES, has_remote_code=True
    ),
    "NemotronH_Nano_VL_V2": Family(
        nemotron_h_omni, "Nemotron Nano 2 VL 12B", _DIFFERENCES, has_remote_code=True
    ),
    "nemotron_h_omni": Family(
        nemotron_h_omni,
        "Nemotron 3.5 Super VL, Nemotron 3 Nano Omni as transformers saves it",
        _DIFFERENCES,
        has_remote_code=True,
    ),
}
