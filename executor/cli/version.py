"""`speclane version`."""

from importlib import metadata

from executor.cli.output import write


def version() -> None:
    """Show the version."""
    try:
        number = metadata.version("speclane")
    except metadata.PackageNotFoundError:  # run from a source tree
        number = "unknown (not installed)"
    write(f"speclane {number}\n")
