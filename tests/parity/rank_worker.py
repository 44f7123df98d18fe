"""One rank of a small model: `rank_worker.py RANK RANKS MEETING RESULTS CHECKPOINT …`.

Runs every checkpoint in each way that ranks can share it; the first rank writes the logits to RESULTS.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from ipc.messages import LaneSpec
from workers.engines.engine import Window
from workers.engines.native import NativeEngine
from workers.followers import Place
from workers.group import Collective, open_group
from workers.lifecycle import made_ready

if TYPE_CHECKING:
    from torch import Tensor

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


def logits(engine: NativeEngine) -> Tensor:
    """Of all steps: [rows, vocabulary]; none on a rank that is not the first."""
    engine.open(0)
    engine.open(1)
    rows = [engine.forward(windows) for windows in steps()]
    engine.close(0)
    engine.close(1)
    return torch.cat(rows)


def main() -> None:
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    group = open_group(Place(rank, ranks, Path(sys.argv[3])), "cpu")
    found = {}
    for directory in map(Path, sys.argv[5:]):
        spec = LaneSpec("target", "native", str(directory), "fp32", "cpu", 1, 8, 0)
        for way, its, exact in (
            (EXACT, group, True),
            (COLLECTIVE, Collective(), True),
            (PAIRED, Collective(), False),
        ):
            if way == COLLECTIVE and "three" not in directory.name:
                continue
            engine = made_ready(NativeEngine(spec, its, invariant=exact))
            rows = logits(engine)
            assert len(rows) == (19 if rank == 0 else 0)
            found[f"{directory.name}/{way}"] = rows.contiguous()
            config = engine._config
            words = directory.name, way, str(config.query_heads), str(config.kv_heads), *engine.notes
            sys.stdout.write("; ".join(words) + "\n")
    if rank == 0:
        save_file(found, sys.argv[4])


if __name__ == "__main__":
    main()
