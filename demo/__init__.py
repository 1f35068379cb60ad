"""The embedded demo model: its corpus generator, tokenizer, trainer and evaluation.

`python -m demo.build` makes `demo/model/` from this package alone. Importing `demo` itself is
light: torch and transformers are imported only in the modules that need them.

    facts, glossary -> relations -+
    phrasings ------------------- +-> conversations -> corpus -> tokenizer -> train -> model/
    toolbox, stories, smalltalk --+                                   heldout -> evaluate -> card
"""
