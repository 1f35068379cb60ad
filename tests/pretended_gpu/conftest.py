"""Collects the interpreted tests only where the interpreter has been chosen.

The choice holds for a whole process, so ``test_pretended_gpu.py`` starts one for the tests under
``dry``.
"""

from tests.interpreter import IS_INTERPRETED, quicken_interpreter

collect_ignore_glob = [] if IS_INTERPRETED else ["dry/*"]
quicken_interpreter()
