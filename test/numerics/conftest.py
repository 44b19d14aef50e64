"""Make `from reference import run_reference` work in every numerics test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
