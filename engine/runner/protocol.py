"""The engine loop's interface to a runner: a plan goes in, a result comes out.

The scheduler decides and the runner obeys. The runner keeps a *row* for each sequence that was
added (block table, tokens so far, sampling state) and knows nothing else about requests: no queue,
no order, no limits. It neither reorders nor drops rows.

**The row contract.** One plan is applied in this order:

1. ``removed``: delete these rows. Unknown ids are skipped. This comes first because a preempted
   sequence may be in both ``removed`` and ``added`` of one plan.
2. ``added``: create a row from the request and its output so far, with an empty block table. Every
   added sequence has a row in the same plan.
3. ``rows[i].new_block_ids``: append to the row's block table. The token at position ``p`` is in
   slot ``table[p // block_size] * block_size + p % block_size``. If ``EngineInfo.window`` is set,
   blocks that lie wholly before a row's window may have been reused by other sequences.
4. ``offloads``: copy whole blocks to slots in host memory, before this step writes anything. Then
   ``loads``: copy to blocks from slots that earlier offloads have filled.
5. ``copies``: copy whole blocks, all of them before the step's writes. Nothing above has changed
   the source blocks.
6. ``restores``, for recurrent models: rows that begin after their first token start from the state
   in a snapshot line that an earlier step saved. All other rows continue from their own state, or
   from an empty one at position 0.
7. The rows' tokens at positions ``[start, start + len(token_ids))``: write their keys and values;
   each token attends to positions ``0 .. p`` of its own sequence. A token sampled by an earlier
   step comes back as (part of) a later row's ``token_ids``, or as ``PENDING_TOKEN``: the token that
   this row sampled last, which the scheduler has not seen yet. No two rows write the same slot. No
   row writes to a block that another sequence references, except to rewrite the same contents when
   a row is recomputed from its first token.
8. Rows with ``is_sampled``: sample the next token. It is a function of the row's logits, sampling
   parameters, output so far, seed and position alone, never of the rest of the batch.
9. Rows with ``num_passes`` above 1: compute the sampled token at the next position and sample
   again, until the row has computed ``num_passes`` tokens. Its blocks have room for them. A runner
   may do fewer passes, but at least the first; it returns one token per pass done.
10. ``saves``: copy rows' states to snapshot lines.

**Prompt log-probabilities.** A row over positions ``[s, e)`` of a request with ``prompt_logprobs``
yields those of the prompt tokens at positions ``s + 1 .. min(e, P - 1)``, where ``P`` is the
prompt's length: each is judged by the logits of the position before it.

**Pooling.** A row of a request with ``pooling`` never samples. It yields its tokens' contribution
to the request's vector: for ``mean`` the sum of their hidden states, divided by the number of the
prompt's tokens; for ``max`` their elementwise maximum; for ``cls`` the state of position 0; and for
``last`` (and ``scores``) the state of the prompt's last position, if the row holds it. The runner
keeps none of this.

**Overlap.** ``launch`` may return before the step is computed. Steps are computed in launch order,
each as if the steps before it were done, so the next step can be planned and launched while this
one runs. A row may turn out to be superfluous, because the result that ends its sequence arrived
after the launch: it is computed like any other, and its token is discarded.

**Faults.** A row whose own numbers are at fault (logits that are not finite) is reported in
``StepResult.errors`` and affects no other row. When a step raises, at its launch or at its result,
the caller cannot know how far it got. To find the faulty rows it runs parts of the same step again.
Each such plan *reintroduces* its rows: they are in both ``removed`` and ``added``, with their whole
block table. For recurrent models, earlier plans first recompute each row's tokens from its first
one; the first of these plans reintroduces the row. Before all of these comes a plan with the step's
loads alone; the step's offloads and saves are never repeated. A runner therefore needs no undo. It
must only accept such plans after it has raised, and return what the first run would have returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Protocol, runtime_checkable

from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.media import Media
from engine.profiler import Spans
from engine.types import Adapter, EngineInfo, StepPlan, StepResult


class LaunchedStep(Protocol):
    """A step that has been launched."""

    def result(self) -> StepResult:
        """Wait until the step is computed and return its result. Called once.

        Every row with ``is_sampled`` is in the result, either as an id with tokens, in the order of
        the plan's rows, or as an error.

        Raises:
            OutOfMemory: the step did not fit in the device's memory (``MemoryError`` counts too).
            EngineDead: the device is lost and no later call can succeed; the engine ends.
            Exception: anything else; the caller searches for the faulty rows as described above.
        """
        ...


class LoadRunner(Protocol):
    """Loads a model and makes a runner for it."""

    def __call__(self, config: EngineConfig, on_progress: LoadProgress | None = None) -> Runner:
        """See ``engine.runner.load_runner``. Raises ModelLoadError."""
        ...


class Runner(Protocol):
    """Executes plans. All calls come from one thread."""

    @property
    def info(self) -> EngineInfo:
        """What was loaded; ``info.memory`` has the number and size of KV blocks."""
        ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start one step (see the row contract above). Raises what ``LaunchedStep.result``
        raises."""
        ...

    def set_spans(self, spans: Spans) -> None:
        """From now on, mark ``inputs``, ``forward`` and ``sample`` of each step with ``spans``."""
        ...

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter before rows name it; quick if it is already loaded.

        Raises:
            InvalidParameter: it does not fit this model, or the runner takes no adapters.
        """
        ...

    def prepare(self) -> bool:
        """Do a piece of work that speeds up later steps, such as capturing a CUDA graph.

        Called now and then once the first answers are out, so that startup does not wait for it.
        Returns whether there is more to do.
        """
        ...

    def sleep(self, level: int) -> SleepingRunner:
        """End this runner between two steps; it must not be used afterwards.

        What it leaves behind can become a runner again. Level 0 keeps the weights in place, level 1
        moves those on a GPU to host memory, level 2 keeps none.

        Raises:
            SleepRefused: this runner cannot sleep; it stays usable.
        """
        ...


class SleepingRunner(Protocol):
    """What a runner leaves behind. Every call raises EngineDead if a part of the model is lost."""

    def release(self) -> None:
        """Free the memory that is not kept; called once nothing references the runner."""
        ...

    def wake(self) -> Runner:
        """Return a runner with an empty KV cache; this object is not used afterwards.

        Raises:
            ModelLoadError: out of memory, or the weights cannot be read; it may be tried again.
        """
        ...

    def with_weights(self, model: str) -> SleepingRunner:
        """Return the same model with the weights in the directory ``model``.

        They are read while the sleeping weights are kept; both are in memory until this object is
        dropped.

        Raises:
            ModelLoadError: they cannot be read, or belong to another model. This object is
                unchanged.
        """
        ...


@runtime_checkable
class SupportsOnLoss(Runner, Protocol):
    """A runner that may lose parts of its model between steps."""

    def on_loss(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the reason, in a thread of its own, when that happens.

        Without it the next step raises EngineDead.
        """
        ...


class ImagePrefetcher(Protocol):
    """Reads images and audio ahead of the steps that compute their tokens."""

    @property
    def capacity(self) -> int:
        """How many cells are cached at once; images that must be kept may exceed it."""
        ...

    def num_cells(self, image: Media) -> int:
        """Number of cells of an image, or of a clip's tokens."""
        ...

    def is_cached(self, image: Media) -> bool:
        """Return whether the image's embeddings are cached."""
        ...

    def pin(self, digests: Set[bytes]) -> None:
        """Keep these images, once they are read, until the next call."""
        ...

    def prefetch(self, image: Media) -> Iterator[None]:
        """Read an image, one piece at each iteration; after the last one it is cached.

        Raises:
            RequestFailed: the embeddings are not finite.
            Exception: as ``LaunchedStep.result``.
        """
        ...


@runtime_checkable
class SupportsImagePrefetch(Protocol):
    """A runner that may read images between steps."""

    @property
    def image_prefetcher(self) -> ImagePrefetcher | None:
        """The reader; None: steps read the images themselves."""
        ...


class CompletedStep:
    """A step that was computed at its launch."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """See ``LaunchedStep``."""
        return self._result
