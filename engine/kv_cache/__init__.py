"""The paged KV cache: bookkeeping of blocks (no torch), and the tensors they name."""
