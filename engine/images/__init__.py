"""Images in prompts, up to the engine: read, scaled to what a model sees, given their tokens.

    file ──read_image──► Picture ──place_images──► prompt ids with a token for each cell, Images

The embeddings are computed in the engine process (``engine/models/vision``); nothing here imports
torch.
"""
