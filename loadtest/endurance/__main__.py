"""``python -m loadtest.endurance``."""

import sys

from loadtest.endurance.run import main

if __name__ == "__main__":
    sys.exit(main())
