"""A restricted process for work that may loop or use too much memory: standard library only.

``process.py`` is its interface for the parent, ``worker.py`` the process itself. The work is
defined by a *handler*, a file with two functions: ``prepare(first)`` takes the first frame and
returns the function that answers each further one; ``exhausted()`` returns the answer when it has
used too much memory.
"""
