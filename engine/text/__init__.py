"""Conversion between text and token ids: tokenizer, chat template, decoding, stop strings.

    messages ──ChatTemplate──► prompt text ──Tokenizer──► token ids ──► engine
    text deltas ◄──OutputDecoder (detokenizer, stop strings, logprobs)──◄ RequestOutput

Nothing here imports torch or knows HTTP. So the API process starts fast, and the offline ``LLM``
uses exactly the same code.
"""
