"""Encoders of BERT's kind: every token of a text sees all the others, and nothing is generated.

A text is computed whole, in one step; there is no KV cache. What comes of it is pooled into one
vector, or scored by a classification head.
"""
