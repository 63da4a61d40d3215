"""Modules beside this file can be imported, also by the processes that tests start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
