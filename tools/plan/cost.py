"""The time of a step, by what it computes."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.plan_rows import PlanRows
from tools.plan.least_squares import solve_non_negative

_HUBER = 0.1  # relative error above which a step counts less: other processes disturbed it
_ROUNDS = 12
NUM_COSTS = 8  # terms of a step's cost: StepShape.features


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """The shape of a step, summed over its rows and passes."""

    num_passes: int
    num_decodes: int  # rows with one token
    decode_context: int  # tokens that those rows read from the KV cache
    num_prompts: int  # rows with several tokens
    num_prompt_tokens: int
    prompt_pairs: int  # pairs of a prompt token and a token it attends to

    @classmethod
    def of(cls, rows: PlanRows) -> StepShape:
        """The shape of a plan's rows, including all of their passes."""
        decodes = context = prompts = tokens = pairs = 0
        most = 1
        for place, (start, ids) in enumerate(zip(rows.starts, rows.token_ids, strict=True)):
            count = len(ids)
            if count > 1:
                prompts += 1
                tokens += count
                pairs += count * start + count * (count + 1) // 2
                continue
            passes = rows.num_passes.get(place, 1)
            most = max(most, passes)
            decodes += passes
            context += passes * (start + 1) + passes * (passes - 1) // 2
        return cls(most, decodes, context, prompts, tokens, pairs)

    @property
    def features(self) -> tuple[float, ...]:
        """The terms of a linear model; see :class:`FittedCost`."""
        return (
            1.0,
            self.num_passes,
            self.num_decodes,
            self.decode_context,
            min(1, self.num_prompts),
            self.num_prompts,
            self.num_prompt_tokens,
            self.prompt_pairs,
        )


class FittedCost(msgspec.Struct, frozen=True, tag="fitted"):
    """A linear model of seconds.

    Its terms are: a step; each pass, decoding row and token it reads; whether there is a prompt;
    each prompt, prompt token and attended pair.
    """

    seconds: tuple[float, ...]  # for each of StepShape.features

    def step_s(self, shape: StepShape) -> float:
        """The duration of a step, in seconds."""
        return sum(map(operator.mul, self.seconds, shape.features))


class Roofline(msgspec.Struct, frozen=True, tag="roofline"):
    """A roofline (Williams, Waterman and Patterson 2009).

    A step takes the longer of the times for its memory reads and its products, divided by the share
    of both ceilings that is reached.
    """

    weights_bytes: float
    kv_bytes_per_token: float
    num_parameters: float  # multiplied per token
    bytes_per_s: float
    flops_per_s: float
    attention_flops: float = 0.0  # per pair of tokens, over all layers
    state_bytes: float = 0.0  # per sequence, read and written for each of its tokens
    efficiency: float = 0.6
    overhead_s: float = 0.0005  # per step
    launch_s: float = 0.0  # host time to launch a pass's kernels one by one

    def step_s(self, shape: StepShape) -> float:
        """The duration of a step, in seconds."""
        tokens = shape.num_decodes + shape.num_prompt_tokens
        pairs = shape.decode_context + shape.prompt_pairs
        read = self.weights_bytes * shape.num_passes + self.kv_bytes_per_token * num_kv_tokens_read(
            shape
        )
        read += 2 * self.state_bytes * (shape.num_decodes + shape.num_prompts)
        flops = 2.0 * self.num_parameters * tokens + self.attention_flops * pairs
        slowest_s = max(read / self.bytes_per_s, flops / self.flops_per_s)
        launch_s = self.launch_s * shape.num_passes
        return self.overhead_s + max(slowest_s / self.efficiency, launch_s)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The interconnect between the ranks of a model.

    A collective takes a latency, plus the time for the bytes that each rank sends:

        all-reduce    latency + 2 (n - 1) / n * bytes / bandwidth  (a ring: Patarasuk, Yuan 2009)
        others        latency + bytes / bandwidth

    So the bandwidth is what nccl-tests calls an all-reduce's bus bandwidth. The latency is assumed
    to be the same for any number of ranks.
    """

    bytes_per_s: float
    latency_s: float  # per call

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        """The seconds of an all-reduce."""
        return self.latency_s + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.bytes_per_s

    def send_s(self, num_bytes: float) -> float:
        """The seconds of sending data from one rank to another."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """The communication of a stage's ranks in a pass."""

    num_all_reduces: int = 0  # all-reduces
    all_reduce_bytes: float = 0.0  # of all of these together, per token
    num_broadcasts: int = 0
    broadcast_bytes: float = 0.0  # per token
    sampling_bytes: float = 0.0  # both ways, per row that chooses a token: states, logits
    activation_bytes: float = 0.0  # per token, to the next stage
    returned_bytes: float = 0.0  # per row that chooses a token, from the last stage to the first


class Stage(msgspec.Struct, frozen=True):
    """A run of a model's layers, held by several ranks together."""

    compute: Roofline  # of the rank with the largest share
    num_ranks: int
    communication: Communication

    def step_s(self, shape: StepShape, link: Link) -> float:
        """Seconds from receiving a step's inputs to passing on its outputs."""
        said, passes = self.communication, shape.num_passes
        tokens = shape.num_decodes + shape.num_prompt_tokens
        choices = shape.num_decodes + shape.num_prompts
        taken_s = self.compute.step_s(shape)
        if self.num_ranks > 1:
            calls = said.num_all_reduces * passes
            if calls:
                a_call = said.all_reduce_bytes * tokens / calls
                taken_s += calls * link.all_reduce_s(a_call, self.num_ranks)
            num_bytes = said.broadcast_bytes * tokens + said.sampling_bytes * choices
            calls = said.num_broadcasts + (2 if said.sampling_bytes else 0)
            taken_s += calls * passes * link.latency_s + num_bytes / link.bytes_per_s
        if said.activation_bytes:
            taken_s += link.send_s(said.activation_bytes * tokens)
        if said.returned_bytes:
            taken_s += link.send_s(said.returned_bytes * choices)
        return taken_s


class ParallelCost(msgspec.Struct, frozen=True, tag="shared"):
    """A model on several devices: the computation and communication of each stage's ranks."""

    stages: tuple[Stage, ...]
    link: Link

    def step_s(self, shape: StepShape) -> float:
        """The seconds that a step takes through all stages."""
        return sum(self.stages_s(shape))

    def stages_s(self, shape: StepShape) -> tuple[float, ...]:
        """The seconds that a step takes in each stage."""
        return tuple(stage.step_s(shape, self.link) for stage in self.stages)


Cost = FittedCost | Roofline | ParallelCost


def stages_s(cost: Cost, shape: StepShape) -> tuple[float, ...]:
    """The seconds that a step takes in each of its stages."""
    return cost.stages_s(shape) if isinstance(cost, ParallelCost) else (cost.step_s(shape),)


def num_kv_tokens_read(shape: StepShape) -> float:
    """The number of tokens whose keys and values a step reads.

    A prompt's context counts once for all of its tokens, on average.
    """
    if not shape.num_prompt_tokens:
        return shape.decode_context
    per_prompt = shape.num_prompt_tokens / shape.num_prompts
    return shape.decode_context + shape.prompt_pairs / per_prompt


class FitErrors(msgspec.Struct, frozen=True):
    """How far a fitted cost is from the measurements."""

    num_steps: int
    median_error: float  # absolute relative error
    p90_error: float


def fit(shapes: Sequence[StepShape], seconds: Sequence[float]) -> tuple[FittedCost, FitErrors]:
    """Fit non-negative costs to the measured steps, minimising relative errors.

    Least squares, iterated with Huber's weights (1964) so that disturbed steps count less. Costs
    that would be negative are set to zero (an active-set method, one at a time).

    Raises:
        ValueError: there are fewer steps than costs.
    """
    taken = np.asarray(seconds, dtype=np.float64)
    terms = np.asarray([shape.features for shape in shapes], dtype=np.float64)
    if len(taken) < terms.shape[1]:
        raise ValueError(f"{len(taken)} steps are too few to fit {terms.shape[1]} costs to")
    scaled = terms / taken[:, None]
    weights = np.ones(len(taken))
    costs = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        costs = solve_non_negative(scaled * weights[:, None], weights)
        errors = np.abs(scaled @ costs - 1.0)
        weights = np.sqrt(np.minimum(1.0, _HUBER / np.maximum(errors, 1e-9)))
    found = sorted(float(error) for error in np.abs(scaled @ costs - 1.0))
    return FittedCost(tuple(float(cost) for cost in costs)), FitErrors(
        num_steps=len(taken),
        median_error=statistics.median(found),
        p90_error=found[int(0.9 * (len(found) - 1))],
    )
