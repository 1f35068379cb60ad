"""How an engine's memory is divided, as planned at start."""

from __future__ import annotations

import msgspec


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the memory is divided, in bytes, as planned at start."""

    weights_bytes: int
    kv_cache_bytes: int
    free_bytes: int  # left on the device after both
    bytes_per_token: int  # KV of all layers, including scales of codes and a draft model's KV
    num_blocks: int
    block_size: int
    max_model_len: int  # longest context served
    max_idle_blocks: int | None = None  # see BlockPool
    num_host_blocks: int = 0  # capacity of the host tier, in blocks
    host_bytes: int = 0  # memory taken by these
    cache_dtype: str = ""  # of keys and values; "" if there is no cache
    num_states: int = 0  # recurrent models: sequences that may run at once
    num_snapshots: int = 0  # saved recurrent states, for prompts with a common beginning
    state_bytes: int = 0  # memory taken by states and snapshots
    image_bytes: int = 0  # for embeddings of images and audio, and for computing them
    trial_bytes: int = 0  # for the inputs of states from drafts that are not verified yet

    def describe(self) -> str:
        """The plan in one line, for logs."""
        mib = 2**20
        if not self.kv_cache_bytes:
            longest = "context" if self.num_states else "input"
            return (
                f"memory: weights {self.weights_bytes / mib:.0f} MiB, no KV cache, "
                f"{self._describe_states()}free {self.free_bytes / mib:.0f} MiB, "
                f"longest {longest} {self.max_model_len:,} tokens"
            )
        return (
            f"memory: weights {self.weights_bytes / mib:.0f} MiB, "
            f"KV cache {self.kv_cache_bytes / mib:.0f} MiB = "
            f"{self.num_blocks:,} blocks of {self.block_size} tokens "
            f"({self.bytes_per_token:,} bytes a token in {self.cache_dtype}), "
            f"{self._describe_host()}{self._describe_states()}{self._describe_images()}"
            f"free {self.free_bytes / mib:.0f} MiB, longest context {self.max_model_len:,} tokens"
        )

    def _describe_states(self) -> str:
        if not self.num_states:
            return ""
        return (
            f"states of {self.num_states:,} sequences and {self.num_snapshots:,} snapshots "
            f"{self.state_bytes / 2**20:,.0f} MiB, "
            + (f"draft states {self.trial_bytes / 2**20:,.0f} MiB, " if self.trial_bytes else "")
        )

    def _describe_images(self) -> str:
        return f"images and audio {self.image_bytes / 2**20:,.0f} MiB, " if self.image_bytes else ""

    def _describe_host(self) -> str:
        if not self.num_host_blocks:
            return ""
        return (
            f"{self.num_host_blocks:,} more blocks in {self.host_bytes / 2**20:.0f} MiB of the "
            "host's memory, "
        )
