"""Draft heads, written from the papers in plain torch and saved in their published formats.

    twin = tiny_draft_heads.build("eagle3", model)
    twin.save(directory)

A twin reads whole texts: token t + 1 together with the model's features of the text up to t. Only
its decoder layer comes from Hugging Face.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests import tiny_models

Kind = Literal["mtp", "qwen_mtp", "eagle", "eagle3"]

NUM_LAYERS = 3  # of the target models
NUM_SCORED = 140  # tokens that the EAGLE-3 head scores


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight


class Twin(nn.Module):
    """A head beside its target model, which is not trained."""

    def __init__(self, kind: Kind, model: Any) -> None:
        super().__init__()
        self.kind = kind
        self._model = [model]  # in a list, so that it is no submodule
        config = model.config
        hidden, vocab_size = config.hidden_size, config.vocab_size
        self.fc = nn.Linear((3 if kind == "eagle3" else 2) * hidden, hidden, bias=kind == "eagle")
        if kind == "mtp":
            self.layer, self.rotary = model.model.layers[NUM_LAYERS], model.model.rotary_emb
        elif kind == "qwen_mtp":
            own = copy.deepcopy(config)
            own.mlp_only_layers = []
            attending = config.layer_types.index("full_attention")
            self.layer = type(model.model.layers[0])(own, attending)
            self.rotary = model.model.rotary_emb
        else:
            own = LlamaConfig(**_own_config(config, kind))
            own._attn_implementation = "eager"
            self.config = own
            self.layer, self.rotary = LlamaDecoderLayer(own, 0), LlamaRotaryEmbedding(own)
            self.layer.input_layernorm = nn.Identity()
        if kind != "eagle":
            # Qwen stores a norm's weights as their difference from one.
            make = type(model.model.norm) if kind == "qwen_mtp" else Norm
            self.token_norm, self.state_norm, self.norm = (make(hidden) for _ in range(3))
        if kind == "eagle3":
            for name in "qkv":
                given = getattr(self.layer.self_attn, f"{name}_proj")
                wider = nn.Linear(2 * hidden, given.out_features, bias=False)
                setattr(self.layer.self_attn, f"{name}_proj", wider)
            self.lm_head = nn.Linear(hidden, NUM_SCORED, bias=False)
            self.scored = torch.randperm(vocab_size)[:NUM_SCORED].sort().values
        for parameter in self.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0.0, 0.12)  # larger weights amplify rounding errors

    @torch.no_grad()
    def features(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The features it reads from the target model for a text [n]: [n, size]."""
        model = self._model[0]
        if self.kind == "qwen_mtp":
            return model.model(token_ids[None]).last_hidden_state[0]
        states = model(token_ids[None], output_hidden_states=True).hidden_states
        if self.kind == "eagle3":  # the inputs of layers 2, 3 // 2 and 3 - 3
            return torch.cat([states[layer][0] for layer in (0, 1, 2)], dim=-1)
        if self.kind == "mtp":  # the layer after the model's last belongs to the head
            return model.model.norm(states[NUM_LAYERS][0])
        return states[NUM_LAYERS][0]

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run tokens [n], each with the features of the previous position.

        Returns new features [n, hidden_size], which may serve as input features later, and the
        scores of the next tokens [n, vocab_size].
        """
        model = self._model[0]
        tokens = model.get_input_embeddings()(token_ids)
        count = token_ids.numel()
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        positions = torch.arange(count)[None]
        rotation = self.rotary(tokens[None], positions)
        given = {"attention_mask": mask, "position_embeddings": rotation}
        if self.kind == "eagle3":
            if features.shape[-1] != tokens.shape[-1]:
                features = self.fc(features)
            both = torch.cat((self.token_norm(tokens), self.state_norm(features)), dim=-1)
            x = features + self.layer.self_attn(both[None], **given)[0][0]
            x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
            scores = torch.full((count, model.config.vocab_size), float("-inf"))
            scores[:, self.scored] = self.lm_head(self.norm(x))
            return x, scores
        if self.kind.endswith("mtp"):
            tokens, features = self.token_norm(tokens), self.state_norm(features)
        x = self.fc(torch.cat((tokens, features), dim=-1))
        x = self.layer(x[None], position_ids=positions, **given)
        x = (x[0] if isinstance(x, tuple) else x)[0]
        if self.kind == "qwen_mtp":  # its next input is the norm's output
            x = self.norm(x)
            return x, model.lm_head(x)
        return x, model.lm_head(self.norm(x) if self.kind == "mtp" else x)

    @torch.no_grad()
    def chain(self, token_ids: list[int], count: int) -> torch.Tensor:
        """The scores of ``count`` greedy drafts after a text: [count, vocab_size].

        Each is computed from the features of the one before.
        """
        tokens = torch.tensor(token_ids)
        features = self.features(tokens)[:-1]
        if self.kind == "eagle3":
            features = self.fc(features)
        tokens, told = tokens[1:], []
        for _ in range(count):
            made, scores = self(tokens, features)
            told.append(scores[-1])
            tokens = torch.cat((tokens, scores[-1:].argmax(-1)))
            features = torch.cat((features, made[-1:]))
        return torch.stack(told)

    def learn(
        self, texts: Sequence[Sequence[int]], num_prompts: Sequence[int], steps: int
    ) -> float:
        """Train for ``steps`` epochs to predict what follows the prompts; returns the last loss.

        Only the first draft is learned.
        """
        tokens = [torch.tensor(text) for text in texts]
        features = [self.features(text)[:-2] for text in tokens]
        own = [p for n, p in self.named_parameters() if n != "layer.mlp.gate.weight"]
        optimizer = torch.optim.Adam(own, lr=3e-3)
        total = 0.0
        for _ in range(steps):
            optimizer.zero_grad()
            total = 0.0
            for text, read, begin in zip(tokens, features, num_prompts, strict=True):
                scores = self(text[1:-1], read)[1][max(0, begin - 2) :]
                wanted = text[2:][max(0, begin - 2) :]
                if self.kind == "eagle3":
                    is_scored = torch.isin(wanted, self.scored)
                    scores, wanted = scores[is_scored], wanted[is_scored]
                loss = functional.cross_entropy(scores, wanted)
                loss.backward()
                total += loss.item() / len(tokens)
            optimizer.step()
        return total

    def save(self, directory: Path) -> Path:
        """Save an EAGLE head in its own directory, an ``mtp`` head in that of its model."""
        if self.kind == "mtp":
            return self._save_mtp(directory)
        if self.kind == "qwen_mtp":
            return self._save_qwen_mtp(directory)
        prefix = "midlayer." if self.kind == "eagle3" else "layers.0."
        layer = self.layer.state_dict()
        tensors = {prefix + name: tensor for name, tensor in layer.items()}
        tensors["fc.weight"] = self.fc.weight
        config = self.config.to_diff_dict() | {"architectures": ["LlamaForCausalLMEagle"]}
        if self.kind == "eagle":
            tensors["fc.bias"] = self.fc.bias
        else:
            tensors[prefix + "input_layernorm.weight"] = self.token_norm.weight
            tensors[prefix + "hidden_norm.weight"] = self.state_norm.weight
            tensors["norm.weight"] = self.norm.weight
            tensors["lm_head.weight"] = self.lm_head.weight
            tensors["d2t"] = self.scored - torch.arange(NUM_SCORED)
            tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
            tensors["t2d"][self.scored] = True
            config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": NUM_SCORED}
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        save_file(_plain(tensors), directory / "model.safetensors")
        return directory

    def _save_mtp(self, directory: Path) -> Path:
        model = self._model[0]
        model.generation_config.pad_token_id = 0
        model.save_pretrained(directory)
        tiny_models.edit_config(
            directory, num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=1, layer_types=None
        )
        path, prefix = directory / "model.safetensors", f"model.layers.{NUM_LAYERS}."
        tensors = load_file(path) | {
            prefix + "eh_proj.weight": self.fc.weight,
            prefix + "enorm.weight": self.token_norm.weight,
            prefix + "hnorm.weight": self.state_norm.weight,
            prefix + "shared_head.norm.weight": self.norm.weight,
        }
        save_file(_plain(tensors), path, {"format": "pt"})
        return directory

    def _save_qwen_mtp(self, directory: Path) -> Path:
        model = self._model[0]
        model.save_pretrained(directory)
        path = directory / "model.safetensors"
        tensors = load_file(path) | {
            "mtp.fc.weight": self.fc.weight,
            "mtp.pre_fc_norm_embedding.weight": self.token_norm.weight,
            "mtp.pre_fc_norm_hidden.weight": self.state_norm.weight,
            "mtp.norm.weight": self.norm.weight,
        }
        layer = self.layer.state_dict()
        if model.config.model_type == "qwen3_next":  # published as separate experts
            gate_up, down = (layer.pop(f"mlp.experts.{name}_proj") for name in ("gate_up", "down"))
            for expert, (both, last) in enumerate(zip(gate_up, down, strict=True)):
                parts = zip(("gate", "up", "down"), (*both.chunk(2), last), strict=True)
                layer |= {f"mlp.experts.{expert}.{name}_proj.weight": part for name, part in parts}
        tensors |= {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()}
        save_file(_plain(tensors), path, {"format": "pt"})
        return directory


def build_mtp(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A model whose last layer belongs to a head: ``tiny_models.build`` with one more layer."""
    return tiny_models.build(kind, seed, num_hidden_layers=NUM_LAYERS + 1, **changes)


def build(kind: Kind, model: Any, seed: int = 1) -> Twin:
    """A random head of a model; for ``mtp`` the model must come from ``build_mtp``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Twin(kind, model).eval()


def _own_config(config: Any, kind: Kind) -> dict[str, Any]:
    """The head's config: attention heads of its own number and size."""
    return {
        **{"vocab_size": config.vocab_size, "hidden_size": config.hidden_size},
        **{"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4},
        **{"num_key_value_heads": 2 if kind == "eagle3" else 4, "head_dim": 16},
        **{"max_position_embeddings": 64, "rms_norm_eps": 1e-5},
        **{"bos_token_id": 1, "eos_token_id": 2},
    }


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
