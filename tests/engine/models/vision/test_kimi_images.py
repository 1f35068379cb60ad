"""Images of Kimi K2.5: files as they were published, and sizes as its processor computes them.

Hugging Face's processor needs torchvision; ``tests/tiny_processors.py`` has its steps.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.images.read import process_image, scaled_size
from engine.images.types import ImageRules, PaddedScaling
from engine.models.checkpoint import read_config
from engine.models.spec import DecoderSpec
from engine.models.vision.kimi import padded_scaling
from tests import tiny_vision
from tests.engine.models.test_kimi import _CONFIG, _THINKING
from tests.tiny_processors import KimiProcessor

SIDES = st.integers(1, 3000)
_VISION = {
    **{"_attn_implementation": "flash_attention_2", "init_pos_emb_height": 64},
    **{"init_pos_emb_time": 4, "init_pos_emb_width": 64, "merge_kernel_size": [2, 2]},
    **{"merge_type": "sd2_tpool", "mm_hidden_size": 1152, "mm_projector_type": "patchmerger"},
    **{"patch_size": 14, "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu"},
    **{"projector_ln_eps": 1e-5, "text_hidden_size": 64, "video_attn_type": "spatial_temporal"},
    **{"vt_hidden_size": 1152, "vt_intermediate_size": 4304, "vt_num_attention_heads": 16},
    "vt_num_hidden_layers": 27,
}
_WHOLE = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    **{"ignore_index": -100, "media_placeholder_token_id": 155, "model_type": "kimi_k25"},
    **{"pad_token_id": 3, "use_unified_vision_chunk": True, "tie_word_embeddings": False},
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
}


def rules(scaling: PaddedScaling) -> ImageRules:
    return ImageRules(token_id=1, cell=28, scaling=scaling, max_images=1)


def test_the_published_config(tmp_path):
    text = {**_CONFIG, "quantization_config": _THINKING}
    config = {**_WHOLE, "text_config": text, "vision_config": _VISION}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(str(tmp_path))
    assert isinstance(found.spec, DecoderSpec)
    assert found.spec.naming == "whole/deepseek_ranked"
    assert found.quantization_config == _THINKING
    assert found.vision is not None, found.vision_unsupported_reason
    assert found.vision.rules.token_id == 155
    assert found.vision.spec.num_layers == 27
    assert found.vision.spec.position_grid_size == 64
    assert found.vision.rules.scaling == padded_scaling(14, 2, 16_384, 512)
    KimiProcessor(max_patches=900, max_side=40).save_pretrained(tmp_path)
    found = read_config(str(tmp_path))
    assert found.vision is not None, found.vision_unsupported_reason
    assert found.vision.rules.scaling == padded_scaling(14, 2, 900, 40)


@pytest.mark.parametrize(
    ("vision", "reason"),
    [
        ({"merge_type": "sd2"}, "'merge_type' is 'sd2'; only 'sd2_tpool' is supported"),
        ({"init_pos_emb_width": 32}, "of 64 differs from the width of 32"),
        ({"merge_kernel_size": [2, 4]}, "'merge_kernel_size' must be a square"),
        ({"mm_hidden_size": 1024}, "'mm_hidden_size' is 1024; only 1152 is supported"),
        ({"norm_type": "rmsnorm"}, "unsupported keys: 'norm_type'"),
    ],
)
def test_images_that_are_not_served_leave_the_text(tmp_path, vision, reason):
    config = {**_WHOLE, "text_config": _CONFIG, "vision_config": {**_VISION, **vision}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(str(tmp_path))
    assert found.vision is None
    assert reason in str(found.vision_unsupported_reason)


def test_hugging_face_reads_the_published_names(tmp_path):
    """That is, the checkpoint with which encoders are compared is in the published layout."""
    model = tiny_vision.save("kimi_k25", tmp_path)
    read = transformers.Kimi_K25ForConditionalGeneration.from_pretrained(tmp_path)
    wanted = model.state_dict()
    found = read.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([(16_384, 512), (64, 512), (64, 6), (900, 40)]))
def test_sizes_are_navit_resizes(height, width, limits):
    found = scaled_size(height, width, rules(padded_scaling(14, 2, *limits)))
    if height * width < 10**6:
        pixels = np.broadcast_to(np.uint8(0), (height, width, 3))
        assert KimiProcessor(*limits).pixels(pixels).shape[:2] == found


@settings(deadline=None)
@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 4096), st.integers(1, 600))
def test_no_image_has_more_cells_than_the_bound(height, width, max_patches, max_side):
    scaling = padded_scaling(14, 2, max_patches, max_side)
    found = scaled_size(height, width, rules(PaddedScaling(14, max_patches, max_side, 10**9)))
    assert found[0] * found[1] // 28**2 <= scaling.max_cells
    few = scaled_size(height, width, rules(PaddedScaling(14, max_patches, max_side, 5)))
    assert few[0] * few[1] // 28**2 <= 5


@pytest.mark.parametrize("shape", [(28, 56), (60, 90), (301, 45), (1, 1)])
def test_pixels_are_completed_with_black(shape):
    pixels = np.random.default_rng(0).integers(1, 256, (*shape, 3), np.uint8)
    wanted = KimiProcessor(max_patches=64).pixels(pixels)
    found = process_image(Image.fromarray(pixels), rules(padded_scaling(14, 2, 64, 512)))
    assert found.pixels == wanted.tobytes()
    assert (found.height, found.width) == wanted.shape[:2]
