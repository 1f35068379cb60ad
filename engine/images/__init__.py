"""Images in prompts, up to the engine: decoded, scaled for the model, and replaced by tokens.

    file ──read_image──► ProcessedImage, which may be cut into tiles
         ──make_rewriter──► prompt text that names the tiles
         ──expand_image_tokens──► prompt ids with a token for each cell, Images

The embeddings are computed in the engine process (``engine/models/vision``); nothing here imports
torch.
"""
