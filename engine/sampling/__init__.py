"""Sampling: from logits to tokens, as a function of logits, parameters, seed and position."""
