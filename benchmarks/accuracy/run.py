"""Runs jobs in child processes, several at a time, and gathers their rows in one file."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import engines
from benchmarks.accuracy.answers import Row, Store
from benchmarks.accuracy.conditions import Cell, Job

ROOM = 1024
"""Tokens of a context behind a cell's length: the last turn's, or the text whose loss is counted."""


@dataclass(frozen=True)
class Model:
    """A model under test.

    Attributes:
        profiles: files: "kvzip", and by scorers' names those calibrated with the scorer as the oracle.
    """

    path: str
    profiles: dict[str, str]

    @property
    def name(self) -> str:
        """As tables and files have it."""
        return Path(self.path).name

    @property
    def room(self) -> int:
        """Tokens of its longest context."""
        return int(json.loads((Path(self.path) / "config.json").read_text())["max_position_embeddings"])


@dataclass(frozen=True)
class Options:
    """How jobs are run.

    Attributes:
        folder: where children find their jobs and leave their logs.
        slots: what each child at a time gets as CUDA_VISIBLE_DEVICES; None on a CPU.
        deadline: Unix time behind which no cell is begun.
        offline_samples: of a cell that runs one sample at a time.
    """

    folder: Path
    samples: int
    offline_samples: int
    device: str
    dtype: str
    kv_gib: float
    slots: tuple[str | None, ...]
    deadline: float


Task = tuple[Model, Job]


class Runner:
    """All jobs of all models."""

    def __init__(self, options: Options, store: Store) -> None:
        self.options, self.store = options, store
        self.failed: list[str] = []
        self._lock = threading.Lock()
        self._number = 0
        self._stopped = False
        self._running: list[subprocess.Popen[str]] = []
        self._environment = {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
        self._environment |= engines.environment(options.folder)

    def samples(self, job: Job) -> int:
        """Of each of its cells."""
        return self.options.samples if job.condition.runs == "engine" else self.options.offline_samples

    def missing(self, model: Model, job: Job) -> list[Cell]:
        """The cells that are not done and that the model has room for."""
        name = job.condition.name
        return [
            cell
            for cell in job.cells
            if cell.length + ROOM <= model.room
            and not self.store.has(model.name, name, cell.name, self.samples(job))
        ]

    def run(self, tasks: Sequence[Task]) -> None:
        """Run what is missing, in this order, as many at a time as there are slots."""
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        threads = [threading.Thread(target=self._work, args=(slot, waiting)) for slot in self.options.slots]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the children and begin no other; finished cells are kept."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()

    def _work(self, slot: str | None, waiting: queue.SimpleQueue[Task]) -> None:
        while time.time() < self.options.deadline and not self._stopped:
            try:
                model, job = waiting.get_nowait()
            except queue.Empty:
                return
            cells = self.missing(model, job)
            if cells:
                self._child(slot, model, job, cells)

    def _child(self, slot: str | None, model: Model, job: Job, cells: Sequence[Cell]) -> None:
        with self._lock:
            self._number += 1
            folder = self.options.folder / f"child-{self._number}"
        folder.mkdir(exist_ok=True)
        given, log = folder / "job.json", folder / "log.txt"
        given.write_text(json.dumps(self._job(model, job, cells, folder)))
        environment = dict(self._environment)
        if slot is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot
        command = [sys.executable, "-m", "benchmarks.accuracy.worker", str(given)]
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=engines.ROOT
            ) as process,
        ):
            assert process.stdout is not None
            with self._lock:
                self._running.append(process)
                if self._stopped:
                    process.terminate()
            for line in process.stdout:
                self._add(json.loads(line))
        with self._lock:
            self._running.remove(process)
        if process.returncode and not self._stopped:
            label = f"{model.name}, {job.condition.name}"
            with self._lock:
                self.failed.append(label)
                end = log.read_text(errors="replace")[-3000:]
                print(f"{label}: ended with {process.returncode}:\n{end}", flush=True)

    def _add(self, row: Row) -> None:
        with self._lock:
            self.store.add(row)
            scores = [answer["score"] for answer in row["answers"] if "score" in answer]
            losses = [answer["loss"] for answer in row["answers"] if "loss" in answer]
            values, what = (losses, "nats") if losses else (scores, "right")
            print(
                f"{row['model']:<16} {row['condition']:<32} {row['cell']:<18} {row['seconds']:>6.1f} s "
                f"{sum(values) / len(values):>7.3f} {what} ({len(values)})",
                flush=True,
            )

    def _job(self, model: Model, job: Job, cells: Sequence[Cell], folder: Path) -> dict[str, Any]:
        longest = max(cell.length for cell in cells) + ROOM
        return {
            "model": model.path,
            "name": model.name,
            "profiles": model.profiles,
            "condition": job.condition.to_dict(),
            "condition_name": job.condition.name,
            "cells": [asdict(cell) for cell in cells],
            "samples": self.samples(job),
            "device": self.options.device,
            "dtype": self.options.dtype,
            "kv_gib": self.options.kv_gib,
            "max_model_len": longest,
            "folder": str(folder),
            "deadline": self.options.deadline,
        }


def slots_of(device: str, gpus: str, per_gpu: int) -> tuple[str | None, ...]:
    """One for each child that may run at a time; neighbours are on different GPUs."""
    if device == "cpu":
        return (None,)
    return tuple(gpu for _ in range(per_gpu) for gpu in gpus.split(","))


def default_device() -> str:
    """A GPU if there is one."""
    return "cuda" if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/nvidia0") else "cpu"  # noqa: PTH110
