"""Files that come with the package: what is known of certain targets, found by their vocabulary.

They are data of the workers' side; here they are only found. See the README beside them.
"""

from __future__ import annotations

from pathlib import Path

from executor.safetensors_file import metadata

DIRECTORY = Path(__file__).parent / "shipped_files"


def head(fingerprint: str) -> str:
    """Path of the drafting head for a target with this vocabulary; empty if there is none."""
    return _find("head.safetensors", fingerprint)


def prior(fingerprint: str) -> str:
    """Path of the table of what a target with this vocabulary writes; empty if there is none."""
    return _find("prior.safetensors", fingerprint)


def _find(name: str, fingerprint: str) -> str:
    for file in sorted(DIRECTORY.glob(f"*/{name}")) if fingerprint else ():
        if metadata(file).get("vocabulary") == fingerprint:
            return str(file)
    return ""
