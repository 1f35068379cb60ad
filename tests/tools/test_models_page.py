"""docs/models.md is up to date with the code."""

from __future__ import annotations

from engine.models.families import FAMILIES, MODULES
from tests import tiny_audio, tiny_models, tiny_vision
from tests.engine.models.test_omni import KINDS as SPEAKING
from tests.engine.models.test_text_parts import PUBLISHED
from tools.models import PAGE, models_page


def test_the_page_is_made_from_the_code() -> None:
    assert PAGE.read_text("utf-8") == models_page(), "run python -m tools.models"


def test_no_two_modules_read_the_same_family() -> None:
    assert sum(len(module.FAMILIES) for module in MODULES) == len(FAMILIES)


def test_every_family_has_a_twin() -> None:
    """The page's claims about all families are tested for each of them in tests/engine/models."""
    import transformers

    twins = {getattr(transformers, name).model_type for name, _ in tiny_models.KINDS.values()}
    beside_images = {
        getattr(transformers, f"{name}Config").model_type
        for name, *_ in (*PUBLISHED.values(), *tiny_vision.KINDS.values())
    }
    hearing = {
        getattr(transformers, f"{name}Config").model_type for name, *_ in tiny_audio.KINDS.values()
    }
    # There; tests/engine/models/test_kimi.py has the first one's twin. The second one's is that
    # which has its text model's name. The third one's, in test_gemma3n.py, is its text model.
    nameless = {"kimi_k2", "step3p7", "gemma3n", "muse_glimmer"}
    # tests/engine/models/test_nemotron_omni.py
    published = {"NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "nemotron_h_omni"}
    transcribing = {"whisper"}  # tests/engine/models/audio/test_whisper.py
    known = twins | beside_images | hearing | nameless | published | transcribing | set(SPEAKING)
    assert known == set(FAMILIES)
