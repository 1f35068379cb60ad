"""Gives the demo model the cost of a large one: the same function in a larger shape.

    python -m demo.widen DIRECTORY

The gain from speculation depends on the cost of a target step relative to that of a draft step, and
a step of the demo model costs hardly more than one of its draft. The weights of a large model are
not available offline, and a draft could not predict a model with random weights. So the demo model
is embedded in a larger one with exactly the same outputs:

- Hidden states become N times as wide, padded with zeros. A norm then divides by a root mean
  square that is sqrt(N) times smaller, so its weights are divided by that, and its epsilon by N.
- Heads and MLP units are added whose outputs have zero weight.
- Layers are added that leave the hidden states unchanged.

If N is a power of four, all of it is exact in bfloat16.
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo.evaluate import MODEL

# As in a model of half a billion parameters, except for the vocabulary.
TIMES, LAYERS, INTERMEDIATE, KV_HEADS = 4, 28, 4608, 8


def widen(
    folder: Path,
    times: int = TIMES,
    layers: int = LAYERS,
    intermediate: int = INTERMEDIATE,
    kv_heads: int = KV_HEADS,
) -> int:
    """Write the wide model into `folder`; returns its number of parameters.

    Raises ValueError if the demo model is larger than the requested shape, or if sqrt(times) is not
    a power of two.
    """
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    root = math.isqrt(times)
    if root * root != times or root & (root - 1):
        raise ValueError(f"times must be a power of four, not {times}")
    if (
        layers < config["num_hidden_layers"]
        or intermediate < config["intermediate_size"]
        or kv_heads < config["num_key_value_heads"]
    ):
        raise ValueError("the wide model must not be smaller than the demo model")
    heads_a_key = config["num_attention_heads"] // config["num_key_value_heads"]
    small = load_file(MODEL / "model.safetensors")
    wide = config | {
        "hidden_size": times * config["hidden_size"],
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads_a_key * kv_heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": config["rms_norm_eps"] / times,
    }
    weights = {}
    for name, shape in _shapes(wide).items():
        weights[name] = torch.zeros(shape, dtype=torch.bfloat16)
        if (given := small.get(name)) is not None:
            given = given / root if given.ndim == 1 else given
            weights[name][tuple(slice(size) for size in given.shape)] = given
    folder.mkdir(parents=True, exist_ok=True)
    for path in MODEL.iterdir():
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "training.json"):
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(wide, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in weights.values())


def _shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensor shapes of a Llama with tied embeddings."""
    hidden, units = config["hidden_size"], config["intermediate_size"]
    queries, keys = (
        config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")
    )
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (units, hidden),
        "mlp.up_proj": (units, hidden),
        "mlp.down_proj": (hidden, units),
    }
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIRECTORY")
    parser.add_argument("--times", type=int, default=TIMES, help="as wide, a power of four")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--intermediate", type=int, default=INTERMEDIATE)
    parser.add_argument("--kv-heads", type=int, default=KV_HEADS)
    args = parser.parse_args()
    number = widen(args.folder, args.times, args.layers, args.intermediate, args.kv_heads)
    print(json.dumps({"folder": str(args.folder), "parameters": number}))


if __name__ == "__main__":
    main()
