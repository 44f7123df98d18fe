"""`speclane status`: how a running executor is, and its lanes."""

import time
from typing import TYPE_CHECKING, Any

from executor.cli import options
from executor.cli.output import write, write_json

if TYPE_CHECKING:
    from executor.control_wire import Reported
    from executor.status import Status


def status(pid: options.Pid = None, as_json: options.Json = False) -> None:
    """Show the health, lanes and totals of the executor that is running."""
    from executor import control_client

    reported = control_client.status(control_client.choose(pid))
    if as_json:
        write_json(as_dict(reported))
    else:
        write("\n".join([*lines(reported.status), *rows(reported.status)]) + "\n")


def as_dict(reported: "Reported") -> dict[str, Any]:
    """As one object for a program."""
    import msgspec

    status = reported.status
    return msgspec.structs.asdict(status) | {
        "health": msgspec.structs.asdict(status.health),
        "lanes": [msgspec.structs.asdict(lane) for lane in status.lanes],
        "totals": msgspec.structs.asdict(status.totals),
        "load": msgspec.structs.asdict(status.load),
        "memory": [msgspec.structs.asdict(lane) for lane in status.memory],
        "setting": msgspec.structs.asdict(status.setting),
        "dropped": msgspec.structs.asdict(reported.dropped),
    }


def lines(status: "Status") -> list[str]:
    """What is said of all."""
    health, totals = status.health, status.totals
    reason = f": {health.reason}" if health.reason else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(health.since))
    return [
        f"executor {status.pid} is {health.state} since {since}{reason}",
        f"speculator: {status.speculation}; {totals.tokens} tokens in {totals.rounds} rounds, "
        f"{totals.accepted} of {totals.drafted} drafted tokens accepted",
    ]


def rows(status: "Status") -> list[str]:
    """A line for each lane, in columns."""
    cells = [
        (
            lane.lane,
            lane.state,
            "pid " + (", ".join(map(str, (lane.pid, *lane.peers))) if lane.pid else "-"),
            f"epoch {lane.epoch}",
            f"{lane.restarts} restarts",
            f"busy {lane.busy_share:.0%}",
            f"{lane.reused_tokens} tokens reused",
            " ".join(filter(None, (lane.engine, lane.model))),
        )
        for lane in status.lanes
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
