"""Whole models quantised.

They are compared with Hugging Face's models and read by the format's definition; runs are
interrupted and resumed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny_models
from tools.quantize.folds import apply_fold, folds_of
from tools.quantize.layer_runner import LayerRunner
from tools.quantize.layers import LayerQuantiser
from tools.quantize.recipe import QuantizeError, Recipe
from tools.quantize.report import REPORT
from tools.quantize.run import Job, quantise
from tools.quantize.sites import sites_of
from tools.quantize.source import Source
from tools.quantize.texts import Windows

WINDOW = 32
FAMILIES = [
    "llama_bias",
    "llama_mqa",
    "qwen3",
    "gemma2",
    "phi3",
    "olmo2",
    "granite",
    "stablelm_parallel",
    "cohere_qk",
    "gpt_neox",
    "mixtral",
    "deepseek_v3",
    "deepseek_v32",
    "qwen2_moe",
    "phimoe",
    "phi",
    "bloom",
    "axk1",
    "stablelm_heads",
]


def windows(num_calibration: int = 6, num_held_out: int = 3) -> Windows:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 160, (num_calibration + num_held_out, WINDOW), generator=generator)
    return Windows(tokens[:num_calibration], tokens[num_calibration:])


def recipe(**fields: Any) -> Recipe:
    return Recipe(**{"group_size": 8, **fields})


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes [n, count] of packed words, as compressed-tensors defines them."""
    shifts = torch.arange(0, 32, bits)
    codes = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(1)[:, :count] - 2 ** (bits - 1)


def dequantised(directory: Path) -> dict[str, torch.Tensor]:
    """The dequantised weights of a compressed-tensors checkpoint, read without our code."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
    stored = tensors_of(directory)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        scale = stored.get(f"{module}.weight_scale")
        if kind not in ("weight", "weight_packed"):
            if not kind.startswith("weight_"):
                found[name] = tensor
            continue
        if scale is None:
            found[name] = tensor
            continue
        codes = tensor
        if kind == "weight_packed":
            outputs, inputs = stored[f"{module}.weight_shape"].tolist()
            assert tensor.shape[0] == outputs
            codes = unpacked(tensor, bits, inputs)
        times = codes.shape[1] // scale.shape[1]
        zero = stored.get(f"{module}.weight_zero_point")
        value = codes.float()
        if zero is not None:
            zeros = unpacked(zero.T, bits, codes.shape[0]).T
            value = value - zeros.repeat_interleave(times, 1)
        found[f"{module}.weight"] = value * scale.float().repeat_interleave(times, 1)
    return found


def hf_perplexity(model: Any, tokens: torch.Tensor) -> float:
    with torch.inference_mode():
        logits = model(tokens).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return float(loss.exp())


def hf_of(kind: str, weights: dict[str, torch.Tensor], directory: Path) -> Any:
    """Hugging Face's model of these weights, saved as an unquantised checkpoint."""
    plain = directory / "plain"
    plain.mkdir()
    save_file(
        {n: t.contiguous() for n, t in weights.items()},
        plain / "model.safetensors",
        {"format": "pt"},
    )
    tiny_models.build(kind).config.save_pretrained(plain)
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("kind", FAMILIES)
def test_perplexities_are_those_of_hugging_face_before_and_after(kind: str, tmp_path: Path) -> None:
    """The layers one at a time equal the model, and what is written equals what was measured."""
    source = tiny_models.save(kind, tmp_path / "source")
    report = quantise(Job(source, tmp_path / "out", recipe(algorithm="awq+gptq")), windows())
    held_out = windows().held_out
    before = hf_perplexity(tiny_models.build(kind), held_out)
    assert report.perplexity_before == pytest.approx(before, rel=1e-3)
    after = hf_perplexity(hf_of(kind, dequantised(tmp_path / "out"), tmp_path), held_out)
    assert report.perplexity_after == pytest.approx(after, rel=1e-3)
    assert report.layers[-1]["stream_error"] > 1e-4  # it was rounded
    assert report.bytes_after < report.bytes_before


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"scheme": "int4", "symmetric": False}, "pack-quantized"),
        ({"scheme": "int8", "group_size": -1}, "pack-quantized"),
        ({"scheme": "int8", "symmetric": False, "algorithm": "rtn"}, "pack-quantized"),
    ],
)
def test_schemes_that_round_weights_alone_are_written_as_measured(
    fields: dict[str, Any], form: str, tmp_path: Path
) -> None:
    source = tiny_models.save("llama", tmp_path / "source")
    report = quantise(Job(source, tmp_path / "out", recipe(**fields)), windows())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == form
    model = hf_of("llama", dequantised(tmp_path / "out"), tmp_path)
    after = hf_perplexity(model, windows().held_out)
    assert report.perplexity_after == pytest.approx(after, rel=1e-3)


@pytest.mark.parametrize(("scheme", "dtype"), [("w8a8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_schemes_of_eight_bits_on_both_sides(
    scheme: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = tiny_models.save("llama", tmp_path / "source")
    asked = recipe(scheme=scheme, group_size=None)
    report = quantise(Job(source, tmp_path / "out", asked), windows())
    name = "model.layers.1.mlp.down_proj.weight"
    assert tensors_of(tmp_path / "out")[name].dtype == dtype
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    inputs = config["config_groups"]["group_0"]["input_activations"]
    assert (inputs["strategy"], inputs["dynamic"], inputs["num_bits"]) == ("token", True, 8)
    weights = dequantised(tmp_path / "out")
    original = tensors_of(source)[name]
    assert (weights[name] - original).norm() < 0.05 * original.norm()
    # Rounded activations cost something, which is reported.
    assert report.perplexity_before is not None
    assert report.perplexity_after != pytest.approx(
        hf_perplexity(hf_of("llama", weights, tmp_path), windows().held_out), rel=1e-5
    )
    assert report.perplexity_after == pytest.approx(report.perplexity_before, rel=0.1)


@pytest.mark.parametrize(
    "kind", [*FAMILIES, "qwen3_moe", "gpt2", "gemma3", "afmoe", "muse_glimmer"]
)
def test_folded_scales_leave_the_model_as_it_was(kind: str, tmp_path: Path) -> None:
    """Without rounding, any scale gives the same residual stream."""
    source = Source(tiny_models.save(kind, tmp_path / "source"))
    layers = LayerQuantiser(source, recipe(), recipe().make_grid([], torch.float32))
    walk = LayerRunner(source.spec, WINDOW)
    x = walk.embed(windows().calibration, source.weights)
    generator = torch.Generator().manual_seed(1)
    for i in range(source.spec.num_layers):
        weights = layers.read(i)
        expected = walk.run(layers.build_layer(i, weights), i, x.clone())
        sites = sites_of(source.spec, source.parameters, i)
        folds = list(folds_of(source.spec, source.parameters, i, sites))
        before = {name: tensor.clone() for name, tensor in weights.items()}
        for fold in folds:
            scale = torch.rand(fold.consumers[0].inputs, generator=generator).mul(2).exp()
            apply_fold(
                fold, fold.average_tied(scale), weights, source.spec.norm.offset, source.dtypes(i)
            )
        assert folds
        assert any(not weights[name].equal(before[name]) for name in weights)
        folded = walk.run(layers.build_layer(i, weights), i, x.clone())
        assert torch.allclose(folded, expected, rtol=1e-4, atol=2e-4)
        x = expected


class Stopped(Exception):
    pass


def stop_in(layer: int) -> Any:
    def on_progress(fraction: float, what: str) -> None:
        if what == f"layer {layer}: going on":
            raise Stopped

    return on_progress


def test_a_run_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    source = tiny_models.save("llama", tmp_path / "source")
    quantise(Job(source, tmp_path / "whole", recipe()), windows())
    job = Job(source, tmp_path / "out", recipe())
    with pytest.raises(Stopped):
        quantise(job, windows(), stop_in(2))
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        QuantizeError, match=r"out\.partial holds an unfinished run with another algo"
    ):
        quantise(Job(source, tmp_path / "out", recipe(algorithm="rtn")), windows())
    told: list[str] = []
    quantise(job, windows(), lambda fraction, what: told.append(what))
    assert not any(what.startswith("layer 1") for what in told)
    assert any(what.startswith("layer 2") for what in told)
    whole, resumed = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "out")
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)
    first, second = (
        json.loads((tmp_path / name / REPORT).read_text())["layers"] for name in ("whole", "out")
    )
    assert first == second
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(QuantizeError, match="out is there already"):
        quantise(job, windows())


def test_modules_that_are_to_stay_stay_and_are_named(tmp_path: Path) -> None:
    source = tiny_models.save("qwen2_moe", tmp_path / "source")
    asked = recipe(algorithm="rtn", ignore=("lm_head", "re:.*layers.0.self_attn.[qkv]_proj"))
    quantise(Job(source, tmp_path / "out", asked), windows())
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    kept = [name for name in before if name in after]
    assert all(before[name].equal(after[name]) for name in kept)
    assert "model.layers.0.self_attn.k_proj.weight" in kept
    assert "model.layers.1.self_attn.k_proj.weight" not in kept
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "ignore"
    ]
    linear = {name.removesuffix(".weight") for name in kept if before[name].ndim == 2}
    assert set(ignored) == linear - {"model.embed_tokens"} | {"lm_head"}
    assert "model.layers.0.mlp.gate" in ignored
    part = recipe(ignore=("model.layers.0.self_attn.q_proj",))
    with pytest.raises(QuantizeError, match=r"k_proj, .*q_proj, .*v_proj, or none"):
        quantise(Job(source, tmp_path / "other", part), windows())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"group_size": 32}, "group size 32 does not divide the 48 inputs of 0.qkv.weight"),
        ({"group_size": 0}, "--group-size is 0"),
        ({"scheme": "fp8"}, "fp8 has one scale an output"),
        ({"scheme": "w8a8", "group_size": None, "symmetric": False}, "w8a8 has no zero points"),
        ({"ignore": ("re:(",)}, r"--ignore re:\(: missing \)"),
        ({"ignore": ("re:.*",)}, "leaves nothing to quantise"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = tiny_models.save("llama", tmp_path / "source")
    with pytest.raises(QuantizeError, match=said) as told:
        quantise(Job(source, tmp_path / "out", recipe(**fields)), windows())
    assert "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == [source]


def test_models_that_are_no_source_are_refused(tmp_path: Path) -> None:
    source = tiny_models.save("llama", tmp_path / "source")
    quantise(Job(source, tmp_path / "once", recipe(algorithm="rtn")), windows(2, 0))
    with pytest.raises(QuantizeError, match=r"quantised already \(compressed-tensors\)"):
        quantise(Job(tmp_path / "once", tmp_path / "twice", recipe()), windows())
    gpt2 = tiny_models.save("gpt2", tmp_path / "gpt2")
    with pytest.raises(QuantizeError, match=r"c_attn\.weight: gpt2 stores it in an order"):
        quantise(Job(gpt2, tmp_path / "other", recipe()), windows())
    glm = tiny_models.save("glm_moe_dsa", tmp_path / "glm")
    with pytest.raises(QuantizeError, match="longer than the 12 that are selected"):
        quantise(Job(glm, tmp_path / "other", recipe()), windows())
    dbrx = tiny_models.save("dbrx", tmp_path / "dbrx")
    with pytest.raises(QuantizeError, match="dbrx models store a layer's experts in one tensor"):
        quantise(Job(dbrx, tmp_path / "other", recipe()), windows())
    for kind in ("axk2", "longcat_flash"):
        directory = tiny_models.save(kind, tmp_path / kind)
        with pytest.raises(QuantizeError, match=f"norms of {kind} models are read by gates or"):
            quantise(Job(directory, tmp_path / "other", recipe()), windows())
    olmo = tiny_models.save("olmo", tmp_path / "olmo")
    with pytest.raises(QuantizeError, match="norms of olmo models have no weights"):
        quantise(Job(olmo, tmp_path / "other", recipe()), windows())
