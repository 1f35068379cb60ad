"""The page of what models are served, from the code that reads them: ``python -m tools.models``.

Writes ``docs/models.md``; a test holds the page to it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.models.encoder.families import ENCODERS
from engine.models.families import FAMILIES
from engine.models.families.rope import SCALINGS
from engine.models.vision.families import FAMILIES as VISION
from engine.quantization.formats import FORMATS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"

_PAGE = """\
<!-- made by python -m tools.models -->
# Models

A model is a directory in Hugging Face format: `config.json`, safetensors (one file or shards) and
a tokenizer. Its `model_type` decides who reads the config. A `model_type` that is not below is
refused with this list, and so is, by name, any key of a config that its reader does not
understand: a key that is ignored is a wrong answer. Code from a model's directory is never run.

| `model_type` | Models | What differs from Llama |
|---|---|---|
{families}

Each family is held against Hugging Face's own code on a tiny random model: logits to 1e-4 in
float32 (2e-4 with states, which are summed in chunks there), and, but for those that differ from
another in names and numbers alone, greedy text under any chunking, batch and preemption. No weights
of a published model have been tried, as none could be downloaded where this was made: a published
config may have a key that its reader does not know, which the error names.

Images are taken by {images}. Their encoders are
held against Hugging Face's own on tiny random models, images of one cell and of uneven windows
among them: every embedding to 1e-5 of the largest, in float32. Of an encoder that is quantised, or
whose config has a key that is not understood, the reason is logged and text alone is served; so it
is of the other models that read images, where what is for images is passed over.

Gemma 4's layers have heads of two kinds, and each kind its own shape of the KV cache. Layers that
share keys and values with an earlier one (E2B, E4B) have none in the cache. Heads of 512, which it
has where all is seen, have kernels on a CPU, and on a GPU in bfloat16 and float16: these have been
compiled and interpreted, and not run on one yet. `quire quantize` does not take it.

Layers with the gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid), a selective state space
(Mamba-2: Granite 4.0 H, Bamba, Nemotron-H) or a short convolution (LFM2) keep a state of each
sequence in place of keys and values, as large for a long text as for a short one
([kv-cache.md](kv-cache.md#states)).
With such models `--speculation` and `--kv-offload-bytes` are refused at start, and so is `quire
quantize`; ranks and stages have the states of their heads and layers ([parallel.md](parallel.md));
`--quantization` rounds them as they load, but for the small projections that a delta rule's decay
comes from. On a GPU these layers' kernels, which take prompts 64 tokens at a time, have not been
run yet. Models of state spaces alone, Jamba and Falcon-H1 are refused by name.

Encoders, which make embeddings and score pairs of texts ([embeddings.md](embeddings.md)):

| `model_type` | Models |
|---|---|
{encoders}

Their vectors and scores are held against Hugging Face's in the same way.

Rotary embeddings: {ropes};
on a part of the head, with a base of their own in windowed layers, or by neighbouring dimensions,
where the family has it so.

Latent attention (DeepSeek): a token's latent is cached in place of its keys and values, and the
matrices that would make those of it are absorbed into queries and outputs; these two are held in
the model's dtype when the other weights are rounded, and widened where a checkpoint has them in
codes (`kv_b_proj`): absorbed, one of them is multiplied along its outputs.

Heads that draft: the layer for multi-token prediction of DeepSeek-V3 and GLM-4.5 and later
(`--speculation mtp`), EAGLE and EAGLE-3 heads for any decoder (`--speculation eagle`); see
[speculation.md](speculation.md).

Attention within chunks (Llama 4) is attention of shorter rows: each backend serves it. Where every
layer has a window, blocks behind it are given back as a text grows.

Mixtures of experts: on a GPU one grouped product of Triton for all experts of a layer, on a CPU one
native call, quantised as other layers are ([architecture.md](architecture.md)). `--batch-invariant`
takes them on a CPU with AVX2, AVX512-BF16 or NEON, in bfloat16 or int8, and on a GPU in bfloat16 or
float16, quantised or not; it refuses them elsewhere.

Numbers: float32, bfloat16 and float16; what the checkpoint was saved in does not matter.
`--quantization int8|int4|nf4|fp8` rounds the weights of any family while they load, and checkpoints
that are quantised load as they are ([quantisation.md](quantisation.md)):

| `quant_method` | What of it |
|---|---|
{formats}
"""


def models_page() -> str:
    """The whole page."""
    families = "\n".join(
        f"| `{name}` | {family.models} | {family.differs or 'the pattern of all others'} |"
        for name, family in sorted(FAMILIES.items())
    )
    encoders = "\n".join(
        f"| `{name}` | {family.models} |" for name, family in sorted(ENCODERS.items())
    )
    formats = "\n".join(f"| `{name}` | {found.served} |" for name, found in FORMATS.items())
    kinds = ", ".join(f"`{kind}`" for kind in ("default", *SCALINGS))
    *most, last = (f"`{name}`" for name in sorted(VISION))
    images = f"{', '.join(most)} and {last}"
    return _PAGE.format(
        families=families, images=images, encoders=encoders, ropes=kinds, formats=formats
    )


def main() -> int:
    """Write the page."""
    PAGE.write_text(models_page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
