"""A process of little means for work that may loop or run wild: standard library only.

``process.py`` is its parent's view, ``worker.py`` what runs in it. What it is to do is told by a
*handler*, a file with two functions: ``prepare(first)`` takes the first frame and returns the
function that answers each further one, and ``exhausted()`` gives the answer when it has used too
much memory.
"""
