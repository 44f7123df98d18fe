"""What the ranks of a lane compute together: rows gathered and summed over torch.distributed.

NCCL between GPUs. Between processes on CPUs gloo, whose sockets listen on the loopback interface only; ranks
find each other by a file in a directory that nobody else can enter. A rank that is gone is an error of all
others. There is no deadline of its own: a rank that hangs keeps the first one from answering, whose deadline
is the coordinator's.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ipc.errors import RankGone

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from workers.followers import Place

_LOOPBACK = "lo"
_SECONDS = 3600.0


class Group(Protocol):
    """The ranks of a lane, seen from one of them. All must call the same in the same order."""

    rank: int
    size: int

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Columns of all ranks side by side: [rows, widths[rank]] → [rows, sum(widths)], on each rank."""
        ...

    def to_first(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """As `gather`, on the first rank; the others get no rows: [0, sum(widths)]."""
        ...

    def add(self, part: Tensor) -> Tensor:
        """The sum over all ranks, in place. In which order, only the library knows."""
        ...

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on all ranks."""
        ...


def open_group(place: Place, device: str) -> Group | None:
    """Meet the others; None for a lane of one rank. Raises RankGone if one does not come."""
    if place.ranks == 1:
        return None
    assert place.directory is not None, "ranks meet somewhere"
    on_gpu = device != "cpu"
    # Ranks of a lane are on one host: nothing has to listen where others can reach it.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _LOOPBACK
    if on_gpu:
        torch.cuda.set_device(device)
    with _ranks_gone():
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=FileStore(str(place.directory / "store"), place.ranks),
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=_SECONDS),
            device_id=torch.device(device) if on_gpu else None,
        )
    return Collective(device) if on_gpu else Exchange(device)


class Collective:
    """Each call is one collective, of equal parts: the narrower ones are padded."""

    def __init__(self, device: str = "cpu") -> None:
        """Of the process group that there is."""
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = device

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        padded = _padded(part, max(widths))
        out = padded.new_empty((self.size * len(padded), padded.shape[1]))
        with _ranks_gone():
            dist.all_gather_single(out, padded)
        return _joined(out.view(self.size, *padded.shape), widths)

    def to_first(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        padded = _padded(part, max(widths))
        out = padded.new_empty((self.size if self.rank == 0 else 0, *padded.shape))
        with _ranks_gone():
            dist.gather(padded, list(out) if self.rank == 0 else None, dst=0)
        return _joined(out, widths) if self.rank == 0 else part.new_empty((0, sum(widths)))

    def add(self, part: Tensor) -> Tensor:
        with _ranks_gone():
            dist.all_reduce(part)
        return part

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        votes = torch.tensor(flags, dtype=torch.int32, device=self._device)
        with _ranks_gone():
            dist.all_reduce(votes, dist.ReduceOp.MIN)
        return [bool(vote) for vote in votes.tolist()]


class Exchange(Collective):
    """Parts go from rank to rank: with gloo, half as dear as its collectives, and nothing is padded."""

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        return self._collect(part, widths, range(self.size))

    def to_first(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        whole = self._collect(part, widths, (0,))
        return whole if self.rank == 0 else part.new_empty((0, sum(widths)))

    def _collect(self, part: Tensor, widths: Sequence[int], takers: Sequence[int]) -> Tensor:
        """All parts side by side, on those who take them."""
        part = part.contiguous()
        parts = [part] * self.size
        with _ranks_gone():
            sent = [dist.isend(part, taker) for taker in takers if taker != self.rank]
            if self.rank in takers:
                for rank, width in enumerate(widths):
                    if rank != self.rank:
                        parts[rank] = part.new_empty((len(part), width))
                        dist.recv(parts[rank], rank)
            for work in sent:
                if work is not None:
                    work.wait()
        return torch.cat(parts, dim=1)


def _padded(part: Tensor, width: int) -> Tensor:
    return F.pad(part, (0, width - part.shape[1])).contiguous()


def _joined(parts: Tensor, widths: Sequence[int]) -> Tensor:
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)


@contextmanager
def _ranks_gone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise RankGone(f"the ranks do not work together any more: {error}") from error
