"""`python -m workers`: one lane in one process. Started by the coordinator, never by hand."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time

from workers import guard


def main(argv: list[str] | None = None) -> int:
    born = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    parser.add_argument("--lane", required=True, choices=["target", "speculator"])
    parser.add_argument("--epoch", required=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--parent-pid", required=True, type=int)
    parser.add_argument("--death-fd", required=True, type=int)
    args = parser.parse_args(argv)
    guard.die_with(args.parent_pid, args.death_fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs, asked before it is ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle

    from ipc.channel import Peer
    from ipc.lifeline import WorkerEnd
    from workers.session import Session

    peer = Peer(args.endpoint, f"{args.lane}/{args.epoch}")
    return Session(args.lane, args.epoch, peer, born, WorkerEnd(args.death_fd)).run()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All that matters is closed. Tearing down the interpreter would take a tensor library seconds.
    os._exit(status)
