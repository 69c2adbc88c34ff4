"""The attacks are a folder of scripts, which find each other as they do when run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "trust"))
