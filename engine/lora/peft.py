"""Reads adapters in the PEFT library's format, mapped to the decoder's own parameters."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import InvalidParameter, ModelLoadError
from engine.lora.files import CONFIG, WEIGHTS
from engine.models.latent import query_row_order
from engine.models.layouts import Transposed
from engine.models.modules import qkv_row_order
from engine.models.safetensors import Header, read_header, read_into
from engine.models.spec import DecoderSpec
from engine.models.tables import tables_of
from engine.models.weights import Target

MAX_RANK = 512
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_MAX_CONFIG_BYTES = 2**20

# A key of alpha_pattern: the end of a module's name. PEFT treats it as a regular expression.
_MODULES = re.compile(r"\^?[\w.]+")

# Keys of adapter_config.json that affect an adapter's computation, and the values that do not.
_NO_EFFECT_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "megatron_config": ({},),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "exclude_modules": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "use_bdlora": (),
}
# Ways to begin training that leave the base model as it is. Others (PiSSA, OLoRA, CorDA, LoftQ,
# LoRA-GA) take the adapter's beginning out of the base weights, and so does PEFT when it loads one.
_PLAIN_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class _Scale:
    """The scale of an adapter's products: ``alpha / r``, or ``alpha / sqrt(r)`` if ``by_root``.

    The latter is rsLoRA (Kalajdzievski 2023). Ranks are read from the tensors.
    """

    alpha: float
    by_root: bool
    patterns: dict[str, float]  # alpha of modules whose names end so, or after ^ equal this

    def of(self, module: str, rank: int) -> float:
        alpha = self.alpha
        for pattern, own in self.patterns.items():
            if f".{module}".endswith(f".{pattern}") or pattern == f"^{module}":
                alpha = own
                break
        return alpha / (math.sqrt(rank) if self.by_root else rank)


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to one linear layer: ``up @ down @ x``.

    For a fused layer the parts' ``down`` matrices are stacked, and their ``up`` matrices form a
    block diagonal.
    """

    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank], with the scale multiplied in


def read_adapter(directory: Path, spec: DecoderSpec, dtype: torch.dtype) -> dict[str, Delta]:
    """Read the deltas of an adapter onto the host, by the parameter they belong to.

    Raises:
        InvalidParameter: the directory has no adapter, one for another model, or one with
            unsupported features; the message is one line without the directory's path.
    """
    try:
        scale = _read_scale(directory / CONFIG)
        return _Reader(spec, dtype, read_header(directory / WEIGHTS), scale).read()
    except OSError as error:
        raise _refused(f"{Path(error.filename or CONFIG).name}: {error.strerror}") from None
    except ModelLoadError as error:
        raise _refused(str(error).replace(str(directory), "").lstrip("/")) from None


class _Reader:
    def __init__(
        self, spec: DecoderSpec, dtype: torch.dtype, header: Header, scale: _Scale
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self._header = header
        self._scale = scale
        tables = tables_of(spec)
        self._wanted = tables.parameters
        self._places = tables.targets
        self._full_name = tables.full_name  # PEFT has newer names than some checkpoints

    def read(self) -> dict[str, Delta]:
        parts: dict[str, dict[int | None, dict[str, torch.Tensor]]] = {}
        for name in sorted(self._header.entries):
            target, module, side = self._place(name)
            own = parts.setdefault(target.parameter, {}).setdefault(target.part, {})
            own[side] = self._tensor(name)
            if side == "B":
                own[side] *= self._scale.of(module, max(1, own[side].shape[1]))
                own[side] = self._arranged(target, own[side])
        return {parameter: self._fuse(parameter, own) for parameter, own in parts.items()}

    def _place(self, name: str) -> tuple[Target, str, str]:
        """The target of a tensor, its module's name, and which of the two matrices it is."""
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise _refused(f"tensor {name[:120]!r} is no part of a LoRA that is supported")
        module = match["module"]
        target = self._places.get(self._full_name(f"{module}.weight"))
        if target is None or _last(target.parameter) not in _LINEARS:
            raise _refused(f"module {module[:120]!r} is no linear layer that can be adapted here")
        return target, module, match["side"]

    def _tensor(self, name: str) -> torch.Tensor:
        entry = self._header.entries[name]
        if len(entry.shape) != 2 or not entry.dtype.is_floating_point:
            raise _refused(f"tensor {name[:120]!r} must be a matrix of floats")
        tensor = torch.empty(entry.shape, dtype=torch.float32)
        with self._header.path.open("rb") as file:
            read_into(file, entry, tensor)
        return tensor

    def _arranged(self, target: Target, up: torch.Tensor) -> torch.Tensor:
        """[outputs, rank] in the decoder's order of outputs.

        Adapters are not transposed, even if the checkpoint's weights are (GPT-2).
        """
        if target.layout is None or isinstance(target.layout, Transposed):
            return up
        expected = self._wanted[target.parameter].part_shape(target.part)[0]
        return target.layout.arrange(self._spec, up) if up.shape[0] == expected else up

    def _fuse(self, name: str, parts: dict[int | None, dict[str, torch.Tensor]]) -> Delta:
        parameter = self._wanted[name]
        inputs = parameter.trailing[0]
        downs: list[torch.Tensor] = []
        ups: list[torch.Tensor] = []
        for part, sides in sorted(parts.items(), key=lambda item: item[0] or 0):
            if len(sides) != 2:
                raise _refused(f"'{name}' has one of its two matrices only")
            down, up = sides["A"], sides["B"]
            rank = down.shape[0]
            rows = parameter.rows(part)
            shape = (rows.stop - rows.start, rank)
            if not 0 < rank <= MAX_RANK or down.shape[1] != inputs or up.shape != shape:
                raise _refused(
                    f"'{name}' has matrices of {list(down.shape)} and {list(up.shape)}, where "
                    f"this model's layer is [{shape[0]}, {inputs}] and ranks end at {MAX_RANK}"
                )
            placed = torch.zeros(parameter.shape[0], rank)
            placed[rows] = up
            downs.append(down)
            ups.append(placed)
        up = torch.cat(ups, dim=1)
        order = self._order(name)
        up = up if order is None else up[order]
        delta = Delta(torch.cat(downs).to(self._dtype), up.to(self._dtype))
        if not (delta.down.isfinite().all() and delta.up.isfinite().all()):
            raise _refused(f"'{name}' has numbers that are not finite in {self._dtype}")
        return delta

    def _order(self, name: str) -> torch.Tensor | None:
        """The order in which a layer's outputs are stored; None: as loaded."""
        number, _, parameter = name.partition(".")
        if parameter == "qkv.weight":
            layer = self._spec.layers[int(number) - self._spec.first_layer]
            return qkv_row_order(self._spec.for_layer(layer))
        if parameter == "query_up.weight" and self._spec.latent is not None:
            return query_row_order(self._spec, self._spec.latent)
        return None


# The layers of a decoder that accept adapters.
_LINEARS = frozenset(
    {
        *("qkv.weight", "output.weight", "query_up.weight", "latent_up"),
        *("recurrent.input.weight", "recurrent.output.weight"),
        *("gate_up.weight", "down.weight", "shared.gate_up.weight", "shared.down.weight"),
    }
)


def _last(parameter: str) -> str:
    """``3.qkv.weight`` -> ``qkv.weight``; a shared expert's keeps its prefix."""
    return parameter.partition(".")[2]


def _read_scale(path: Path) -> _Scale:
    with path.open("rb") as file:
        raw = file.read(_MAX_CONFIG_BYTES + 1)
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        raise _refused(f"{CONFIG} is not JSON") from None
    if not isinstance(config, dict) or len(raw) > _MAX_CONFIG_BYTES:
        raise _refused(f"{CONFIG} must be an object of at most 1 MiB")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _refused(f"peft_type is {kind!r:.40}; only 'LORA' is supported")
    for key, plain in _NO_EFFECT_VALUES.items():
        value = config.get(key)
        if value is not None and value not in plain:
            raise _refused(f"'{key}' is {value!r:.80}, which is not supported")
    begun = config.get("init_lora_weights", True)
    if begun is not None and begun not in _PLAIN_BEGINNINGS:
        raise _refused(
            f"'init_lora_weights' is {begun!r:.80}, so it changes the base weights too; PEFT saves "
            "it as a plain one with path_initial_model_for_weight_conversion"
        )
    alpha, by_root = config.get("lora_alpha", 8), config.get("use_rslora", False)
    if not _is_finite(alpha) or type(by_root) is not bool:
        raise _refused("'lora_alpha' must be a number, and 'use_rslora' true or false")
    return _Scale(float(alpha), by_root, _read_patterns(config.get("alpha_pattern") or {}))


def _read_patterns(patterns: Any) -> dict[str, float]:
    if not isinstance(patterns, dict):
        raise _refused("'alpha_pattern' must be an object")
    for pattern, alpha in patterns.items():
        if not _is_finite(alpha):
            raise _refused(f"'alpha_pattern' has {alpha!r:.40}, which is no number")
        if not _MODULES.fullmatch(pattern):
            raise _refused(f"'alpha_pattern' has {pattern!r:.80}: names of modules are understood")
    return patterns


def _is_finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _refused(why: str) -> InvalidParameter:
    return InvalidParameter(f"the adapter cannot be used: {why}", param="model")
