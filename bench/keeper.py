"""`python -m bench.keeper`: keeps network namespaces alive whose names are gone.

The kernel dismantles a namespace in the background, with locks that a call being measured would
wait for. A name is a mount, and each of them costs those calls time that copy the mounts. So names
go at once, and what they named at the very end. A path on stdin is answered with an empty line.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Open every path that comes, until stdin ends."""
    for path in sys.stdin:
        os.open(path.rstrip("\n"), os.O_RDONLY)
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
