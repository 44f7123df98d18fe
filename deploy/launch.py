#!/usr/bin/env python3
"""`speclane launch`, from a checkout: deploy/launch.py TOPOLOGY.toml [--dry-run] [--state DIRECTORY].

Uses .venv of the checkout, as deploy/setup.sh makes it, if there is one.
"""

import os
import sys
from pathlib import Path

root = Path(__file__).resolve().parents[1]
own = root / ".venv" / "bin" / "python"
python = str(own) if own.exists() else sys.executable
path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
os.execve(python, [python, "-m", "executor", "launch", *sys.argv[1:]], os.environ | {"PYTHONPATH": path})
