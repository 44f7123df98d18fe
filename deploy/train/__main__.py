"""Train a drafting head for a chat model on text that the model writes itself: `python deploy/train --help`.

Steps, each resumable: passages are gathered once; then turns of writing a shard of lessons and learning from
it and some earlier ones, with a look at held-out prompts now and then. The best head so far is
`best.safetensors`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]  # the packages, also where they are not installed

import prose  # noqa: E402
import shards  # noqa: E402
from dialogue import TEMPERATURES, VARIED, Dialogue, Markup  # noqa: E402
from draft import DraftLearner  # noqa: E402
from frequencies import tabulate  # noqa: E402
from head import Head, Shape  # noqa: E402
from learn import Learner, write  # noqa: E402
from prompts import Prompts, belongs  # noqa: E402
from teacher import Teacher  # noqa: E402

from executor import shipped  # noqa: E402
from executor.models import resolve  # noqa: E402
from executor.tokenizer import Tokenizer  # noqa: E402
from workers.speculators.prior import LONGEST  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from teacher import Lessons

TAPS = (10, 20)
SHIPPED = shipped.DIRECTORY / "smollm2-135m" / "head.safetensors"
_K = 7
_HELD_OUT_ROWS = 32
console = Console(stderr=True)


def main() -> None:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("shards", "text"):
        (args.out / name).mkdir(exist_ok=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    Training(args).run()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python deploy/train", description=__doc__)
    parser.add_argument(
        "part",
        choices=["all", "write", "learn", "text", "table"],
        help="all: write and learn in turns; or write in one process and learn in another. "
        "text: write what only a table is made of, several times as fast. "
        "table: make prior.safetensors, for lookups, of what was written so far",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of shards, checkpoints and log")
    parser.add_argument(
        "--start", type=Path, default=SHIPPED, help="head to start from; its draft_to_target is kept"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=0,
        help="train a plain draft model of so many of the target's layers, in OUT/draft, instead of a head",
    )
    parser.add_argument("--target", default="smollm2-135m", help="alias, checkpoint directory or hub id")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--shards", type=int, default=400, help="how many to make in all")
    parser.add_argument("--rows", type=int, default=64, help="conversations per shard")
    parser.add_argument("--length", type=int, default=256, help="tokens per conversation")
    parser.add_argument("--read-every", type=int, default=4, help="every so many shards one of prose is read")
    parser.add_argument(
        "--replays", type=int, default=1, help="earlier shards learned again beside a new one"
    )
    parser.add_argument("--batch", type=int, default=8, help="rows per optimiser step")
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--evaluate-every", type=int, default=6, help="shards")
    parser.add_argument(
        "--patience", type=int, default=40, help="stop after so many evaluations without a gain"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Training:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._device = args.device
        directory = resolve(args.target, progress=console.print)
        self._tokenizer = Tokenizer(directory)
        self._markup = _markup(self._tokenizer)
        self._passages = self._gather()
        if args.part == "table":
            return
        self._teacher = Teacher(directory, None if args.part == "text" else TAPS, args.device)
        if args.part == "text":
            return
        self._learner = self._make_learner(directory)
        self._best, self._stale, self._turns = 0.0, 0, 0
        if (args.out / "state.json").is_file():
            self._learner.load(args.out / "learner.safetensors")
            state = json.loads((args.out / "state.json").read_text())
            self._best, self._stale, self._turns = state["best"], state["stale"], state["turns"]
        if args.part != "write":
            self._held_out = self._make_held_out()

    def _make_learner(self, directory: Path) -> Learner | DraftLearner:
        args = self._args
        if args.layers:
            return DraftLearner(directory, args.layers, args.out, args.device, args.rate, args.decay)
        start = load_file(args.start)
        draft_to_target = start.pop("draft_to_target").to(args.device)
        head = Head(Shape()).to(args.device)
        head.load(start)
        embedding = self._teacher.embedding
        return Learner(head, embedding, draft_to_target, args.rate, args.decay, self._metadata)

    def run(self) -> None:
        args = self._args
        if args.part == "table":
            self._make_table()
            return
        if args.part == "text":
            for number in range(args.shards):
                self._write_text(number)
            return
        if args.part == "write":
            for number in range(args.shards):
                self._write_shard(number)
            return
        if self._turns == 0:
            self._evaluate(0.0)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("turns", total=args.shards, completed=self._turns)
            while self._turns < args.shards and self._stale < args.patience:
                loss = self._turn(self._turns)
                self._turns += 1
                if self._turns % args.evaluate_every == 0:
                    self._evaluate(loss)
                self._save()
                bar.update(task, completed=self._turns, description=f"loss {loss:.3f}, best {self._best:.3f}")

    def _turn(self, number: int) -> float:
        """One new shard and some earlier ones. Returns the mean loss on the new one, as it was learned."""
        new = self._shard(number)
        chance = random.Random(f"replay {self._args.seed} {number}")
        earlier = chance.sample(range(number), min(number, self._args.replays))
        losses = [self._learn(new, number, 0)]
        losses += [self._learn(self._shard(other), number, 1 + other) for other in earlier]
        return losses[0]

    def _learn(self, lessons: Lessons, number: int, salt: int) -> float:
        generator = torch.Generator().manual_seed(
            random.Random(f"{self._args.seed} {number} {salt}").getrandbits(60)
        )
        order = torch.randperm(len(lessons.tokens), generator=generator)
        losses = []
        for index in order.split(self._args.batch):
            part = type(lessons)(*(tensor.to(self._device) for tensor in shards.rows(lessons, index)))
            losses.append(self._learner.step(part, generator))
        return sum(losses) / len(losses)

    def _shard(self, number: int) -> Lessons:
        file = shards.path(self._args.out / "shards", number)
        if self._args.part == "learn":
            while not file.is_file():
                time.sleep(5.0)
        self._write_shard(number)
        return shards.load(file)

    def _write_shard(self, number: int) -> None:
        args = self._args
        file = shards.path(args.out / "shards", number)
        if file.is_file():
            return
        began = time.monotonic()
        reading = args.read_every and number % args.read_every == args.read_every - 1
        lessons = self._read(number) if reading else self._write("train", f"{args.seed} {number}", args.rows)
        shards.save(file, lessons)
        rate = lessons.tokens.numel() / (time.monotonic() - began)
        self._log({"shard": number, "read": bool(reading), "tokens_per_second": round(rate, 1)})

    def _write_text(self, number: int) -> None:
        args = self._args
        file = shards.path(args.out / "text", number)
        if file.is_file():
            return
        began = time.monotonic()
        lessons = self._write("train", f"text {args.seed} {number}", args.rows, temperatures=VARIED)
        shards.save(file, lessons)
        written = int(lessons.written.sum())
        rate = lessons.tokens.numel() / (time.monotonic() - began)
        self._log({"text": number, "written": written, "tokens_per_second": round(rate, 1)})

    def _write(
        self,
        split: str,
        name: str,
        rows: int,
        temperature: float | None = None,
        temperatures: Sequence[float] = TEMPERATURES,
    ) -> Lessons:
        """`name` seeds all that is drawn."""
        prompts = Prompts(name, split, self._passages)  # type: ignore[arg-type]
        asked = 0.5 if temperature is None else 0.0
        dialogues = [
            Dialogue(
                self._markup,
                prompts,
                self._encode,
                f"{split} {name} {row}",
                temperature=temperature,
                self_asked=asked,
                temperatures=temperatures,
            )
            for row in range(rows)
        ]
        seed = random.Random(f"{split} {name}").getrandbits(60)
        return self._teacher.write(dialogues, self._args.length, seed)

    def _read(self, number: int) -> Lessons:
        """Prose, passage after passage, cut into rows."""
        args = self._args
        chance = random.Random(f"prose {args.seed} {number}")
        tokens: list[int] = []
        while len(tokens) < args.rows * args.length:
            passage = chance.choice(self._passages)
            if belongs(passage, "train"):
                tokens += [*self._encode(passage), *self._encode("\n\n")]
        rows = torch.tensor(tokens[: args.rows * args.length]).view(args.rows, args.length)
        parts = [self._teacher.read(part) for part in rows.split(16)]
        return type(parts[0])(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _make_held_out(self) -> Lessons:
        file = self._args.out / "held_out.safetensors"
        if not file.is_file():
            shards.save(file, self._write("eval", str(self._args.seed), _HELD_OUT_ROWS, temperature=0.0))
        return shards.load(file)

    def _evaluate(self, loss: float) -> None:
        lessons = type(self._held_out)(*(tensor.to(self._device) for tensor in self._held_out))
        learner = self._learner
        score = learner.evaluate(lessons, _K)
        self._log(
            {
                "turns": self._turns,
                "seen": learner.seen,
                "loss": round(loss, 4),
                "length": round(score.length, 4),
                "by_position": [round(share, 3) for share in score.by_position],
            }
        )
        self._stale += 1
        if score.length > self._best:
            self._best, self._stale = score.length, 0
            learner.export(self._args.out)

    @property
    def _metadata(self) -> dict[str, str]:
        """What a lane must know of a head before it loads it; see executor.heads."""
        shape = Shape()
        return {
            "taps": ",".join(map(str, TAPS)),
            "window": str(shape.window),
            "hidden_size": str(shape.hidden),
            "vocabulary": self._tokenizer.vocabulary.fingerprint,
        }

    def _make_table(self) -> None:
        texts = []
        directories = (self._args.out / name for name in ("shards", "text"))
        for file in [file for directory in directories for file in shards.present(directory)]:
            lessons = shards.load(file)
            for tokens, written in zip(lessons.tokens.numpy(), lessons.written.numpy(), strict=True):
                texts += [tokens[max(0, start - LONGEST) : end] for start, end in _runs(written)]
        table = tabulate([text.astype("int64") for text in texts])
        columns = {name: torch.from_numpy(column.astype("int64")) for name, column in table._asdict().items()}
        types = {"keys": torch.uint32, "tokens": torch.uint32, "shares": torch.uint8}
        narrow = {name: column.to(types[name]) for name, column in columns.items()}
        write(self._args.out / "prior.safetensors", narrow, {"vocabulary": self._metadata["vocabulary"]})
        console.print(f"{len(table.keys)} contexts of {sum(map(len, texts))} tokens")

    def _save(self) -> None:
        self._learner.save(self._args.out / "learner.safetensors")
        state = {"best": self._best, "stale": self._stale, "turns": self._turns}
        part = self._args.out / "state.part"
        part.write_text(json.dumps(state))
        part.replace(self._args.out / "state.json")

    def _log(self, record: dict[str, object]) -> None:
        with (self._args.out / "log.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.strftime("%H:%M:%S")} | record) + "\n")

    def _gather(self) -> list[str]:
        file = self._args.out / "passages.json"
        if not file.is_file():
            console.print("gathering prose from installed packages")
            passages, sources = prose.passages()
            file.write_text(json.dumps({"passages": passages, "sources": sources}))
        passages: list[str] = json.loads(file.read_text())["passages"]
        return passages

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


def _runs(flags: Iterable[bool]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of true ones."""
    start = None
    for index, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = index
        elif not flag and start is not None:
            yield start, index
            start = None


def _markup(tokenizer: Tokenizer) -> Markup:
    """Taken from the template itself: what stands before, between and after two turns."""
    marks = "<question>", "<answer>"
    turns = [{"role": "user", "content": marks[0]}, {"role": "assistant", "content": marks[1]}]
    before, rest = tokenizer.render_chat(turns[:1]).split(marks[0])
    end, assistant = rest.split("\n", 1)
    start, user = before.rsplit("<|im_start|>", 1)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    (end_token,) = encode(end)
    return Markup(encode(start), encode("<|im_start|>" + user), encode(assistant), end_token, encode("\n"))


if __name__ == "__main__":
    main()
