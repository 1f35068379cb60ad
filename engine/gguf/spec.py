"""From a file's metadata to a DecoderSpec."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from engine.errors import ModelLoadError
from engine.gguf.config import architecture_of, config_of
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import end_token_ids
from engine.models.families import read_spec
from engine.models.spec import DecoderSpec

_DENSE = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_gguf_spec(file: GgufFile) -> DecoderSpec:
    """Return the spec of the model.

    The tensors show which biases there are, and whether the head is untied.

    Raises:
        ModelLoadError: the architecture is unknown, or a value is missing, out of range or not
            understood; one line that names the file.
    """
    try:
        spec = read_spec(config_of(file))
    except ModelLoadError as error:
        raise ModelLoadError(str(error).replace("config.json", str(file.path), 1)) from None
    assert isinstance(spec, DecoderSpec)
    names = file.tensors.keys()
    norm = spec.norm
    if architecture_of(file).norms_include_offset:
        norm = replace(norm, offset=0.0)
    if "norm_biases" in spec.optional:
        norm = replace(norm, bias="output_norm.bias" in names)
    return replace(
        spec,
        norm=norm,
        qkv_bias=not names.isdisjoint({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}),
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias=any(name.endswith(".ffn_up.bias") for name in names),
        separate_head_norms=False,
        tie_word_embeddings="output.weight" not in names,
        eos_token_ids=end_token_ids(file),
        checkpoint_dtype=_DENSE.get(_main_type(file), "bfloat16"),
    )


def stored_format(file: GgufFile) -> str | None:
    """Return the quantisation of most weights; None if they are not quantised."""
    kind = _main_type(file)
    return None if kind in _DENSE else kind


def _main_type(file: GgufFile) -> str:
    """Return the type with the most bytes among the matrices."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type.name] += tensor.num_bytes
    return sizes.most_common(1)[0][0] if sizes else "F32"
