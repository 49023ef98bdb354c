"""`python -m penstock` is `penstock`."""

from __future__ import annotations

import sys

from penstock import PACKAGES


def main() -> int:
    """Runs one command and returns the exit status."""
    # The packages keep their short names inside this process, which is Penstock's alone. Their folder comes first, so
    # that an app or an engine in the working directory, in PYTHONPATH or in site-packages is never taken for them.
    sys.path.insert(0, str(PACKAGES))
    from penstock.app.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
