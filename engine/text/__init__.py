"""Between text and token ids: tokenizer, chat template, incremental decoding, stop strings.

    messages ──ChatTemplate──► prompt text ──Tokenizer──► token ids ──► engine
    text deltas ◄──OutputDecoder (detokenizer, stop strings, logprobs)──◄ RequestOutput

Nothing here imports torch or knows HTTP, so the API process starts fast and the offline ``LLM``
shares every line of it.
"""
