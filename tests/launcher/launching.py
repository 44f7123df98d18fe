"""A topology started by the launcher as a user would, watched through its status file and its logs only."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (sys.executable, str(ROOT / "deploy" / "launch.py"))
SECONDS = 60.0
DRAFT = "vocabulary=256,agree=0.8"
GONE_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
    return value


def toy(name: str = "toy", **options: Any) -> str:
    """A topology of one toy target with a speculator, for which `options` win."""
    return f'name = "{name}"\n' + toy_target("main", free_port(), **options)


def toy_target(name: str, port: int, attach: tuple[str, ...] = (), **options: Any) -> str:
    options = {"engine": "toy", "threads": 1, "max_model_len": 512} | options
    if not attach:
        options.setdefault("speculator", DRAFT)
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    head = f'[[targets]]\nname = "{name}"\nport = {port}\nattach = {json.dumps(list(attach))}\n'
    return f"{head}[targets.options]\n" + "\n".join(lines) + "\n"


class Launched:
    def __init__(self, process: subprocess.Popen[bytes], state: Path, said: Path) -> None:
        self.process = process
        self.state = state
        self._said = said
        self.ever: set[psutil.Process] = set()
        """All processes that were seen."""

    @property
    def said(self) -> str:
        """What the launcher wrote to stderr."""
        return self._said.read_text()

    @property
    def status(self) -> dict[str, Any]:
        with suppress(OSError):
            status = json.loads((self.state / "status.json").read_text())
            return status if status.get("pid") == self.process.pid else {}
        return {}

    def of(self, name: str) -> dict[str, Any]:
        """What the status says of one process."""
        return next(each for each in self.status["processes"] if each["name"] == name)

    def url(self, name: str = "main") -> str:
        return str(self.of(name)["url"])

    def log(self, name: str) -> str:
        return (self.state / "logs" / f"{name}.log").read_text()

    def until(self, state: str, seconds: float = SECONDS) -> None:
        """Wait for an overall state; the launcher must not end meanwhile."""

        def reached() -> bool:
            self.census()
            assert self.process.poll() is None, self.said
            return self.status.get("state") == state

        wait_for(reached, seconds)

    def census(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.ever |= set(psutil.Process(self.process.pid).children(recursive=True))

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """One of the launch's own processes."""
        self.census()
        assert pid in {each.pid for each in self.ever}
        os.kill(pid, number)

    def again(self, name: str, starts: int, seconds: float = SECONDS) -> None:
        """Wait until a process was started for the so-manyth time and all is well."""
        wait_for(lambda: self.of(name)["starts"] >= starts, seconds)
        self.until("healthy", seconds)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """The launcher's exit status."""
        self.census()
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


@contextmanager
def launched(
    topology: str | Path,
    directory: Path,
    environment: dict[str, str] | None = None,
    before: Sequence[str] = (),
) -> Iterator[Launched]:
    """`topology`: text, or a file that is taken as it is; `before`: words before the command. Everything it
    started must be gone afterwards."""
    file = topology
    if isinstance(topology, str):
        file = directory / "topology.toml"
        file.write_text(topology)
    said = directory / "launcher.stderr"
    with said.open("wb") as stderr:
        process = subprocess.Popen(
            [*before, *LAUNCH, str(file), "--state", str(directory / "state")],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env=os.environ | (environment or {}),
        )
    launch = Launched(process, directory / "state", said)
    try:
        yield launch
        if process.poll() is None:
            assert launch.stop() == 0, launch.said
        wait_for(lambda: not [each for each in launch.ever if _lives(each)], GONE_SECONDS)
        runtime = Path(os.environ["XDG_RUNTIME_DIR"])
        assert [entry.name for entry in runtime.iterdir() if entry.name.startswith("speclane.launch")] == []
    finally:
        for each in (*launch.ever, psutil.Process(process.pid) if process.poll() is None else None):
            if each is not None:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait(SECONDS)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
