"""A server with a fake engine, and a client."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
