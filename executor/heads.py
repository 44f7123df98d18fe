"""Drafting heads as files: which there is for a target, and what its header says. No tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from executor import checkpoint, shipped
from executor.errors import InvalidConfig
from executor.safetensors_file import metadata
from ipc.messages import LAST_NORM, HeadSpec

if TYPE_CHECKING:
    from ipc.messages import LaneSpec, Vocabulary

SUFFIX = ".safetensors"
"""A speculator that is named like this is a head of the user's own."""
MAX_WINDOW = 4096
"""Of latest positions whose rows are kept for a head."""
_ROW_PARTS = 3
_BYTES = 2
_TRAIN = "train one with deploy/train and pass its file, or try suffix"


def misfit(head: HeadSpec, target: LaneSpec) -> str:
    """What keeps a head that a server offers from this target; empty if nothing does.

    Nobody but this executor's own target may be asked for what it has not got.
    """
    if target.engine != "native":
        return f"reads hidden rows, which engine {target.engine} does not show"
    layers, hidden = checkpoint.shape(Path(target.model))
    row_bytes = _BYTES * len(head.taps) * hidden
    if head.row_bytes != row_bytes or not head.taps:
        return f"reads rows of {head.row_bytes} bytes, and this target's are {row_bytes}"
    if not all(LAST_NORM <= tap <= layers for tap in head.taps) or not 1 <= head.window <= MAX_WINDOW:
        return f"reads rows after layers {head.taps} in windows of {head.window}"
    return ""


def head_spec(speculator: str, target: LaneSpec, vocabulary: Vocabulary, field: str) -> HeadSpec:
    """The head that `eagle`, `cascade` or a file stands for. Raises InvalidConfig about `field`."""
    if target.engine != "native":
        raise InvalidConfig(
            field,
            f"{field} {speculator} reads hidden rows of the target, but engine {target.engine} shows none; "
            "use --engine native, or try suffix",
        )
    own = speculator.endswith(SUFFIX)
    file = str(Path(speculator).expanduser()) if own else shipped.head(vocabulary.fingerprint)
    if not file:
        raise InvalidConfig(
            field, f"{field} {speculator}: no head is shipped for target {target.model}; {_TRAIN}"
        )
    try:
        header = metadata(Path(file))
        taps = (*(int(tap) for tap in header["taps"].split(",")), LAST_NORM)
        window, hidden = int(header["window"]), int(header["hidden_size"])
        made_for = header["vocabulary"]
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfig(field, f"{field} {file} is no drafting head: {error!r}; {_TRAIN}") from error
    if made_for != vocabulary.fingerprint:
        raise InvalidConfig(
            field,
            f"{field} {file} is a head for another vocabulary than that of target {target.model}; {_TRAIN}",
        )
    return HeadSpec(file, taps, _BYTES * _ROW_PARTS * hidden, window)
