"""`python -m workers`: one lane in one process. Started by the coordinator, never by hand."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from workers import guard
from workers.canary import canaries


def main(argv: list[str] | None = None) -> int:
    born = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    parser.add_argument("--lane", required=True, choices=["target", "speculator"])
    parser.add_argument("--epoch", required=True)
    parser.add_argument("--endpoint", help="of the coordinator; the first rank's is found")
    parser.add_argument("--parent-pid", required=True, type=int)
    parser.add_argument("--death-fd", required=True, type=int)
    parser.add_argument("--rank", default=0, type=int, help="which process of the lane this is")
    parser.add_argument("--ranks", default=1, type=int, help="of how many")
    parser.add_argument("--meeting", type=Path, help="private directory where the ranks of a lane meet")
    args = parser.parse_args(argv)
    guard.die_with(args.parent_pid, args.death_fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs, asked before it is ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle

    from ipc.channel import Peer
    from ipc.errors import RANK_GONE_STATUS, RankGone
    from ipc.lifeline import WorkerEnd
    from workers.followers import Place, find_first, identity
    from workers.session import Session

    place = Place(args.rank, args.ranks, args.meeting)
    if args.rank > 0:
        try:
            args.endpoint = find_first(args.meeting)
        except RankGone as error:
            print(error, file=sys.stderr)  # noqa: T201
            return RANK_GONE_STATUS
    end = WorkerEnd(args.death_fd, canaries())
    peer = Peer(args.endpoint, identity(args.lane, args.epoch, args.rank))
    return Session(args.lane, args.epoch, peer, born, end, place).run()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All that matters is closed. Tearing down the interpreter would take a tensor library seconds.
    os._exit(status)
