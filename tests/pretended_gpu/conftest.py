"""Kernels are interpreted here, which is chosen for a whole process.

The tests under ``dry`` are therefore collected only where it has been chosen;
``test_pretended_gpu.py`` starts such a process.
"""

from tests.interpreter import IS_INTERPRETED, patch_device_functions_once

collect_ignore_glob = [] if IS_INTERPRETED else ["dry/*"]
patch_device_functions_once()
