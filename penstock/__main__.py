"""`python -m penstock` is `penstock`."""

from __future__ import annotations

import sys

from penstock.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
