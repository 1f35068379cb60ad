"""Models in a single file, llama.cpp's format: weights, config, tokenizer and chat template.

``file`` reads the tables without trusting them. ``config`` and ``tokenizer`` convert metadata to
the contents of a Hugging Face directory, without torch. ``rules`` and ``blocks`` give the loader
(``weights``) the tensor names and the quantised formats.
"""
