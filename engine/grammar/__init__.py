"""Structured output: grammars that texts must match, enforced token by token.

    Grammar ──compile──► CompiledGrammar ──matcher()──► Matcher ──fill──► a line of bits over
    (engine.types)       one for all rows               one a row         the vocabulary

A grammar is checked in a killable child of the API process before anything is promised to a client
(``check.py``). It is then compiled against the model's vocabulary on a thread of the engine, while
its requests wait (``compiler.py``, ``wait_queue.py``). The masks are applied with all others in
``engine/sampling/masks.py``. Importing this package imports neither torch nor the grammar library.
"""
