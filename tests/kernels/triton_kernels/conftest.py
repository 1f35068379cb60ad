"""The interpreter is chosen when a kernel is defined, for a whole process.

The tests under ``interpreted`` are therefore collected only where it has been chosen;
``test_triton_interpreter.py`` starts such a process. (This folder is not called ``triton``: its
parent is on the import path of the tests, and where Triton is not installed the folder would be
taken for it.)
"""

from tests.interpreter import IS_INTERPRETED, patch_device_functions_once

collect_ignore_glob = [] if IS_INTERPRETED else ["interpreted/*"]
patch_device_functions_once()
