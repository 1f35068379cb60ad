"""The cases of a full run, with shapes of real models, and of a tiny run for tests."""

from __future__ import annotations

from functools import partial

from kernels.bench.adapter_cases import adapter_case
from kernels.bench.attention_cases import attention_case
from kernels.bench.case import Case
from kernels.bench.layer_cases import (
    copy_case,
    few_experts_case,
    inputs_case,
    invariant_layer_case,
    matmul_case,
    moe_case,
    norm_case,
    routing_case,
    sampling_case,
    silu_case,
    skinny_case,
    store_case,
    xielu_case,
)
from kernels.bench.packed_cases import packed_case, scaled_case
from kernels.bench.selection_cases import selection_case
from kernels.bench.state_cases import channel_case, conv_case, delta_case, scan_case
from kernels.recurrent import GatedDeltaShape, ScanShape

MakeCase = partial[Case]  # takes the device and the dtype; all else is bound

_LLAMA_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 64}
_QWEN_0_6B = {"heads": 16, "kv_heads": 8, "head_dim": 128, "block_size": 64}
# In full attention layers.
_GEMMA4_31B = {"heads": 32, "kv_heads": 4, "head_dim": 512, "block_size": 64}
_QWEN3_30B = {"experts": 128, "top_k": 8, "hidden": 2048, "inner": 768}
_GPT_OSS_20B = {"experts": 32, "top_k": 4, "hidden": 2880, "inner": 2880}
_QWEN3_NEXT = GatedDeltaShape(16, 32, 128, 128)
_GRANITE_4 = ScanShape(128, 1, 64, 128)
_DEEPSEEK_V3_2 = {
    **{"top_k": 2048, "heads": 128, "rank": 512, "rope_dim": 64, "block_size": 64},
    **{"index_heads": 64, "index_dim": 128},
}
_TINY_SPARSE = {
    **{"top_k": 8, "heads": 4, "rank": 16, "rope_dim": 8, "block_size": 16},
    **{"index_heads": 3, "index_dim": 16},
}
_TINY = {"heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16}


def _decode(name: str, model: dict[str, int], rows: int, context: int) -> MakeCase:
    name = f"decode {name} {rows} x {context}"
    return partial(attention_case, name, rows=rows, queries=1, past=context - 1, **model)


def _prefill(name: str, model: dict[str, int], rows: int, queries: int, past: int) -> MakeCase:
    name = f"prefill {name} {rows} x {queries}" + (f" after {past}" if past else "")
    return partial(attention_case, name, rows=rows, queries=queries, past=past, **model)


def _invariant(name: str, model: dict[str, int], rows: int, queries: int, past: int) -> MakeCase:
    name = f"invariant {name} {rows} x {queries} after {past}"
    shape = {"rows": rows, "queries": queries, "past": past}
    return partial(attention_case, name, invariant=True, **shape, **model)


def _selection(name: str, model: dict[str, int], rows: int, queries: int, past: int) -> MakeCase:
    name = f"selection {name} {rows} x {queries} after {past}"
    return partial(selection_case, name, rows=rows, queries=queries, past=past, **model)


def _matmul(rows: int, inputs: int, outputs: int) -> MakeCase:
    name = f"invariant product {rows} x {inputs} x {outputs}"
    return partial(matmul_case, name, rows=rows, inputs=inputs, outputs=outputs)


def _invariant_layer(rows: int, inputs: int, outputs: int) -> MakeCase:
    name = f"invariant layer {rows} x {inputs} x {outputs}"
    return partial(invariant_layer_case, name, rows=rows, inputs=inputs, outputs=outputs)


def _skinny(name: str, model: dict[str, int], rows: int, hidden: int, inner: int) -> list[MakeCase]:
    """A layer's four products for few rows."""
    queries = model["heads"] * model["head_dim"]
    keys = model["kv_heads"] * model["head_dim"]
    parts: dict[str, tuple[int, int, dict[str, object]]] = {
        "qkv": (hidden, queries + 2 * keys, {}),
        "output": (queries, hidden, {"adds": True}),
        "gate up": (hidden, inner, {"gate": "silu"}),
        "down": (inner, hidden, {"adds": True}),
    }
    return [
        partial(skinny_case, f"{part} {name} {rows}", rows=rows, inputs=i, outputs=o, **more)
        for part, (i, o, more) in parts.items()
    ]


def _packed(kind: str, rows: int, inputs: int, outputs: int) -> MakeCase:
    which = "row" if rows == 1 else f"product {rows} x"
    name = f"{kind} {which} {inputs} x {outputs}"
    return partial(packed_case, name, rows=rows, inputs=inputs, outputs=outputs, kind=kind)


def _scaled(kind: str, rows: int, inputs: int, outputs: int) -> MakeCase:
    name = f"{kind} product of codes {rows} x {inputs} x {outputs}"
    return partial(scaled_case, name, rows=rows, inputs=inputs, outputs=outputs, kind=kind)


def _experts(name: str, model: dict[str, int], tokens: int, kind: str | None = None) -> MakeCase:
    name = f"experts {name} {kind} {tokens}" if kind else f"experts {name} {tokens}"
    return partial(moe_case, name, tokens=tokens, kind=kind, **model)


def _adapters(name: str, tokens: int, adapters: int, inputs: int, outputs: int) -> MakeCase:
    """Of rank 16, for a layer that fuses three."""
    name = f"{adapters} adapters {name} {tokens}"
    shape = {"inputs": inputs, "outputs": outputs, "rank": 48}
    return partial(adapter_case, name, tokens=tokens, adapters=adapters, **shape)


def _sampling(
    rows: int,
    vocab: int,
    temperature: float = 1.0,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    spread: float = 4.0,
) -> MakeCase:
    parts = [f"sampling {rows} x {vocab}"]
    parts += ["greedy"] * (temperature == 0) + [f"top-k {top_k}"] * (top_k > 0)
    parts += [f"top-p {top_p}"] * (top_p < 1) + [f"min-p {min_p}"] * (min_p > 0)
    parts += ["flat"] * (spread < 4)
    return partial(
        sampling_case,
        " ".join(parts),
        rows=rows,
        vocab=vocab,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        spread=spread,
    )


def _states(
    name: str, rows: int, queries: int, delta: GatedDeltaShape, scan: ScanShape
) -> list[MakeCase]:
    """Recurrent layers."""
    name, step = f"{name} {rows} x {queries}", {"rows": rows, "queries": queries}
    by_channel = delta._replace(key_heads=delta.value_heads, decays_channels=True)
    return [
        partial(delta_case, f"delta rule {name}", shape=delta, **step),
        partial(delta_case, f"delta rule by channel {name}", shape=by_channel, **step),
        partial(scan_case, f"selective scan {name}", shape=scan, **step),
        partial(channel_case, f"channel scan {name}", channels=scan.heads * scan.head_dim, **step),
        partial(conv_case, f"short convolution {name}", channels=delta.channels, **step),
    ]


def full_suite() -> list[MakeCase]:
    """Return what ``python -m kernels.bench`` measures."""
    contexts = ((1, 1024), (8, 1024), (64, 1024), (256, 1024))
    contexts += ((1, 4096), (8, 4096), (32, 4096), (1, 65536))
    return [
        *(_decode("8b", _LLAMA_8B, *shape) for shape in contexts),
        *(_decode("0.6b", _QWEN_0_6B, *shape) for shape in contexts),
        _prefill("8b", _LLAMA_8B, 1, 8192, 0),
        _prefill("8b", _LLAMA_8B, 8, 1024, 0),
        _prefill("8b", _LLAMA_8B, 1, 2048, 6144),
        _prefill("0.6b", _QWEN_0_6B, 1, 8192, 0),
        _decode("gemma4-31b", _GEMMA4_31B, 8, 4096),
        _prefill("gemma4-31b", _GEMMA4_31B, 1, 2048, 2048),
        _invariant("8b", _LLAMA_8B, 1, 1, 4095),
        _invariant("8b", _LLAMA_8B, 64, 1, 1023),
        _invariant("8b", _LLAMA_8B, 1, 8192, 0),
        _selection("deepseek-v3.2", _DEEPSEEK_V3_2, 1, 1, 65535),
        _selection("deepseek-v3.2", _DEEPSEEK_V3_2, 32, 1, 8191),
        _selection("deepseek-v3.2", _DEEPSEEK_V3_2, 1, 512, 7680),
        *(_matmul(rows, 4096, 28672) for rows in (1, 8, 64, 256, 8192)),
        *(_matmul(rows, 14336, 4096) for rows in (1, 8, 256)),
        *(
            _invariant_layer(rows, inputs, outputs)
            for inputs, outputs in ((4096, 28672), (14336, 4096))
            for rows in (256, 512, 8192)
        ),
        *_skinny("0.6b", _QWEN_0_6B, 1, 1024, 3072),
        *_skinny("8b", _LLAMA_8B, 1, 4096, 14336),
        *(_packed("int4", rows, 4096, 28672) for rows in (1, 2, 8, 32, 64, 128, 256, 8192)),
        *(_packed("int4 in groups of 128", rows, 4096, 28672) for rows in (1, 8, 32, 64, 128)),
        *(_packed("fp8", rows, 4096, 28672) for rows in (1, 8, 32, 64, 128)),
        *(_scaled("fp8", rows, 4096, 28672) for rows in (33, 64, 128, 256, 512, 8192)),
        *(_scaled("int8", rows, 4096, 28672) for rows in (33, 64, 256, 8192)),
        *(_packed("int4", rows, 14336, 4096) for rows in (1, 8)),
        _adapters("0.6b qkv", 32, 8, 1024, 4096),
        *(_adapters("8b qkv", tokens, 8, 4096, 6144) for tokens in (1, 32, 512, 8192)),
        partial(norm_case, "add + norm 8192 x 4096", rows=8192, hidden=4096),
        partial(silu_case, "silu * 8192 x 14336", rows=8192, inner=14336),
        partial(xielu_case, "xielu 8192 x 21504", rows=8192, inner=21504),
        partial(store_case, "qk-norm + rope + store 8192", rows=8192, **_LLAMA_8B),
        partial(store_case, "qk-norm + rope + store 1", rows=1, **_LLAMA_8B),
        partial(copy_case, "block copy 4096", copies=4096, kv_heads=8, head_dim=128, block_size=64),
        _sampling(256, 128_256, 0.0),
        _sampling(256, 128_256),
        *(_sampling(rows, 128_256, top_k=20, top_p=0.95) for rows in (256, 1)),
        *(_sampling(rows, 128_256, top_p=0.95) for rows in (256, 1)),
        _sampling(1, 128_256, min_p=0.05),
        # So flat that nearly every token may be kept.
        _sampling(1, 128_256, top_p=0.95, spread=1.0),
        partial(inputs_case, "inputs 256 x 4096", rows=256, context=4096, block_size=64),
        *(_experts("30b-a3b", _QWEN3_30B, tokens) for tokens in (1, 64, 8192)),
        _experts("30b-a3b", _QWEN3_30B, 8192, "mxfp4"),
        *(
            partial(
                few_experts_case,
                f"few tokens' experts 30b-a3b {tokens}",
                tokens=tokens,
                **_QWEN3_30B,
            )
            for tokens in (1, 4)
        ),
        *(
            partial(
                routing_case,
                f"routing 30b-a3b {tokens}",
                tokens=tokens,
                experts=128,
                top_k=8,
                hidden=2048,
            )
            for tokens in (1, 64, 8192)
        ),
        *(
            case
            for rows, queries in ((1, 1), (64, 1), (1, 2048))
            for case in _states("hybrid", rows, queries, _QWEN3_NEXT, _GRANITE_4)
        ),
        # An expert has 64 rows of 512 tokens, and of more its weights are widened in memory.
        *(_experts("gpt-oss-20b", _GPT_OSS_20B, n, "mxfp4") for n in (64, 512, 1024, 8192)),
        _experts("gpt-oss-20b", _GPT_OSS_20B, 8192),
    ]


def tiny_suite() -> list[MakeCase]:
    """Return every kind of case, small enough for the interpreter."""
    return [
        _decode("tiny", _TINY, 2, 40),
        _prefill("tiny", _TINY, 2, 20, 0),
        _prefill("tiny", _TINY, 1, 9, 30),
        _invariant("tiny", _TINY, 2, 1, 39),
        _selection("tiny", _TINY_SPARSE, 2, 2, 30),
        _matmul(3, 64, 130),
        _invariant_layer(300, 64, 130),
        *_skinny("tiny", _TINY, 3, 64, 72),
        *(_packed("int4", rows, 64, 130) for rows in (1, 5)),
        _packed("int4 in groups of 128", 5, 256, 130),
        *(_scaled(kind, 40, 64, 128) for kind in ("fp8", "int8")),
        _adapters("tiny", 5, 2, 64, 72),
        partial(norm_case, "norm", rows=3, hidden=64),
        partial(silu_case, "silu", rows=3, inner=64),
        partial(xielu_case, "xielu", rows=3, inner=64),
        partial(store_case, "store", rows=5, **_TINY),
        partial(copy_case, "copy", copies=2, kv_heads=2, head_dim=32, block_size=16),
        _sampling(2, 300, 0.0),
        _sampling(2, 300, top_k=20, top_p=0.95),
        _sampling(2, 300, min_p=0.05),
        partial(inputs_case, "inputs", rows=3, context=50, block_size=16),
        *(
            case
            for queries in (3, 70)
            for case in _states(
                "tiny", 2, queries, GatedDeltaShape(1, 2, 8, 8), ScanShape(2, 1, 8, 8)
            )
        ),
        partial(few_experts_case, "few", tokens=1, experts=4, top_k=2, hidden=64, inner=32),
        partial(routing_case, "routing", tokens=5, experts=4, top_k=2, hidden=64),
        *(
            _experts("tiny", {"experts": 4, "top_k": 2, "hidden": 64, "inner": 32}, 5, kind)
            for kind in (None, "mxfp4")
        ),
    ]
