"""Draft heads: their scores equal those of plain twins; misfits are rejected."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import SpeculationConfig
from engine.core import EngineCore
from engine.errors import ModelLoadError
from engine.speculation.draft_model import DraftModel
from engine.types import Request, SamplingParams
from tests import tiny_draft_heads, tiny_models
from tests.engine.quantization import stored
from tests.engine.runner.test_speculation import PROMPTS, config_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
KINDS = ("mtp", "eagle", "eagle3")


QWENS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_SLOW = ("glm4_moe", "qwen3_next", "qwen3_5_moe_text")  # as those of mtp and qwen3_5_text
MODELS = [
    pytest.param(kind, marks=pytest.mark.slow if kind in _SLOW else ())
    for kind in (*KINDS, "glm4_moe", "deepseek_v32", *QWENS)
]


@pytest.fixture(scope="module", params=MODELS)
def twin(request):
    if request.param in ("mtp", "glm4_moe", "deepseek_v32"):
        model = "deepseek_v3" if request.param == "mtp" else request.param
        return tiny_draft_heads.build("mtp", tiny_draft_heads.build_mtp(model))
    if request.param in QWENS:
        return tiny_draft_heads.build("qwen_mtp", tiny_models.build(request.param))
    return tiny_draft_heads.build(request.param, tiny_models.build("llama"))


def saved(twin, directory) -> tuple[str, SpeculationConfig]:
    """The model's directory, and its speculation config."""
    if twin.kind.endswith("mtp"):
        return str(twin.save(directory)), SpeculationConfig(method="mtp", adaptive=False)
    model = tiny_models.save("llama", directory / "model")
    head = str(twin.save(directory / "head"))
    return str(model), SpeculationConfig(method="eagle", draft_model=head, adaptive=False)


def generate(core: EngineCore, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """All texts, including prompts."""
    texts = {name: list(prompt) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        core.add(Request(id=name, prompt_token_ids=tuple(prompt), sampling=GREEDY))
    while core.has_work:
        output = core.step()
        assert not output.errors
        for name, tokens in zip(output.ids, output.token_ids, strict=True):
            texts[name] += tokens
    return texts


@pytest.mark.parametrize("schedule", [{}, {"max_num_batched_tokens": 7}], ids=["whole", "chunks"])
def test_scores_are_those_of_the_twin(twin, schedule, tmp_path, monkeypatch):
    """For every draft of every chain: after prompts, accepted drafts, and a cached prefix."""
    model, speculation = saved(twin, tmp_path)
    chains: list[list[tuple[list[int], torch.Tensor]]] = []
    guess, choose = DraftModel.propose, DraftModel._choose

    def noted_guess(self, plan):
        chains.append([])
        return guess(self, plan)

    def noted_choose(self, logits, host_slots, slots, positions):
        chains[-1].append((positions.tolist(), logits.clone()))
        return choose(self, logits, host_slots, slots, positions)

    monkeypatch.setattr(DraftModel, "propose", noted_guess)
    monkeypatch.setattr(DraftModel, "_choose", noted_choose)
    core = EngineCore.load(config_of(model, speculation, **schedule))
    first = generate(core, {"a": PROMPTS[1]})["a"]
    second = generate(core, {"b": [*first[:30], 7, 8, 9]})["b"]
    assert core.stats.prefix_cache_hits > 0
    num_compared = 0
    texts = iter([first, second])
    text, last = next(texts), 0
    for chain in filter(None, chains):
        begin = chain[0][0][0]  # the position of the first draft
        if begin < last:
            text = next(texts)
        last = begin
        expected = twin.chain(text[:begin], len(chain))
        for (_, logits), wanted in zip(chain, expected, strict=True):
            # EAGLE's first head has no final norm: its scores are large.
            size = wanted[wanted.isfinite()].abs().max().clamp(min=1.0)
            # Hugging Face processes a delta rule's tokens in chunks, with other rounding.
            near = 5e-4 if twin.kind == "qwen_mtp" else 1e-4
            torch.testing.assert_close(logits[0] / size, wanted / size, atol=near, rtol=0.0)
            num_compared += 1
    assert num_compared > 60


def test_what_is_not_there_is_told(tmp_path):
    llama = str(tiny_models.save("llama", tmp_path / "model"))
    with pytest.raises(ModelLoadError, match="num_nextn_predict_layers"):
        EngineCore.load(config_of(llama, SpeculationConfig(method="mtp")))
    with pytest.raises(ModelLoadError, match="needs draft_model"):
        EngineCore.load(config_of(llama, SpeculationConfig(method="eagle")))
    qwen = str(tiny_models.save("qwen3_5_text", tmp_path / "qwen"))
    with pytest.raises(ModelLoadError, match=r"missing tensor 'mtp\.fc\.weight'"):
        EngineCore.load(config_of(qwen, SpeculationConfig(method="mtp")))
    missing = SpeculationConfig(method="eagle", draft_model=str(tmp_path / "nothing"))
    with pytest.raises(ModelLoadError, match=r"nothing/config\.json: missing"):
        EngineCore.load(config_of(llama, missing))


def _without(*names: str) -> dict[str, torch.Tensor | None]:
    return dict.fromkeys(names)


# kind -> changes to config.json and to tensors (None: removed), and the error
BAD_HEADS: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor | None], str]] = {
    "no fc": ("eagle", {}, _without("fc.weight"), r"missing tensors \(1\): 'fc\.weight'"),
    "no query": (
        *("eagle3", {}, _without("midlayer.self_attn.q_proj.weight")),
        r"missing tensors \(1\): 'layers\.0\.self_attn\.q_proj\.weight'",
    ),
    "no scores": ("eagle3", {}, _without("lm_head.weight"), "missing tensor 'lm_head.weight'"),
    "no map": ("eagle3", {}, _without("d2t"), "missing tensor 'd2t'"),
    "a map of others": (
        *("eagle3", {}, {"d2t": torch.full((tiny_draft_heads.NUM_SCORED,), 100)}),
        "names tokens twice, or that the model has not",
    ),
    "a short map": ("eagle3", {}, {"d2t": torch.zeros(3).long()}, "'d2t' must be 140 integers"),
    "other tokens": ("eagle", {"vocab_size": 150}, {}, "'vocab_size' is 150, the model's is 160"),
    "more scores": ("eagle3", {"draft_vocab_size": 161}, {}, "exceeds the 160 tokens"),
    "another size": ("eagle", {"hidden_size": 96}, {}, "'hidden_size' is 96, the model's is 48"),
    "another model's": (
        *("eagle3", {"target_hidden_size": 96}, {}),
        "'target_hidden_size' is 96, the model's hidden size 48",
    ),
    "a size without embeddings": (
        *("eagle3", {"hidden_size": 96}, {}),
        r"missing tensor 'embed_tokens\.weight'.* is 96, the model's 48",
    ),
    "two layers": ("eagle", {"num_hidden_layers": 2}, {}, "is not an EAGLE head"),
    "other layers": (
        *("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, {}),
        "must name some of the model's 3 layers",
    ),
    "a tensor too many": (
        "eagle",
        {},
        {"more.weight": torch.zeros(1)},
        "'more.weight' has no place",
    ),
    "other shapes": ("eagle3", {}, {"fc.weight": torch.zeros(48, 96)}, r"has shape \[48, 96\]"),
}


@pytest.mark.parametrize("bad", BAD_HEADS)
def test_a_head_that_does_not_fit_is_refused_in_a_line(bad, tmp_path):
    kind, config, changes, told = BAD_HEADS[bad]
    model = str(tiny_models.save("llama", tmp_path / "model"))
    head = tiny_draft_heads.build(kind, tiny_models.build("llama")).save(tmp_path / "head")
    tiny_models.edit_config(head, **config)
    tensors = load_file(head / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, head / "model.safetensors")
    speculation = SpeculationConfig(method="eagle", draft_model=str(head))
    with pytest.raises(ModelLoadError, match=told) as error:
        EngineCore.load(config_of(model, speculation))
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_an_mtp_layer_that_lacks_a_tensor_is_refused(tmp_path):
    twin = tiny_draft_heads.build("mtp", tiny_draft_heads.build_mtp("deepseek_v3"))
    model, speculation = saved(twin, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.hnorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"missing.*model\.layers\.3\.hnorm\.weight"):
        EngineCore.load(config_of(model, speculation))
    EngineCore.load(config_of(model, None))  # without a head it is not read


def test_an_mtp_layer_in_codes_guesses_as_what_they_stand_for(tmp_path, monkeypatch):
    """In fp8 blocks beside its model, as DeepSeek-V3 is published, with a dense ``eh_proj``."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)  # it would round more
    twin = tiny_draft_heads.build("mtp", tiny_draft_heads.build_mtp("deepseek_v3"))
    dense, codes = tmp_path / "dense", tmp_path / "codes"
    _, speculation = saved(twin, dense)
    meant, written = load_file(dense / "model.safetensors"), {}
    for name, tensor in list(meant.items()):
        is_dense = any(
            word in name for word in ("norm", "embed", "lm_head", "mlp.gate.", "eh_proj")
        )
        if tensor.ndim != 2 or is_dense:
            written[name] = tensor
            continue
        parts, value = stored.float8(tensor, form="block", name=".weight_scale_inv", block=(24, 40))
        written |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        meant[name] = value.float()
    shutil.copytree(dense, codes)
    save_file(meant, dense / "model.safetensors", {"format": "pt"})
    save_file(written, codes / "model.safetensors", {"format": "pt"})
    fp8 = {"quant_method": "fp8", "weight_block_size": [24, 40], "activation_scheme": "dynamic"}
    tiny_models.edit_config(codes, quantization_config=fp8)
    told: list[list[Any]] = []
    guess = DraftModel.propose

    def noted(self, plan):
        rows, proposed = guess(self, plan)
        told[-1].append([row.token_ids for row in rows])
        return rows, proposed

    monkeypatch.setattr(DraftModel, "propose", noted)
    for directory in (dense, codes):
        told.append([])
        generate(EngineCore.load(config_of(str(directory), speculation)), {"a": PROMPTS[0]})
    assert told[0] == told[1]
    assert len(told[0]) > 10
