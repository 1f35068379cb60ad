"""Models in one file, as llama.cpp has them: weights, config, tokenizer and chat template.

``file`` reads the tables and trusts nothing in them. ``config`` and ``tokenizer`` turn metadata
into what a directory in Hugging Face format would hold, without torch. ``rules`` and ``blocks`` are
what the loader (``weights``) knows of names and of quantised tensors.
"""
