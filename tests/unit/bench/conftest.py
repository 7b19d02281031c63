"""Makes `bench` importable: it lies beside `tests`, and is no part of what gets installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))
