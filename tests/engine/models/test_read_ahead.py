"""Which weights a step of few tokens requests before they are needed."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.models.small_batch import SmallBatchExperts, SmallBatchLayer, SmallBatchMlp, read_ahead

MIB = 1 << 20
QWEN_06B = {"qkv": 8, "output": 4, "gate_up": 12, "down": 6}
LLAMA_1B = {"qkv": 12, "output": 8, "gate_up": 64, "down": 32}
LLAMA_8B = {"qkv": 48, "output": 32, "gate_up": 224, "down": 112}


class Product:
    """A layer of so many MiB that remembers what it requests."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.memory = torch.empty(size * MIB, dtype=torch.uint8, device="meta")
        self.requested: tuple[str, int] | None = None

    def read_ahead(self, later: Product, num_bytes: int) -> None:
        self.requested = later.name, num_bytes // MIB


def layers(sizes: dict[str, int], count: int = 2) -> list[SmallBatchLayer]:
    none: Any = None
    found = []
    for i in range(count):
        made: list[Any] = [Product(f"{i}.{name}", size) for name, size in sizes.items()]
        qkv, output, gate_up, down = made
        mlp = SmallBatchMlp(none, gate_up, none, down)
        found.append(SmallBatchLayer(none, none, qkv, output, mlp))
    return found


def requests(given: list[SmallBatchLayer]) -> dict[str, tuple[str, int] | None]:
    read_ahead(given)
    products: list[Any] = [product for layer in given for product in layer.products]
    return {product.name: product.requested for product in products if product is not None}


def test_small_layers_request_all_of_the_product_after_next() -> None:
    assert requests(layers(QWEN_06B)) == {
        "0.qkv": ("0.gate_up", 12),
        "0.output": ("0.down", 6),
        "0.gate_up": ("1.qkv", 8),
        "0.down": ("1.output", 4),
        "1.qkv": ("1.gate_up", 12),
        "1.output": ("1.down", 6),
        "1.gate_up": None,
        "1.down": None,
    }


@pytest.mark.parametrize("sizes", [QWEN_06B, LLAMA_1B, LLAMA_8B])
def test_nothing_read_in_between_evicts_what_was_requested(sizes: dict[str, int]) -> None:
    given = layers(sizes)
    read_ahead(given)
    products: list[Any] = [product for layer in given for product in layer.products]
    for product, following in pairwise(products):
        if product.requested is not None:
            held = product.memory.nbytes + following.memory.nbytes
            assert held // MIB + product.requested[1] <= 32


def test_large_layers_request_what_there_is_room_for() -> None:
    assert requests(layers(LLAMA_1B))["0.qkv"] == ("0.gate_up", 12)
    assert set(requests(layers(LLAMA_8B)).values()) == {None}


def test_experts_are_not_requested_nor_what_follows_them() -> None:
    parts: list[Any] = [SimpleNamespace() for _ in range(7)]
    experts = SmallBatchExperts(*parts)
    given = [layer._replace(mlp=experts) for layer in layers(QWEN_06B)]
    assert set(requests(given).values()) == {None}
