"""What a step takes, by what it computes."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.plan_rows import PlanRows

_HUBER = 0.1  # relative error, beyond which a measured step counts less: others used the machine
_ROUNDS = 12
NUM_COSTS = 8  # of a step: StepShape.features


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """What a step computes, summed over its rows and passes."""

    num_passes: int
    num_decodes: int  # rows of one token
    decode_context: int  # tokens that those read from the KV cache
    num_prompts: int  # rows of several
    num_prompt_tokens: int
    prompt_pairs: int  # of a prompt's tokens and those that they attend to

    @classmethod
    def of(cls, rows: PlanRows) -> StepShape:
        """The shape of a plan's rows, all of their passes included."""
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
        """The terms of a linear model; see :class:`Fitted`."""
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


class Fitted(msgspec.Struct, frozen=True, tag="fitted"):
    """Seconds as a sum: of a step, each pass, decoding row and token it reads, of there being a
    prompt, each prompt, token and pair of it.
    """

    seconds: tuple[float, ...]  # of each of StepShape.features

    def step_s(self, shape: StepShape) -> float:
        """Seconds that the step takes."""
        return sum(map(operator.mul, self.seconds, shape.features))


class Roofline(msgspec.Struct, frozen=True, tag="roofline"):
    """What the memory takes to be read, or the products to be made, whichever is longer
    (Williams, Waterman and Patterson 2009), over the share of both ceilings that is reached.
    """

    weights_bytes: float
    kv_bytes_per_token: float
    num_parameters: float  # that a token is multiplied with
    bytes_per_s: float
    flops_per_s: float
    attention_flops: float = 0.0  # of a pair of tokens, over all layers
    state_bytes: float = 0.0  # of a sequence, read and written for each of its tokens
    efficiency: float = 0.6
    overhead_s: float = 0.0005  # of a step

    def step_s(self, shape: StepShape) -> float:
        """Seconds that the step takes."""
        tokens = shape.num_decodes + shape.num_prompt_tokens
        pairs = shape.decode_context + shape.prompt_pairs
        read = self.weights_bytes * shape.num_passes + self.kv_bytes_per_token * pairs_read(shape)
        read += 2 * self.state_bytes * (shape.num_decodes + shape.num_prompts)
        flops = 2.0 * self.num_parameters * tokens + self.attention_flops * pairs
        slowest_s = max(read / self.bytes_per_s, flops / self.flops_per_s)
        return self.overhead_s + slowest_s / self.efficiency


Cost = Fitted | Roofline


def pairs_read(shape: StepShape) -> float:
    """Tokens whose keys and values a step reads: those of a prompt's context once for all of its
    tokens, on average."""
    if not shape.num_prompt_tokens:
        return shape.decode_context
    per_prompt = shape.num_prompt_tokens / shape.num_prompts
    return shape.decode_context + shape.prompt_pairs / per_prompt


class FitErrors(msgspec.Struct, frozen=True):
    """How far a fitted cost is from what was measured."""

    num_steps: int
    median_error: float  # relative, without its sign
    p90_error: float


def fit(shapes: Sequence[StepShape], seconds: Sequence[float]) -> tuple[Fitted, FitErrors]:
    """The non-negative costs that come nearest to the measured steps, by their relative errors.

    Least squares, iterated with Huber's weights (1964) so that a step that was disturbed counts
    for less; a cost that would be negative is left out (an active set of one at a time).

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
        costs = _non_negative(scaled * weights[:, None], weights)
        errors = np.abs(scaled @ costs - 1.0)
        weights = np.sqrt(np.minimum(1.0, _HUBER / np.maximum(errors, 1e-9)))
    found = sorted(float(error) for error in np.abs(scaled @ costs - 1.0))
    return Fitted(tuple(float(cost) for cost in costs)), FitErrors(
        num_steps=len(taken),
        median_error=statistics.median(found),
        p90_error=found[int(0.9 * (len(found) - 1))],
    )


def _non_negative(terms: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares over the terms whose factors are not negative."""
    active = list(range(terms.shape[1]))
    while True:
        size = np.linalg.norm(terms[:, active], axis=0)
        size[size == 0] = 1.0
        factors = np.linalg.lstsq(terms[:, active] / size, target, rcond=1e-10)[0] / size
        worst = int(np.argmin(factors))
        if factors[worst] >= 0:
            break
        del active[worst]
    result = np.zeros(terms.shape[1])
    result[active] = factors
    return result
