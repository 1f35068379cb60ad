"""Logits equal Hugging Face's, for every family and RoPE variant, through the paged cache."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from engine.models import names, weights
from engine.models.families.alibi import slopes
from engine.models.rope_spec import RopeSpec
from engine.models.small_batch import SmallBatchLayer
from engine.models.spec import ClampedSwiglu, DecoderSpec, LayerSpec, NormSpec, TemperatureSpec
from engine.quantization import selection
from engine.runner import load as load_module
from engine.runner import weight_files
from engine.types import SamplingParams
from kernels.cpu import linear
from kernels.cpu.experts import PanelExperts
from kernels.reference.skinny import skinny_linear
from tests import tiny_models
from tests.engine.handmade import Hand, load, request
from tests.tiny_hybrids import HYBRIDS

NUM_TOKENS = 50
CHUNKS = (13, 1, 20, 16)  # with blocks of 4, chunks begin and end within blocks


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """kind -> (directory, Hugging Face's logits for the test's prompt), created on demand."""
    made = {}

    def get(kind):
        if kind not in made:
            model = tiny_models.build(kind)
            with torch.no_grad():
                logits = model(torch.tensor([prompt()])).logits[0]
            directory = tmp_path_factory.mktemp(kind)
            model.save_pretrained(directory)
            made[kind] = directory, logits
        return made[kind]

    return get


def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 160, (NUM_TOKENS,), generator=generator).tolist()


def paged_logits(directory, tokens=None, chunks=CHUNKS, **changes) -> torch.Tensor:
    """[tokens, vocab] from our runner, in chunks."""
    runner = load(directory, **changes)
    model, hidden = runner._model, []
    forward = model.forward
    model.forward = lambda *arguments: hidden.append(forward(*arguments)) or hidden[-1]
    hand = Hand(runner)
    # With prompt_logprobs, every position is computed to the end.
    hand.add(request("a", tokens or prompt(), SamplingParams(prompt_logprobs=0)))
    for count in chunks:
        hand.step({"a": count})
    with torch.inference_mode():
        return model.logits(torch.cat(hidden))


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_logits_equal_hugging_face(checkpoints, kind):
    directory, expected = checkpoints(kind)
    # Hugging Face sums the delta rule in chunks, with an error as large as all others together.
    atol = 2e-4 if kind in HYBRIDS else 1e-4
    torch.testing.assert_close(paged_logits(directory), expected, atol=atol, rtol=0)


# Families with a norm before attention and before MLP or experts, and none after them.
FEW_TOKENS = {
    *("llama", "llama_mha", "llama_mqa", "llama_bias", "llama_linear", "llama_dynamic"),
    *("llama_llama3", "llama_yarn", "llama_longrope", "smollm", "smollm3", "mistral"),
    *("mistral_full", "ministral", "ministral3", "qwen2", "qwen2_window", "qwen3", "gemma", "phi3"),
    *("phi4_mini", "glm", "ernie4_5", "seed_oss", "internlm3", "iquestcoder", "helium"),
    "hunyuan_dense",
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2_lite", "deepseek_v2", "deepseek_v3"),
    *("deepseek_v3_halves", "glm4_moe", "glm4_moe_lite", "solar_open", "dots1", "minimax_m2"),
    *("laguna", "laguna_by_number"),
    *("ernie4_5_moe", "olmoe", "granitemoe", "hunyuan_moe", "cwm", "exaone_moe", "hy_v3"),
    "mimo_v2_flash",
    *("flint", "mellum", "mistral4", "vaultgemma", "youtu", "granite_swa", "granitemoe_swa"),
}


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_steps_of_few_tokens_take_norms_and_sums_along(checkpoints, monkeypatch, kind):
    """With a GPU's layers; tests/kernels compares the kernel's reference with the kernel."""
    skinny = pytest.importorskip("engine.quantization.skinny")
    monkeypatch.setattr(skinny, "skinny_linear", skinny_linear)
    monkeypatch.setattr(skinny.SkinnyLinear, "max_fused_rows", 4)  # as beside experts
    monkeypatch.setattr(selection, "UnquantizedLinearMethod", skinny.SkinnyMethod)
    stacked = functools.partial(load_module.make_modules, stacked=True)
    monkeypatch.setattr(load_module, "make_modules", lambda *args, **_: stacked(*args))
    ran = []
    finish = SmallBatchLayer.finish
    monkeypatch.setattr(
        SmallBatchLayer, "finish", lambda *args: ran.append(len(args[1])) or finish(*args)
    )
    directory, expected = checkpoints(kind)
    logits = paged_logits(directory, chunks=(13, 1, 2, 20, 3, 4, 7))
    atol = 2e-4 if kind in HYBRIDS else 1e-4
    torch.testing.assert_close(logits, expected, atol=atol, rtol=0)
    assert set(ran) == ({1, 2, 3, 4} if kind in FEW_TOKENS else set())


@pytest.mark.parametrize(
    "kind",
    [
        *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4"),
        *("ernie4_5_moe", "granitemoeshared", "minimax_m2", "nemotron_h_moe", "nemotron_h_latent"),
        *("cohere2_moe", "kolibri1", "step3p7", "longcat_flash"),
    ],
)
def test_experts_as_one_grouped_product(checkpoints, monkeypatch, kind):
    """As a GPU computes them; tests/kernels compares the kernel's reference with the kernel."""
    directory, expected = checkpoints(kind)
    stacked = functools.partial(load_module.make_modules, stacked=True)
    monkeypatch.setattr(load_module, "make_modules", lambda *args, **_: stacked(*args))
    atol = 2e-4 if kind in HYBRIDS else 1e-4
    torch.testing.assert_close(paged_logits(directory), expected, atol=atol, rtol=0)


@pytest.mark.skipif(not linear.is_available(), reason="no panels here")
@pytest.mark.parametrize(
    "kind",
    [
        *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4"),
        *("nemotron_h_moe", "longcat_flash"),
    ],
)
def test_experts_in_one_call_are_as_near_as_one_by_one(checkpoints, monkeypatch, kind):
    """In bfloat16, whose rounding sends some tokens to other experts either way."""
    directory, expected = checkpoints(kind)

    def error() -> float:
        logits = paged_logits(directory, dtype="bfloat16")
        return float((logits - expected).norm(dim=1).median() / expected.norm(dim=1).median())

    joined = error()
    monkeypatch.setattr(PanelExperts, "join", lambda *_, **__: None)
    assert joined < 1.2 * error() < 0.2


def test_quantised_experts_are_near(checkpoints):
    directory, expected = checkpoints("qwen2_moe")
    error = (paged_logits(directory, quantization="int8") - expected).norm() / expected.norm()
    assert error < 0.15


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_near(checkpoints, dtype):
    directory, expected = checkpoints("llama_bias")
    logits = paged_logits(directory, dtype=dtype)
    error = (logits - expected).norm() / expected.norm()
    assert error < (0.045 if dtype == "bfloat16" else 0.006)


@pytest.mark.parametrize(("served", "chunks"), [(32, (11, 9)), (128, CHUNKS)])
def test_longrope_takes_the_set_for_the_context_served(checkpoints, served, chunks):
    """Hugging Face decides by the length of the batch; here it is the longest context served."""
    directory, _ = checkpoints("llama_longrope")
    tokens = prompt()[: sum(chunks)]
    with torch.no_grad():
        expected = tiny_models.build("llama_longrope")(torch.tensor([tokens])).logits[0]
    actual = paged_logits(directory, tokens, chunks, max_model_len=served)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_longrope_with_its_own_factors_of_scores(tmp_path):
    """Phi-3.5-MoE beyond the original context. Hugging Face's code takes the short set there too,
    unlike the code that the model was published with, so it is given the long one."""
    changes = tiny_models.KINDS["phimoe"][1]["rope_parameters"]
    changes = {**changes, "original_max_position_embeddings": 32}
    model = tiny_models.build("phimoe", rope_parameters=changes)
    model.save_pretrained(tmp_path)
    init = model.model.rotary_emb.rope_init_fn
    model.model.rotary_emb.rope_init_fn = functools.partial(init, seq_len=NUM_TOKENS)
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


def test_dynamic_rope_beyond_the_trained_context(tmp_path):
    """The base of the served length; Hugging Face agrees for a sequence of that length."""
    model = tiny_models.build("llama_dynamic", max_position_embeddings=30)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    assert load(tmp_path).info.max_model_len == 30
    actual = paged_logits(tmp_path, max_model_len=NUM_TOKENS)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


# ------------------------------------------------- planted bugs


def _spec_with(**changes):
    def mutate(spec: DecoderSpec) -> DecoderSpec:
        return dataclasses.replace(spec, **changes)

    return mutate


def _moe_with(**changes):
    def mutate(spec: DecoderSpec) -> DecoderSpec:
        assert spec.moe is not None
        return dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, **changes))

    return mutate


def _indexer_with(**changes):
    def mutate(spec: DecoderSpec) -> DecoderSpec:
        assert spec.latent is not None
        assert spec.latent.indexer is not None
        indexer = dataclasses.replace(spec.latent.indexer, **changes)
        latent = dataclasses.replace(spec.latent, indexer=indexer)
        return dataclasses.replace(spec, latent=latent)

    return mutate


def _each_layer(**changes):
    def mutate(spec: DecoderSpec) -> DecoderSpec:
        layers = tuple(dataclasses.replace(layer, **changes) for layer in spec.layers)
        return dataclasses.replace(spec, layers=layers)

    return mutate


MUTANTS = {
    "rope base": ("llama", _spec_with(rope=RopeSpec(20_000.0))),
    "rope scaling dropped": ("llama_llama3", _spec_with(rope=RopeSpec(10_000.0))),
    "norm epsilon": ("llama", _spec_with(norm=NormSpec(1e-2))),
    "window off": ("mistral", _spec_with(layers=(LayerSpec(),) * 3)),
    "window off by one": ("mistral", _spec_with(layers=(LayerSpec(window=21),) * 3)),
    "window in all layers": ("qwen2_window", _spec_with(layers=(LayerSpec(window=12),) * 3)),
    "rope in all layers": ("smollm3", _spec_with(layers=(LayerSpec(),) * 3)),
    "rope in full layers": (
        "cohere2",
        _spec_with(layers=(LayerSpec(12), LayerSpec(), LayerSpec(12))),
    ),
    "one rope for all layers": ("gemma3", _spec_with(local_rope=RopeSpec(100_000.0))),
    "rope by halves": ("cohere", _spec_with(rope=RopeSpec(10_000.0))),
    "rope on the whole head": ("gpt_neox", _spec_with(rope=RopeSpec(10_000.0))),
    "mean not taken off": ("cohere", _spec_with(norm=NormSpec(1e-4))),
    "norms stored less one": ("gemma", _spec_with(norm=NormSpec(1e-5))),
    "embeddings not scaled": ("gemma", _spec_with(embedding_scale=1.0)),
    "another gelu": ("gemma", _spec_with(activation="silu")),
    "scores not capped": ("gemma2", _spec_with(attention_softcap=None)),
    "logits not capped": ("gemma2", _spec_with(logit_softcap=None)),
    "score scale": ("gemma2", _spec_with(attention_scale=None)),
    "residual scale": ("granite", _spec_with(residual_scale=1.0)),
    "logit scale": ("granite", _spec_with(logit_scale=1.0)),
    "experts' shares not normalised": ("qwen3_moe", _moe_with(normalised=False)),
    "experts' shares normalised": ("qwen2_moe", _moe_with(normalised=True)),
    "an expert fewer": ("mixtral", _moe_with(top_k=1)),
    "swiglu unclamped": ("gpt_oss", _spec_with(activation=ClampedSwiglu(1.702, 1e9))),
    "swiglu's other alpha": ("gpt_oss", _spec_with(activation=ClampedSwiglu(1.0, 1.5))),
    "window in even layers": (
        "gpt_oss",
        _spec_with(layers=tuple(LayerSpec(window, experts=True) for window in (None, 12, None))),
    ),
    "rope of latents by halves": ("deepseek_v2", _spec_with(rope=RopeSpec(10_000.0))),
    "rope of latents by pairs": (
        "deepseek_v3_halves",
        _spec_with(rope=RopeSpec(10_000.0, interleaved=True)),
    ),
    "no temperature of yarn": ("deepseek_v3", _spec_with(attention_scale=18**-0.5)),
    "experts of all groups": ("deepseek_v2", _moe_with(num_groups=1)),
    "more groups": ("deepseek_v3", _moe_with(top_groups=3)),
    "groups by their best": ("deepseek_v3", _moe_with(group_best=1)),
    "experts' shares not scaled": ("deepseek_v3", _moe_with(scale=1.0)),
    "experts by softmax": ("deepseek_v3", _moe_with(scoring="softmax")),
    "sums of experts normalised": ("deepseek_v3_halves", _moe_with(normalised=True)),
    "experts not normed": ("axk1", _each_layer(mlp_output_norm=False)),
    "latents not scaled": (
        "longcat_flash",
        lambda spec: _spec_with(latent=dataclasses.replace(spec.latent, scale=1.0))(spec),
    ),
    "queries not scaled": ("longcat_flash", _spec_with(attention_scale=18**-0.5)),
    "nothing returned as it is": ("longcat_flash", _moe_with(identity_scale=0.0)),
    "norms of outputs like the others": (
        "muse_glimmer",
        lambda spec: _spec_with(norm=dataclasses.replace(spec.norm, output_eps=None))(spec),
    ),
    "final norm stored less one": (
        "muse_glimmer",
        lambda spec: _spec_with(norm=dataclasses.replace(spec.norm, final_offset=None))(spec),
    ),
    "heads without rope not normed": (
        "muse_glimmer",
        _spec_with(unit_qk_norm_without_rope=False),
    ),
    "muse's logits not scaled": ("muse_glimmer", _spec_with(logit_scale=1.0)),
    "all positions": ("deepseek_v32", _indexer_with(top_k=NUM_TOKENS)),
    "a position fewer": ("deepseek_v32", _indexer_with(top_k=11)),
    "index rope by pairs": ("deepseek_v32", _indexer_with(interleaved=True)),
    "index rope by halves": ("glm_moe_dsa", _indexer_with(interleaved=False)),
    "no chunks": ("llama4", _each_layer(chunk=None)),
    "other chunks": ("llama4", _each_layer(chunk=20)),
    "chunks in all layers": ("llama4_plain", _each_layer(chunk=32)),
    "one temperature": ("llama4", _spec_with(temperature=None)),
    "temperature a token late": (
        "llama4",
        _spec_with(temperature=TemperatureSpec(0.5, 9)),
    ),
    "heads not normed": ("llama4", _spec_with(unit_qk_norm=False)),
    "experts weighed behind": ("llama4", _moe_with(apply_router_weight_on_input=False)),
    "rope by halves of a part": ("glm4", _spec_with(rope=RopeSpec(10_000.0, None, 8))),
    "rope in all exaone's layers": ("exaone4", _each_layer(rope=True)),
    "scaled rope in windows": ("olmo3", _each_layer(local_rope=False)),
    "experts of a sigmoid by softmax": ("minimax_m2", _moe_with(scoring="softmax")),
    "queries do not grow": ("ministral3", _spec_with(temperature=None)),
    "queries grow a token early": (
        "ministral3",
        _spec_with(temperature=TemperatureSpec(0.5, 16, with_rope=True)),
    ),
    "norms before rope": ("hunyuan_dense", _spec_with(qk_norm_after_rope=False)),
    "relu not squared": ("arcee", _spec_with(activation="relu")),
    "layer norms stored whole": ("nemotron", _spec_with(norm=NormSpec(1e-4, "layer", bias=True))),
    "experts as far as any": ("phimoe", _moe_with(margin=1e9)),
    "experts of the first alone": ("phimoe_window", _moe_with(scoring="softmax")),
    "rope by halves of a part of gpt-j": ("gptj", _spec_with(rope=RopeSpec(10_000.0, None, 4))),
    "distances do not count": ("bloom", _spec_with(alibi_slopes=(0.0,) * 6)),
    "slopes to another end": ("mpt", _spec_with(alibi_slopes=slopes(6, 16.0))),
    "slopes of twice as many heads": ("mpt", _spec_with(alibi_slopes=slopes(12)[:6])),
    "scores scaled": ("gpt_neo", _spec_with(attention_scale=None)),
    "window in no layer of gpt-neo": ("gpt_neo", _each_layer(window=None)),
    "one rope for all of mimo's layers": ("mimo_v2_flash", _each_layer(local_rope=False)),
    "values not scaled": ("mimo_v2_flash", _spec_with(value_scale=1.0)),
    "latents with rope": ("kimi_linear", _spec_with(rope=RopeSpec(10_000.0))),
    "values not clipped": ("olmo", _spec_with(qkv_clip=None)),
    "rope counter-clockwise": ("nanochat", _spec_with(rope=RopeSpec(10_000.0))),
    "chosen by sigmoids": ("kolibri1", _moe_with(scoring="sigmoid")),
    "experts and shared ones added": ("cohere2_moe", _moe_with(scale=1.0, shared_scale=1.0)),
    "no rope in dense layers": ("cohere2_moe", _each_layer(rope=False)),
    "gates by sigmoids": ("laguna", _spec_with(gate_kind="sigmoid")),
    "one rope for all of laguna's layers": ("laguna", _each_layer(local_rope=False)),
    "experts not clamped": ("step3p7", _each_layer(expert_gate_limit=None)),
    "mlps not clamped": ("step3p7", _each_layer(gate_limit=None)),
    "in turn instead of parallel": ("gpt_neox", _spec_with(placement="pre")),
    "parallel instead of in turn": ("gpt_neox_serial", _spec_with(placement="parallel")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_parity_catches_a_wrong_spec(checkpoints, monkeypatch, name):
    kind, mutate = MUTANTS[name]
    directory, expected = checkpoints(kind)
    read = load_module.read_config

    def mutated(model):
        config = read(model)
        return dataclasses.replace(config, spec=mutate(config.spec))

    monkeypatch.setattr(load_module, "read_config", mutated)
    assert (paged_logits(directory) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("qwen2", "self_attn.k_proj.bias"),
        ("llama_bias", "self_attn.o_proj.bias"),
        ("llama_bias", "mlp.up_proj.bias"),
        ("qwen3", "self_attn.q_norm.weight"),
        ("qwen3", "self_attn.k_norm.weight"),
        ("cohere_qk", "self_attn.q_norm.weight"),
        ("cohere_qk", "self_attn.k_norm.weight"),
        ("apertus", "mlp.act_fn.alpha_p"),
        ("apertus", "mlp.act_fn.alpha_n"),
        ("apertus", "mlp.act_fn.beta"),
        ("kimi_linear", "self_attn.dt_bias"),
        ("bailing_hybrid", "attention.f_proj.weight"),
        ("bailing_hybrid", "attention.g_proj.weight"),
        ("laguna", "self_attn.g_proj.weight"),
        ("kolibri1", "moe.router.expert_bias"),
        ("step3p7", "share_expert.down_proj.weight"),
        ("kimi_linear", "self_attn.f_b_proj.weight"),
        ("kimi_linear", "self_attn.g_b_proj.weight"),
        ("jamba", "mamba.dt_layernorm.weight"),
        ("jamba", "mamba.c_layernorm.weight"),
        ("jamba", "mamba.dt_proj.bias"),
        ("mamba", "mixer.D"),
        ("olmo2", "self_attn.q_norm.weight"),
        ("olmo2", "post_feedforward_layernorm.weight"),
        ("gemma2", "pre_feedforward_layernorm.weight"),
        ("gemma2", "post_attention_layernorm.weight"),
        ("qwen2_moe", "shared_expert_gate.weight"),
        ("qwen2_moe", "shared_expert.down_proj.weight"),
        ("mixtral", "block_sparse_moe.gate.weight"),
        ("gpt_oss", "self_attn.sinks"),
        ("mimo_v2_flash", "self_attn.sinks"),
        ("gpt_oss", "self_attn.o_proj.bias"),
        ("gpt_oss", "mlp.router.bias"),
        ("gpt_oss", "mlp.experts.gate_up_proj_bias"),
        ("gpt_oss", "mlp.experts.down_proj_bias"),
        ("deepseek_v2", "self_attn.q_a_layernorm.weight"),
        ("deepseek_v2", "self_attn.q_a_proj.bias"),
        ("deepseek_v2", "self_attn.kv_a_proj_with_mqa.bias"),
        ("deepseek_v2", "self_attn.kv_a_layernorm.weight"),
        ("deepseek_v3", "self_attn.kv_b_proj.weight"),
        ("deepseek_v3", "mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "mlp.shared_experts.down_proj.weight"),
        ("axk1", "post_mlp_layernorm.weight"),
        ("axk1", "mlp.gate.e_score_correction_bias"),
        ("axk2", "input_layernorm.norm.weight"),
        ("axk2", "input_layernorm.W_down.weight"),
        ("axk2", "post_attention_layernorm.W_up.weight"),
        ("muse_glimmer", "self_attn.gate_proj.weight"),
        ("flint", "self_attn.softmax_offset"),
        ("flint", "mlp.shared_expert.down_proj.weight"),
        ("longcat_flash", "mlp.router.e_score_correction_bias"),
        ("longcat_flash", "mlp.experts.5.down_proj.weight"),
        ("longcat_flash", "mlps.1.up_proj.weight"),
        ("longcat_flash", "post_attention_layernorm.0.weight"),
        ("deepseek_v32", "indexer.k_norm.weight"),
        ("deepseek_v32", "indexer.k_norm.bias"),
        ("deepseek_v32", "indexer.weights_proj.weight"),
        ("falcon", "self_attention.query_key_value.bias"),
        ("falcon", "ln_f.bias"),
        ("falcon_groups", "ln_mlp.weight"),
        ("bloom", "word_embeddings_layernorm.bias"),
        ("stablelm", "input_layernorm.bias"),
        ("stablelm_heads", "q_layernorm.norms.5.weight"),
        ("stablelm_heads", "k_layernorm.norms.1.weight"),
        ("gpt2", "wpe.weight"),
        ("gpt2", "ln_f.bias"),
        ("gpt2", "attn.c_attn.bias"),
        ("gpt_neox", "attention.query_key_value.bias"),
        ("glm4", "post_self_attn_layernorm.weight"),
        ("glm4_moe", "self_attn.q_norm.weight"),
        ("ernie4_5_moe", "mlp.moe_statics.e_score_correction_bias"),
        ("minimax_m2", "self_attn.k_norm.weight"),
        ("granitemoeshared", "shared_mlp.output_linear.weight"),
        ("nemotron", "input_layernorm.bias"),
        ("phimoe", "lm_head.bias"),
        ("phi", "self_attn.dense.bias"),
        ("gpt_neo", "attn.attention.out_proj.bias"),
    ],
)
def test_parity_catches_a_weight_that_is_not_used(checkpoints, monkeypatch, kind, pattern):
    """The weight is loaded and then ignored, as by a decoder that forgot it."""
    directory, expected = checkpoints(kind)
    load_weights = weight_files.load_weights

    def forgetful(spec, *arguments):
        loaded = dict(load_weights(spec, *arguments))
        wanted = weights.parameters(spec)
        for name, target in weights.targets(spec, wanted).items():
            if name.endswith(pattern):
                parameter = wanted[target.parameter]
                part = loaded[target.parameter][parameter.rows(target.part)]
                part.fill_(1.0 if parameter.is_norm else 0.0)
        return loaded

    monkeypatch.setattr(weight_files, "load_weights", forgetful)
    assert (paged_logits(directory) - expected).abs().max() > 1e-3


def test_parity_catches_swapped_parts(checkpoints, monkeypatch):
    directory, expected = checkpoints("llama")
    swapped = tuple(
        rule._replace(part=1 - rule.part) if "gate_up" in rule.parameter else rule
        for rule in names.rules_of("llama")
    )
    monkeypatch.setattr(weights, "rules_of", lambda _architecture: swapped)
    assert (paged_logits(directory) - expected).abs().max() > 1e-3
