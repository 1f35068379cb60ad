"""Generates the page of supported models from the code that reads them: ``python -m tools.models``.

Writes ``docs/models.md``; a test checks that the page is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from engine.models.audio.families import FAMILIES as AUDIO
from engine.models.encoder.families import ENCODERS
from engine.models.families import FAMILIES
from engine.models.families.embedding_gemma import BIDIRECTIONAL, EMBEDDING_GEMMAS
from engine.models.families.rope import SCALINGS
from engine.models.vision.families import FAMILIES as VISION
from engine.quantization.formats import FORMATS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"

_PAGE = """\
<!-- made by python -m tools.models -->
# Models

Quire serves a model from a directory in Hugging Face format: `config.json`, safetensors (one file
or shards) and a tokenizer. The config's `model_type` selects the family from the table below. An
unknown `model_type` is refused with this list. So is any config key that the family's reader does
not understand, because a key that is ignored silently gives wrong answers; except for keys that
Hugging Face's own implementation does not read either, which are logged. Code from a model's
directory is never run.

A tokenizer is a `tokenizer.json`, or an older file that transformers converts without the model's
code. Kimi's `tiktoken.model` and Mistral's `tekken.json` are read, too; other tiktoken files are
refused. A model with a `tekken.json` and no chat template, such as Voxtral, gets one for text and
audio, without tools.

## Families

| `model_type` | Models | What differs from Llama |
|---|---|---|
{families}

**How they are tested.** Each family is compared with Hugging Face's own implementation on a tiny
random model: logits must agree within 1e-4 in float32 (2e-4 for layers with a state, which
Hugging Face sums in chunks), and greedy text must be the same under any chunking, batching and
preemption. Families that differ from another in names and numbers alone are compared by logits
only. No published weights have been tried, because none could be downloaded where Quire was
developed. If a published config has a key that is not understood, the error names it.

## Images

{images} accept images. Their encoders are compared with Hugging Face's on tiny random models,
images of one cell, of uneven windows and in tiles included: every embedding must agree within
1e-5 of the largest, in float32.

Other multimodal models are served as text models. So is a model whose image encoder is quantised
or has a config key that is not understood; the reason is logged at start.

## Audio

{audio} accept [audio](audio.md). Their encoders and spectrograms are compared with Hugging Face's
on tiny random models, clips of whole chunks and with rests included: every embedding must agree
within 1e-5 of the largest, and every number of a spectrogram within 1e-4, in float32.

Other models with an audio encoder are served without it.

## Models with two kinds of heads

Gemma 4 has two kinds of heads, each with its own KV-cache shape. Layers that share keys and
values with an earlier layer (E2B, E4B) take no cache of their own. Its heads of 512 have kernels
for CPUs, and for GPUs in bfloat16 and float16. `quire quantize` does not support Gemma 4.

MiMo-V2 has two kinds of heads, too, and is not supported by `quire quantize`. Its cache holds
values as wide as keys, of which it uses 128 of 192 numbers. Laguna's and Step's windowed layers
have more query heads than the others, and as many KV heads; `quire quantize` does not support them
either, nor DBRX, whose files have all experts of a layer in one tensor.

## Models with experts aside

A layer of LongCat-Flash's checkpoints is two layers here: both halves attend, and its experts read
what the first half's MLP reads, but are added after the second. Experts that return what they read
cost nothing. `quire quantize` is refused, as it is for A.X K2, whose norms have gates; on a CPU the
decode steps of LongCat-Flash are not recorded as programs, so each costs some more Python.

## Models with several residual streams

A layer of Gemma 3n reads one of four residual streams and corrects all of them
(`engine/models/altup.py`). Refused with such models: several ranks, `mtp` and `eagle` draft heads,
`--batch-invariant` and `quire quantize`. On a CPU their decode steps are not recorded as programs,
so each costs some more Python. Gemma 3n is served as a text model: the tokens from 262,144 on,
which stand for images and sound, mean nothing here.

## Models with a state

Some layers keep a fixed-size state of each sequence instead of keys and values
([kv-cache.md](kv-cache.md#states)): gated delta rules (Qwen3-Next, Qwen3.5, OLMo Hybrid, and with
a decay per channel Kimi Linear and Ling 3),
selective state spaces of heads (Mamba-2: Granite 4.0 H, Bamba, Falcon-H1, Nemotron-H, and Mamba-2
itself) or of channels (Mamba-1: Jamba, Falcon-Mamba, and Mamba itself), and short convolutions
(LFM2, LFM3).

| With such models | |
|---|---|
| [speculation](speculation.md) | yes; no draft models with a state, no drafts on several ranks |
| `--quantization` | yes, but for the projections of decays and Mamba-1's small ones |
| [tensor and pipeline parallelism](parallel.md) | yes |
| `--kv-offload-bytes`, `quire quantize` | refused |

Falcon-H1 has attention and a state space in each layer; its config's multipliers become part of the
weights at load, so its quantised checkpoints are refused.

In models of types `mamba`, `mamba2` and `falcon_mamba` no layer attends, so there is no KV cache:
memory limits the number of sequences, not their length, which is at most 262,144 tokens.
`--kv-cache-dtype` and `--kv-cache-memory-bytes` are refused. Between layers their values have the
model's dtype, although their configs ask for float32 (`residual_in_fp32`); that changes rounding
only, and `--dtype float32` avoids it. Checkpoints in the format of the `mamba_ssm` package are
refused.

The GPU kernels of states take prompts 64 tokens at a time. On an H200 all equal their references
in the shapes of published models ([measurements](measurements.md#on-a-gpu)).

## Encoders

Encoders make embeddings and score pairs of texts ([embeddings.md](embeddings.md)). They are
compared with Hugging Face's in the same way.

| `model_type` | Models |
|---|---|
{encoders}

## Parts

- **Rotary embeddings:** {ropes}; on a part of the head, with a separate base in windowed layers,
  or interleaved, as the family has it.
- **Latent attention** (DeepSeek and relatives): the cache holds a token's latent in place of its
  keys and values, and the matrices that expand latents are absorbed into queries and outputs.
  These matrices keep the model's dtype under `--quantization`; a checkpoint that has them
  quantised (`kv_b_proj`) is expanded at load, because an absorbed matrix is multiplied along its
  outputs.
- **Sparse attention** (DeepSeek-V3.2, GLM-5, A.X K2): a query attends to the 2,048 positions that
  an indexer selects ([kernels.md](kernels.md#attention-to-selected-positions)). The
  indexer computes in the model's dtype, as Hugging Face's does. DeepSeek's own code rounds its
  queries and keys to fp8, after a rotation that changes no product; near ties may be decided
  differently there. DeepSeek-V3.2's checkpoints have a program that writes prompts instead of a
  chat template; Quire's own template writes them in the same form
  ([tools.md](tools.md#deepseek-v32)).
- **Draft heads:** the multi-token-prediction layer of DeepSeek-V3, GLM-4.5 and later, Qwen3-Next
  and Qwen3.5 (`--speculation mtp`), EAGLE and EAGLE-3 heads for any decoder (`--speculation
  eagle`); see [speculation.md](speculation.md). Those of Step,
  Ling 3 and LongCat-Flash are not read.
- **Windows and chunks:** where every layer has a window, blocks behind it are freed as a text
  grows. Attention within chunks (Llama 4) works with every attention backend.
- **Mixtures of experts:** all experts of a layer are one grouped product on a GPU and one native
  call on a CPU, quantised like other layers ([architecture.md](architecture.md)).
  `--batch-invariant` supports them on a CPU with AVX2, AVX512-BF16 or NEON in bfloat16 or int8,
  and on a GPU in bfloat16 or float16, quantised or not.

## Number formats

Models run in float32, bfloat16 or float16, whatever the checkpoint was saved in. `--quantization
int8|int4|nf4|fp8` rounds the weights of any family at load, and quantised checkpoints load as
they are ([quantisation.md](quantisation.md)):

| `quant_method` | Supported |
|---|---|
{formats}
"""


def models_page() -> str:
    """The whole page."""
    families = "\n".join(
        f"| `{name}` | {family.models} | {family.differences or 'nothing'} |"
        for name, family in sorted(FAMILIES.items(), key=lambda item: item[0].lower())
    )
    readers = ENCODERS | EMBEDDING_GEMMAS | BIDIRECTIONAL
    encoders = "\n".join(
        f"| `{name}` | {family.models} |" for name, family in sorted(readers.items())
    )
    formats = "\n".join(f"| `{name}` | {found.supported} |" for name, found in FORMATS.items())
    kinds = ", ".join(f"`{kind}`" for kind in ("default", *SCALINGS))
    return _PAGE.format(
        families=families,
        images=_listed(VISION),
        audio=_listed(AUDIO),
        encoders=encoders,
        ropes=kinds,
        formats=formats,
    )


def _listed(names: Iterable[str]) -> str:
    """Names as part of a sentence."""
    *most, last = (f"`{name}`" for name in sorted(names))
    return f"{', '.join(most)} and {last}"


def main() -> int:
    """Write the page."""
    PAGE.write_text(models_page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
