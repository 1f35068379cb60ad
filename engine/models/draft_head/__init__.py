"""Heads that draft tokens from their model's own hidden states.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437), EAGLE (2401.15077) and EAGLE-3 (2503.01840)
each have one decoder layer, whose input is a token together with the model's state of the token
before.
"""
