"""Collects the interpreted tests only where the interpreter has been chosen.

The choice holds for a whole process, so ``test_pretended_gpu.py`` starts one for the tests under
``dry``.
"""

from tests.interpreter import IS_INTERPRETED, patch_device_functions_once

collect_ignore_glob = [] if IS_INTERPRETED else ["dry/*"]
patch_device_functions_once()
