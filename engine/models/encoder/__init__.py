"""Encoders like BERT: every token of a text attends to all others, and nothing is generated.

A text is computed whole, in one step; there is no KV cache. The result is pooled into one vector,
or scored by a classification head.
"""
