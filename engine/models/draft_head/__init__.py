"""Heads that guess what their model will say, from its own hidden states.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437), EAGLE (2401.15077) and EAGLE-3 (2503.01840):
one decoder layer each, which reads a token together with what the model made of the token before.
"""
