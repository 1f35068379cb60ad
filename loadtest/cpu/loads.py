"""The loads, and a lower bound on the time each needs on a machine with given ceilings."""

from __future__ import annotations

import random
from dataclasses import dataclass

from loadtest.cpu.ceilings import Ceilings
from loadtest.models import ModelShape
from loadtest.workloads import SampleRequest


@dataclass(frozen=True)
class CpuLoad:
    """Greedy, streamed requests of fixed lengths, with ``concurrency`` of them in flight.

    With a shared prefix, the first request is sent alone so that it fills the prefix cache; the
    rest follow together.
    """

    name: str
    concurrency: int
    requests: int
    input_len: int  # tokens, including the shared prefix
    output_len: int
    prefix_len: int = 0

    @property
    def key(self) -> str:
        """The load's name in results."""
        return f"{self.name} {self.concurrency}"

    @property
    def output_tokens(self) -> int:
        """The output tokens of all requests together."""
        return self.requests * self.output_len

    def waves(self, vocab: int, rng: random.Random) -> list[list[SampleRequest]]:
        """Build the requests, in waves that are each sent once the previous one has ended.

        Prompts are random ids from the upper part of the vocabulary, which holds no special tokens.
        """

        def ids(count: int) -> list[int]:
            return [rng.randrange(vocab // 8, vocab) for _ in range(count)]

        shared = ids(self.prefix_len)
        own = self.input_len - self.prefix_len
        asks = [SampleRequest(shared + ids(own), self.output_len) for _ in range(self.requests)]
        return [asks[:1], asks[1:]] if shared else [asks]


MAIN = tuple(CpuLoad("main", c, n, 256, 64) for c, n in ((1, 5), (4, 12), (16, 32)))
OVERHEAD = tuple(CpuLoad("overhead", c, n, 64, 128) for c, n in ((1, 8), (16, 64), (64, 128)))
PREFIX = (CpuLoad("prefix", 16, 17, 1024 + 64, 64, prefix_len=1024),)


def layer_parameters(shape: ModelShape) -> int:
    """The number of weights in all layers; norms and biases are too few to count."""
    head_dim = shape.hidden // shape.heads
    attention = shape.hidden * head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate)


def floor_s(shape: ModelShape, load: CpuLoad, weight_bits: int, ceilings: Ceilings) -> float:
    """A lower bound on the duration of ``load``, in seconds.

    It counts the matrix products of every prompt at the matrix ceiling and, for each decode step of
    a full batch, the larger of the times for its bytes and its products. Attention products,
    activations and the few steps of a draining batch are left out. Weights of 8 bits or fewer
    multiply at the int8 ceiling.
    """
    ops_per_s = ceilings.bf16_flops_per_s if weight_bits > 8 else ceilings.int8_ops_per_s
    in_layers = layer_parameters(shape)
    weights = in_layers + shape.vocab * shape.hidden  # the tied embedding is the output layer
    kv_bytes_per_token = 4 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads)
    context = load.input_len + load.output_len / 2
    rows = load.concurrency
    step_bytes = weights * weight_bits / 8 + rows * context * kv_bytes_per_token
    step_s = max(step_bytes / ceilings.read_bytes_per_s, 2 * weights * rows / ops_per_s)
    own_len = load.input_len - load.prefix_len
    prompt_tokens = load.prefix_len + load.requests * own_len
    # With a shared prefix: one request alone, then the others together.
    alone = 1 if load.prefix_len else 0
    steps = (alone + (load.requests - alone) / rows) * load.output_len
    return 2 * in_layers * prompt_tokens / ops_per_s + steps * step_s
