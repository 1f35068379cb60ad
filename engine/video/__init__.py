"""Videos in prompts, up to the engine: decoded, sampled, scaled, and replaced by tokens.

    file ──VideoReader──► ProcessedVideo, parts of one or more frames
         ──make_rewriter──► prompt text that tells the time of each part, for models that read it
         ──expand_image_tokens──► prompt ids with a token for each cell, and an Image for each part

To the engine each part is an image of several frames: encoders see the parts of a video one by one,
so each is embedded, kept and found in the prefix cache by itself. Nothing here imports torch.
"""
