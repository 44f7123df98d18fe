"""A lane's worker: one process, or a group of one process per rank, which lives and dies as one.

The first rank speaks for the lane. That any of them has ended is the end of all, and is said of the one that
caused it. They meet in a directory of their own, which goes with them.
"""

from __future__ import annotations

import select
import shutil
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from executor.placement import Placement
from executor.process import WorkerProcess, describe_exit
from executor.rundir import RANKS
from ipc.errors import RANK_GONE_STATUS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from executor.lane import Lane
    from ipc.channel import Hub
    from ipc.messages import LaneName

_POLL_SECONDS = 0.01


def start(lane: Lane, hub: Hub, placements: Mapping[LaneName, Placement]) -> WorkerProcess | RankGroup:
    """A lane in processes of its own. Raises OSError."""
    spec = lane.spec
    place = placements.get(lane.name, Placement())
    if spec.ranks == 1:
        return WorkerProcess(lane.name, lane.epoch, hub.endpoint, spec.threads, place)
    return RankGroup(lane, hub, place)


class RankGroup:
    """See executor.worker.Worker. `ranks`: the processes, in the order of their ranks."""

    def __init__(self, lane: Lane, hub: Hub, place: Placement) -> None:
        """Starts them, all in the same place. Raises OSError."""
        spec = lane.spec
        self._meeting = meeting = hub.directory / f"{RANKS}{lane.epoch}"
        self._culprit: int | None = None
        self.ranks: list[WorkerProcess] = []
        with ExitStack() as undo:
            meeting.mkdir(mode=0o700)
            undo.callback(shutil.rmtree, meeting, ignore_errors=True)
            self._ended = select.epoll()
            undo.callback(self._ended.close)
            for rank in range(spec.ranks):
                options = ("--rank", str(rank), "--ranks", str(spec.ranks), "--meeting", str(meeting))
                process = WorkerProcess(lane.name, lane.epoch, hub.endpoint, spec.threads, place, options)
                undo.callback(process.close)
                self._ended.register(process.pidfd, select.EPOLLIN)
                self.ranks.append(process)
            undo.pop_all()
        self.pid = self.ranks[0].pid
        # What lanes share is the first rank's to give and to take.
        self.lifeline = self.ranks[0].lifeline
        self.pids = tuple(process.pid for process in self.ranks)
        # Readable when any of those it watches is.
        self.pidfd = self._ended.fileno()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> bool:
        killed = [process.kill(number) for process in self.ranks]
        return any(killed)

    def wait(self, deadline: float) -> int | None:
        """The exit status of the rank that ended the group, or None if all still run at `deadline`.

        A rank that ended only because another one did is not believed to be the cause before `deadline`.
        """
        self._ended.poll(max(0.0, deadline - time.monotonic()), len(self.ranks))
        while self._culprit is None:
            statuses = {rank: process.wait(0.0) for rank, process in enumerate(self.ranks)}
            ended = [rank for rank, status in statuses.items() if status is not None]
            causes = [rank for rank in ended if statuses[rank] != RANK_GONE_STATUS]
            if causes:
                # A signal comes from outside; what else ended may have ended of it.
                self._culprit = min(causes, key=lambda rank: ((statuses[rank] or 0) >= 0, rank))
            elif not ended:
                return None
            elif time.monotonic() >= deadline:
                self._culprit = ended[0]
            else:
                time.sleep(_POLL_SECONDS)
        return self.ranks[self._culprit].wait(0.0)

    def describe_exit(self, status: int) -> str:
        return f"rank {self._culprit} {describe_exit(status)}"

    def stderr_tail(self) -> str:
        """Of the rank that ended first, else of the one that speaks."""
        return self.ranks[self._culprit or 0].stderr_tail()

    def trim_stderr(self) -> None:
        for process in self.ranks:
            process.trim_stderr()

    def close(self) -> None:
        self.kill()
        for process in self.ranks:
            process.close()
        self._ended.close()
        shutil.rmtree(self._meeting, ignore_errors=True)
