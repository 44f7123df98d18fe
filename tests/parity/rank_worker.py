"""One rank of a small model: `rank_worker.py DEVICE RANK RANKS MEETING RESULTS CHECKPOINT …`.

Runs every checkpoint in each way that ranks can share it; the first rank writes logits and hidden rows to
RESULTS.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from ipc.messages import LAST_NORM, LaneSpec
from workers.engines.engine import Window
from workers.engines.native import NativeEngine
from workers.engines.tap import Tap
from workers.followers import Place
from workers.group import Collective, open_group
from workers.lifecycle import made_ready

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from workers.group import Group

EXACT, COLLECTIVE, PAIRED = "exact", "exact, by collectives", "paired"


def steps() -> list[list[Window]]:
    """A prompt, windows beside another prompt, a lone token, and a window after a rollback."""
    ids = torch.randint(0, 211, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    return [
        [Window(0, 0, ids[:50], 1)],
        [Window(0, 50, ids[50:57], 7), Window(1, 0, ids[10:30], 3)],
        [Window(0, 57, ids[57:58], 1)],
        [Window(1, 18, ids[40:45], 5), Window(0, 54, ids[60:62], 2)],
    ]


def computed(engine: NativeEngine) -> tuple[Tensor, Tensor]:
    """Of all steps the logits, [rows, vocabulary], and the hidden rows that a head would read, bfloat16
    [positions, 3 · hidden]; on a rank that is not the first no logits, or none that mean anything."""
    tap = Tap((LAST_NORM, 1, 2), {0: 0, 1: 0}, lambda _start, rows: rows)
    engine.open(0)
    engine.open(1)
    rows = [engine.forward(windows, tap) for windows in steps()]
    engine.close(0)
    engine.close(1)
    return torch.cat(rows), torch.cat([part for seq in (0, 1) for part in tap.rows(seq, 100)])


def ways(group: Group, device: str, directory: Path) -> Iterator[tuple[str, Group, bool]]:
    """How a checkpoint is run: what that is called, by which exchanges, and whether exactly."""
    if device != "cpu":
        yield PAIRED, group, True
        return
    yield EXACT, group, True
    if "three" in directory.name:
        yield COLLECTIVE, Collective(), True
    yield PAIRED, Collective(), False


def main() -> None:
    """On GPUs, the ranks take one each, in a row from the first."""
    device, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    results, directories = sys.argv[5], map(Path, sys.argv[6:])
    torch.set_num_threads(1)
    own = device if device == "cpu" else f"cuda:{rank}"
    group = open_group(Place(rank, ranks, Path(sys.argv[4])), own)
    assert group is not None
    found = {}
    for directory in directories:
        spec = LaneSpec("target", "native", str(directory), "fp32", own, 1, 8, 0)
        for way, its, exact in ways(group, device, directory):
            engine = made_ready(NativeEngine(spec, its, invariant=exact))
            rows, hidden = computed(engine)
            assert rank == 0 or not own.startswith("cpu") or len(rows) == 0
            found[f"{directory.name}/{way}"] = rows.cpu().contiguous()
            found[f"{directory.name}/{way}/hidden"] = hidden.cpu().contiguous()
            config = engine._config
            words = directory.name, way, str(config.query_heads), str(config.kv_heads), *engine.notes
            sys.stdout.write("; ".join(words) + "\n")
    if rank == 0:
        save_file(found, results)


if __name__ == "__main__":
    main()
