"""Measure answers behind a compressed history, and judge them.

    python -m benchmarks.accuracy run --model DIR --profile FILE [--model DIR --profile FILE] --out DIR
    python -m benchmarks.accuracy report --out DIR

The n-th --profile is the n-th --model's, calibrated with the oracle kvzip. The first model runs all
conditions, others those that show whether they behave alike. All rows go to OUT/answers.jsonl at once; the
same command goes on where it was stopped. At the end, or by `report`: OUT/accuracy.json (every answer),
OUT/summary.json (what docs/plots.py draws) and OUT/report.md (tables and bars).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.answers import Store
from benchmarks.accuracy.cells import latest
from benchmarks.accuracy.conditions import DYNAMIC, Cell, Job, every_task, plan
from benchmarks.accuracy.regularity import regularity
from benchmarks.accuracy.report import MAIN_MODEL, report, summary
from benchmarks.accuracy.run import ROOM, Model, Options, Runner, Task, default_device, slots_of
from benchmarks.accuracy.text import texts_hash


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure what is missing, then report")
    show = commands.add_parser("report", help="tables, bars and summary of what is there")
    for command in (run, show):
        command.add_argument("--out", type=Path, required=True, help="folder of answers and reports")
        command.add_argument("--profile", action="append", default=[], help="a model's profile; see above")
        command.add_argument("--main", help="name of the model that the bars are about; the first --model")
    run.add_argument("--model", action="append", required=True, help="a model's directory")
    run.add_argument(
        "--own",
        action="append",
        default=[],
        metavar="SCORER=FILE",
        help="a profile of the first model with the scorer as its oracle",
    )
    run.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    run.add_argument("--gpus", default="0", help="their numbers, such as 0,1")
    run.add_argument("--per-gpu", type=int, default=3, help="children at a time on each GPU")
    run.add_argument("--samples", type=int, default=50, help="of a cell")
    run.add_argument(
        "--offline-samples",
        type=int,
        help="of a cell of the replay and of kvpress, which run one at a time; as --samples",
    )
    run.add_argument("--length", type=int, default=4096, help="tokens in front of the last turn")
    run.add_argument(
        "--long",
        type=int,
        nargs="*",
        default=[2048, 8192, 16384],
        help="further lengths of retrieval with full, calibrated and uniform budgets",
    )
    run.add_argument("--conditions", nargs="+", default=["*"], help="names or patterns; 'list' shows all")
    run.add_argument("--tasks", nargs="+", default=list(every_task()), choices=every_task())
    run.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    run.add_argument("--kv-gib", type=float, help="GiB of KV cache of each engine; 16 on a GPU, 2 on a CPU")
    run.add_argument("--seconds", type=float, help="begin no cell after so long")
    return parser.parse_args(arguments)


def jobs_of(arguments: argparse.Namespace, own: Sequence[str], whole: bool = True) -> list[Job]:
    """The plan, cut down to what is asked for."""
    jobs = []
    for job in plan(arguments.length, arguments.long, own, whole):
        cells = tuple(cell for cell in job.cells if cell.task in arguments.tasks)
        named = any(fnmatch.fnmatchcase(job.condition.name, asked) for asked in arguments.conditions)
        if cells and named:
            jobs.append(Job(job.rank, job.condition, cells))
    return jobs


def own_profiles(given: Sequence[str]) -> dict[str, str]:
    """SCORER=FILE as a dictionary."""
    found = {}
    for one in given:
        scorer, equals, path = one.partition("=")
        if not equals or scorer not in DYNAMIC:
            sys.exit(f"--own {one}: SCORER=FILE is wanted, SCORER one of {', '.join(DYNAMIC)}")
        found[scorer] = path
    return found


def check(arguments: argparse.Namespace, files: Sequence[str]) -> None:
    """End with a sentence where something that is named is not there."""
    if len(arguments.model) != len(arguments.profile):
        sys.exit("as many --profile as --model are wanted: each profile is for the model in the same place")
    names = [Path(model).name for model in arguments.model]
    if len(set(names)) < len(names):
        sys.exit("two models have the same name, which tells their answers apart: rename a directory")
    for path in [*files, *(f"{model}/config.json" for model in arguments.model)]:
        if not Path(path).is_file():
            sys.exit(f"{path} is not there")


def run(arguments: argparse.Namespace) -> int:
    """Run and report. 1 if a child failed."""
    own = own_profiles(arguments.own)
    if arguments.conditions == ["list"]:
        for job in jobs_of(argparse.Namespace(**{**vars(arguments), "conditions": ["*"]}), list(own)):
            print(f"{job.condition.name:<34} {' '.join(cell.name for cell in job.cells)}")
        return 0
    check(arguments, [*arguments.profile, *own.values()])
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        return measure(arguments, own, Path(folder))


def measure(arguments: argparse.Namespace, own: dict[str, str], folder: Path) -> int:
    """The same, with a folder for the children."""
    begun = time.time()
    options = Options(
        folder=folder,
        samples=arguments.samples,
        offline_samples=arguments.offline_samples or arguments.samples,
        device=arguments.device,
        dtype=arguments.dtype,
        kv_gib=arguments.kv_gib or (16.0 if arguments.device == "cuda" else 2.0),
        slots=slots_of(arguments.device, arguments.gpus, arguments.per_gpu),
        deadline=begun + (arguments.seconds or 10**9),
    )
    runner = Runner(options, Store(arguments.out / "answers.jsonl"))
    tasks: list[Task] = []
    for number, (path, profile) in enumerate(zip(arguments.model, arguments.profile, strict=True)):
        model = Model(str(Path(path).resolve()), {"kvzip": str(Path(profile).resolve())})
        if number == 0:
            model.profiles.update({name: str(Path(file).resolve()) for name, file in own.items()})
        jobs = (
            jobs_of(arguments, list(own), whole=True) if number == 0 else jobs_of(arguments, [], whole=False)
        )
        tasks += [(model, job) for job in jobs]
        told(model, [cell for job in jobs for cell in job.cells])
    runner.run(sorted(tasks, key=lambda task: task[1].rank))
    write(arguments, runner.store, time.time() - begun)
    left = sum(len(runner.missing(*task)) for task in tasks)
    print(f"{time.time() - begun:.0f} s, {left} cells left, {len(runner.failed)} children failed")
    return 1 if runner.failed else 0


def told(model: Model, cells: Sequence[Cell]) -> None:
    """Say which lengths a model has no room for."""
    lengths = sorted({cell.length for cell in cells if cell.length + ROOM > model.room})
    if lengths:
        print(f"{model.name} holds {model.room} tokens: left out are lengths {', '.join(map(str, lengths))}")


def write(arguments: argparse.Namespace, store: Store, seconds: float | None = None) -> None:
    """All reports of what is in the store."""
    rows = latest(store.rows)
    main = arguments.main or Path(arguments.model[0]).name
    regular = [found for path in arguments.profile if (found := regularity(path))]
    asked = {name: value for name, value in vars(arguments).items() if name not in ("command", "out")}
    about: dict[str, Any] = {"texts": texts_hash(), "seconds": seconds, **asked}
    files = {
        "accuracy.json": json.dumps({"benchmark": "accuracy", "arguments": about, "rows": rows}, default=str),
        "summary.json": json.dumps(summary(rows, regular, about, main), indent=1, default=str),
        "report.md": report(rows, regular, main),
    }
    for name, text in files.items():
        (arguments.out / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    print("\n" + files["report.md"])


def main() -> int:
    """Do as the command line says. A signal to end ends the children too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: the same command goes on here"))
    arguments = parse()
    if arguments.command == "run":
        return run(arguments)
    path = arguments.out / "answers.jsonl"
    arguments.main = arguments.main or MAIN_MODEL
    if not path.exists():
        sys.exit(f"{path} is not there: nothing was measured")
    write(arguments, Store(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
