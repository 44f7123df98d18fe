"""Where a lane runs: device, cores and what its process finds in its environment. Pure.

A GPU is best named by its UUID: numbers are counted anew in every process that sees only some GPUs. What a
UUID names becomes the only GPU that the lane's process sees.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ipc.messages import LaneName

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?", re.ASCII)
_UUID = r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,120}"
_UUIDS = re.compile(rf"{_UUID}(?:,{_UUID})*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_CORES = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?", re.ASCII)
_OURS = frozenset({"OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PYTHONUNBUFFERED", "PYTHONPATH", "PYTHONHOME"})
"""Variables that a worker would not run as it must without."""


@dataclass(frozen=True, slots=True)
class Placement:
    """device: what the worker is told: auto, cpu, cuda or cuda:N. environment: what its process gets beside
    what the executor has itself. cores: the only ones that it may use; None: those of the executor."""

    device: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None

    @property
    def apart(self) -> bool:
        """Whether it needs a process of its own."""
        return bool(self.environment) or self.cores is not None


ANYWHERE: Mapping[LaneName, Placement] = MappingProxyType({})
"""Lanes run wherever their executor does."""


def placement(
    lane: LaneName, device: str, variables: Sequence[str], cores: str | None, common_device: str
) -> Placement:
    """Of what was given for one lane; the lane's own device wins over the common one.

    `variables`: NAME=VALUE. `cores`: such as 0-3,8. Raises InvalidConfig about `<lane>_device`, `device`,
    `<lane>_env` or `<lane>_cores`.
    """
    field_, chosen = (f"{lane}_device", device) if device else ("device", common_device)
    environment = _environment(f"{lane}_env", variables)
    if _UUIDS.fullmatch(chosen):
        if VISIBLE in environment:
            raise InvalidConfig(
                f"{lane}_env",
                f"{lane}-env sets {VISIBLE}, which {field_} {chosen} sets, too; try {field_} cuda",
            )
        environment[VISIBLE] = chosen
        chosen = "cuda"
    elif not _DEVICE.fullmatch(chosen):
        raise InvalidConfig(
            field_,
            f"{field_.replace('_', '-')} must be auto, cpu, cuda, cuda:N or a GPU's UUID, got {chosen!r}; "
            "try auto",
        )
    return Placement(chosen, environment, None if cores is None else parse_cores(f"{lane}_cores", cores))


def parse_cores(field_: str, text: str) -> frozenset[int]:
    """`0-3,8` as numbers. Raises InvalidConfig about `field_`."""
    cores: set[int] = set()
    for part in text.split(",") if isinstance(text, str) else [""]:
        first, _, last = part.partition("-")
        if not _CORES.fullmatch(part) or int(last or first) < int(first):
            raise InvalidConfig(
                field_, f"{field_.replace('_', '-')} must be numbers of cores, got {text!r}; try 0-1"
            )
        cores |= set(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _environment(field_: str, variables: Sequence[str]) -> dict[str, str]:
    option = field_.replace("_", "-")
    environment = {}
    for each in variables:
        name, equals, value = each.partition("=") if isinstance(each, str) else ("", "", "")
        if not equals or not _VARIABLE.fullmatch(name) or "\0" in value:
            raise InvalidConfig(
                field_, f"{option} must be NAME=VALUE, got {each!r}; try CUDA_DEVICE_MAX_CONNECTIONS=1"
            )
        if name in _OURS:
            raise InvalidConfig(
                field_, f"{option} {name} is the executor's own to set; try CUDA_DEVICE_MAX_CONNECTIONS=1"
            )
        environment[name] = value
    return environment
