"""What a measurement ran on: the processor's name and the versions of what computed."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

_PACKAGES = "speclane", "torch", "transformers"


def machine() -> dict[str, str]:
    """`cpu`, `system`, `python`, and the version of each package that is installed."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # run from a source tree
    found = {"cpu": _cpu(), "system": platform.system(), "python": platform.python_version()}
    return found | versions


def _cpu() -> str:
    """Linux says it in /proc/cpuinfo, under "model name" on x86; elsewhere the architecture must do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
