"""The paged KV cache: block bookkeeping (no torch), and the tensors behind the blocks."""
