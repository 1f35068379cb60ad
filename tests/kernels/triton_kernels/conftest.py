"""Collects the interpreted tests only where the interpreter has been chosen.

The choice is made when a kernel is defined and holds for a whole process, so
``test_triton_interpreter.py`` starts a process for the tests under ``interpreted``. (This folder is
not called ``triton``: its parent is on the import path of the tests, and without Triton installed
the folder would be imported in its place.)
"""

from tests.interpreter import IS_INTERPRETED, quicken_interpreter

collect_ignore_glob = [] if IS_INTERPRETED else ["interpreted/*"]
quicken_interpreter()
