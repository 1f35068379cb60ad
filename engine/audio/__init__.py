"""Audio in prompts, up to the engine: decoded, resampled for the model, and replaced by tokens.

    file ──AudioReader──► ProcessedAudio, mono samples at the model's rate
         ──expand_audio_tokens──► prompt ids with a token for each embedding, AudioClips

Features and embeddings are computed in the engine process (``engine/models/audio``); nothing here
imports torch.
"""
