"""Models as data: a spec read from a Hugging Face config, one decoder, weight rules as tables."""
