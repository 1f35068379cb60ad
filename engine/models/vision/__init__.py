"""Vision encoders: an image becomes the embeddings of the tokens that stand for it in a prompt.

    pixels ─► patches ─► [ attention ─► MLP ] x layers ─► merger ─► an embedding for each cell

A *patch* is the square of pixels that the encoder sees as one, a *cell* the square of patches that
becomes one token. One image is computed at a time, so that it has the same bits in any company.
"""
