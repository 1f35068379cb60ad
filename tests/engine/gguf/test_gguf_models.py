"""GGUF files of tiny random models: the same logits as the models they were written from."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.gguf.blocks import FORMATS, unpack_rows
from engine.gguf.config import ARCHITECTURES
from engine.gguf.file import TENSOR_TYPES, read_gguf
from engine.gguf.spec import stored_format
from engine.gguf.weights import GgufWeights
from engine.models.checkpoint import read_config
from engine.quantization import selection
from engine.runner.weight_files import find_weights
from engine.types import SamplingParams
from kernels.cpu import linear
from kernels.tiled import tile, tiling_unsupported_reason
from tests import gguf_files, tiny_models
from tests.engine.handmade import Hand, load, request

NUM_TOKENS = 40

# Only what the files can express: Gemma's scores are scaled by the head size, and the windows of
# Qwen and Mistral are not stored.
CHANGES = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "num_hidden_layers": 6,
        "sliding_window": 12,
    },
    "cohere2": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_hidden_layers": 4,
    },
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "qwen2_moe": {"mlp_only_layers": []},
}
WRITTEN = {known.model_type for known in ARCHITECTURES.values()} | {"mistral", "mixtral"}
KINDS = [
    kind
    for kind, (config_class, _) in tiny_models.KINDS.items()
    if getattr(transformers, config_class).model_type in WRITTEN
    and kind not in ("mistral", "qwen2_window", "llama_dynamic", "llama_longrope")
]


def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 160, (NUM_TOKENS,), generator=generator).tolist()


def logits_of(path, **changes) -> torch.Tensor:
    runner = load(path, **changes)
    model, hidden = runner._model, []
    forward = model.forward
    model.forward = lambda *arguments: hidden.append(forward(*arguments)) or hidden[-1]
    hand = Hand(runner)
    hand.add(request("a", prompt(), SamplingParams(prompt_logprobs=0)))
    for count in (13, 1, 26):
        hand.step({"a": count})
    with torch.inference_mode():
        return model.logits(torch.cat(hidden))


def logits_of_twin(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt()])).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_source(kind, tmp_path):
    model = tiny_models.build(kind, **CHANGES.get(kind, {}))
    path = gguf_files.write(tmp_path / "model.gguf", model)
    expected = logits_of_twin(model)
    torch.testing.assert_close(logits_of(path), expected, atol=1e-4, rtol=1e-4)


def random_blocks(rng: np.random.Generator, name: str, rows: int, width: int) -> np.ndarray:
    """Bytes of rows in a tensor type: random codes, and scales for weights of about 0.1."""
    kind = TENSOR_TYPES[NUMBERS[name]]
    raw = rng.integers(0, 256, (rows, width // kind.block, kind.num_bytes), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        values = rng.normal(scale=SCALES.get(name, 4e-4), size=raw.shape[:2]).astype(np.float16)
        values[0, 0] = 0  # a block of equal weights
        raw[:, :, at : at + 2] = values.view(np.uint8).reshape(*values.shape, 2)
    if name == "MXFP4":
        raw[:, :, 0] = rng.integers(118, 124, raw.shape[:2])
    return raw.reshape(rows, -1)


NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
# The offsets of the float16 numbers in a block, and their magnitudes.
HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": (), "TQ2_0": (64,)},
}
SCALES = {
    "Q8_0": 1e-3,
    "Q4_0": 2e-2,
    "Q4_1": 2e-2,
    "Q5_0": 1e-2,
    "Q5_1": 1e-2,
    "TQ2_0": 0.1,
    "Q6_K": 4e-5,
}


@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_scales_say_what_the_blocks_say(name):
    rng = np.random.default_rng(3)
    raw = random_blocks(rng, name, 6, 512)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType(NUMBERS[name]))
    kind = TENSOR_TYPES[NUMBERS[name]]
    found = unpack_rows(FORMATS[name], torch.from_numpy(raw), kind.num_bytes)
    np.testing.assert_allclose(found.dequantise(torch.float32).numpy(), expected, 2e-6, 1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_holds_the_codes_of_every_type(name):
    """A GPU holds the codes compactly and exactly.

    At most a byte for each 16 weights more than codes and 16 bits for a scale and a zero, and as
    exact as the bfloat16 in which they are multiplied.
    """
    raw = torch.from_numpy(random_blocks(np.random.default_rng(3), name, 6, 512))
    kind = FORMATS[name]
    found = unpack_rows(kind, raw, TENSOR_TYPES[NUMBERS[name]].num_bytes)
    assert tiling_unsupported_reason(found) is None
    tiled, expected = tile(found), found.dequantise(torch.float32)
    error = (tiled.matrix(0, torch.float32) - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 2**-9
    numbers = 1 if found.zeros is None else 2
    bits = found.bits + 16 * numbers / kind.group
    assert tiled.nbytes <= 6 * 512 * bits / 8 + 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_multiplies_the_codes_of_a_file_where_its_kernels_are_right(
    dtype, tmp_path, monkeypatch, caplog
):
    model = read_config(str(quantised(tmp_path, "Q4_K")[0]))
    config, invariant = (
        EngineConfig(model=str(model.directory), batch_invariant=value) for value in (False, True)
    )
    device = torch.device("cuda")
    for reason, held in ((None, "GGUF Q4_K"), ("the GPU is too old", None)):
        monkeypatch.setattr(
            selection, "_triton_unsupported_reason", lambda *_, reason=reason, **__: reason
        )
        with caplog.at_level("INFO"):
            assert find_weights(config, model, dtype, device, 0).codes == held
            assert find_weights(invariant, model, dtype, device, 0).codes == held
    assert "widened" in caplog.text
    assert "the GPU is too old" in caplog.text
    assert find_weights(invariant, model, dtype, torch.device("cpu"), 0).codes is None


def test_types_that_are_no_such_codes_are_widened_and_named(tmp_path, caplog):
    for name, is_told in (("IQ2_XXS", True), ("Q4_K", False)):
        model = read_config(str(quantised(tmp_path, name)[0]))
        caplog.clear()
        with caplog.at_level("INFO"):
            arguments = model.gguf, model.spec, torch.bfloat16, torch.device("cpu")
            GgufWeights(*arguments, packed=FORMATS)
        assert (f"weights in {name} are widened" in caplog.text) == is_told


def test_sizes_of_blocks_are_ggmls():
    for number, kind in TENSOR_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert kind.name == theirs.name
        assert (kind.block, kind.num_bytes) == tuple(gguf.GGML_QUANT_SIZES[theirs])


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
WIDE |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def quantised(tmp_path, name):
    """A file with matrices in one type, and the model with the dequantised weights."""
    rng = np.random.default_rng(4)
    model = tiny_models.build("llama", **WIDE)
    number = gguf.GGMLQuantizationType(NUMBERS[name])
    widened = {}

    def encode(key, values):
        if values.ndim < 2:
            return gguf_files.as_float32(key, values)
        raw = random_blocks(rng, name, *values.shape)
        widened[key] = torch.from_numpy(gguf.dequantize(raw, number))
        return raw, number

    path = gguf_files.write(tmp_path / "model.gguf", model, encode)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for key, parameter in model.named_parameters():
        told = names.get_name(key, try_suffixes=(".weight",))
        if told in widened:
            parameter.data.copy_(as_hugging_face(key, widened[told]))
    return path, model


def as_hugging_face(key: str, values: torch.Tensor) -> torch.Tensor:
    """Undo the converter's reordering of query and key rows."""
    heads = {"q_proj": 4, "k_proj": 2}.get(key.split(".")[-2])
    if heads is None:
        return values
    pairs = values.reshape(heads, -1, 2, values.shape[1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


@pytest.mark.parametrize("name", [*FORMATS, "IQ2_XXS", "IQ3_S", "TQ2_0"])
def test_quantised_models_answer_as_their_widened_weights(name, tmp_path):
    """Matrices in every type, including the embedding table."""
    path, model = quantised(tmp_path, name)
    expected = logits_of_twin(model)
    assert expected.std() > 0.01
    torch.testing.assert_close(logits_of(path), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_native_kernels_multiply_the_codes_as_they_lie(name, tmp_path):
    """In the memory of the codes, with the kernel's bfloat16 error."""
    if not linear.is_available():
        pytest.skip("no native kernels here")
    path, model = quantised(tmp_path, name)
    expected = logits_of_twin(model)
    found = logits_of(path, dtype="bfloat16").float()
    likeness = functional.cosine_similarity(found, expected)  # a row or two are near ties
    assert likeness.median() > 0.9995
    assert likeness.mean() > 0.995
    wide = load(path, dtype="float32").info.memory.weights_bytes
    held = load(path, dtype="bfloat16").info.memory.weights_bytes
    most_bits = 12 if FORMATS[name].levels is None else 7  # including scales and zeros
    assert held < wide * most_bits / 32
    with pytest.raises(ModelLoadError, match=f"quantised already .GGUF {name}."):
        load(path, dtype="bfloat16", quantization="int8")


def test_what_most_weights_are_in_says_what_the_file_is(tmp_path):
    path, _ = quantised(tmp_path, "Q4_0")
    assert stored_format(read_gguf(path)) == "Q4_0"
    plain = gguf_files.write(tmp_path / "plain.gguf", tiny_models.build("llama"))
    assert stored_format(read_gguf(plain)) is None
