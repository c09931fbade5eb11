"""Tests that run lerobot itself: `make test-oracle`. Elsewhere each of them is skipped."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
