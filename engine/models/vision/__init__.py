"""Vision encoders: an image becomes the embeddings of its tokens in a prompt.

    pixels ─► patches ─► [ attention ─► MLP ] x layers ─► merger ─► an embedding for each cell

A *patch* is the square of pixels that the encoder embeds, a *cell* the square of patches that
becomes one token. Images are computed one at a time, so that an image's bits do not depend on the
others.
"""
