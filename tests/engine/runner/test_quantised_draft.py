"""A quantised draft checkpoint is read in its own format, whatever the target's quantisation."""

from __future__ import annotations

import pytest

from engine.config import SpeculationConfig
from engine.errors import ModelLoadError
from tests import tiny_models
from tests.engine.runner.test_speculation import GREEDY, config_of, generate, requests_of
from tests.tools.test_quantize_model import recipe, windows
from tools.quantize.run import Job, quantise


@pytest.fixture(scope="module")
def model_and_draft(tmp_path_factory):
    root = tmp_path_factory.mktemp("draft")
    model = tiny_models.save("llama", root / "model")
    quantise(Job(model, root / "draft", recipe(scheme="int8", algorithm="rtn")), windows())
    return model, root / "draft"


def speculation(draft) -> SpeculationConfig:
    return SpeculationConfig(method="draft", draft_model=str(draft), adaptive=False)


def test_it_drafts_as_the_model_would_but_for_its_rounding(model_and_draft):
    model, draft = model_and_draft
    expected, _, _ = generate(config_of(str(model), None), requests_of(**GREEDY))
    texts, _, core = generate(config_of(str(model), speculation(draft)), requests_of(**GREEDY))
    assert texts == expected
    drafts = core.stats.drafts
    assert drafts.num_accepted_tokens > 0.8 * drafts.num_draft_tokens > 0


def test_a_draft_stored_in_no_known_way_is_refused_before_anything_loads(model_and_draft, tmp_path):
    model, _ = model_and_draft
    draft = tiny_models.save("llama", tmp_path / "draft")
    tiny_models.edit_config(draft, quantization_config={"quant_method": "hqq"})
    with pytest.raises(ModelLoadError, match="quantisation 'hqq' is not supported") as refusal:
        generate(config_of(str(model), speculation(draft)), [])
    assert str(draft) in str(refusal.value)
