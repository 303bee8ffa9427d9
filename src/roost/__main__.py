"""``python -m roost``."""

import sys

from roost.cli import main

if __name__ == "__main__":
    sys.exit(main())
