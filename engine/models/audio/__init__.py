"""Audio encoders: a clip becomes the embeddings of its tokens in a prompt.

    samples ─► log-mel frames ─► convolutions ─► [ attention ─► MLP ] x layers ─► projector

Layers and projectors are those of vision encoders (``engine/models/vision/layers.py``). Clips are
computed one at a time, so that a clip's bits do not depend on the others.
"""
