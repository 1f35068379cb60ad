"""`python -m tools.distill`: the same as `quire distill`."""

import sys

from tools.distill.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
