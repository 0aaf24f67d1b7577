"""The accuracy benchmark's command: a whole run on a tiny model, what it writes, and how it is gone on
with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import __main__ as command
from benchmarks.accuracy.answers import Store
from benchmarks.accuracy.bars import Judge
from benchmarks.accuracy.cells import figure_of, latest, paired
from benchmarks.accuracy.conditions import DEFAULT, Cell, Condition, Job, plan
from benchmarks.accuracy.engine import level, settings, shuffled
from benchmarks.accuracy.regularity import regularity
from benchmarks.accuracy.report import bars_of, report, summary
from benchmarks.accuracy.run import Model, Options, Runner, slots_of
from tangram import shipped
from tangram.errors import ProfileError
from tangram.profile import Profile, load_profile_file
from tests.leftovers import kill_session
from tests.patience import PATIENCE
from tests.tangram.calibrated import made_profile
from tests.tiny_models import random_llama
from tests.tree import ROOT

MODEL = "qwen2.5-0.5b"


def row(condition: str, task: str, scores: list[float], model: str = MODEL, **more: Any) -> dict[str, Any]:
    """As a child writes it."""
    answers: list[dict[str, Any]] = [
        {"seed": seed, "loss": value, "kind": "prose"}
        if task == "loss"
        else {"seed": seed, "turn": 3, "about": "user", "expected": ["1"], "got": "1", "score": value}
        | {"prompt": 100, "cached": 90}
        for seed, value in enumerate(scores)
    ]
    common = {"model": model, "condition": condition, "cell": f"{task}@4096", "seconds": 1.0, "kept": 0.5}
    return common | {"samples": len(scores), "answers": answers} | more


def right(of: int, count: int = 50) -> list[float]:
    return [1.0] * of + [0.0] * (count - of)


GOOD = [
    row("full", "single", right(50)),
    row("full", "multi_key", right(44)),
    row("full", "loss", [2.0] * 50),
    row(f"profile {DEFAULT} 0.25", "single", right(49)),
    row(f"profile {DEFAULT} 0.25", "multi_key", right(40)),
    row(f"profile {DEFAULT} 0.25", "loss", [2.01] * 50),
    row(f"uniform {DEFAULT} 0.25", "multi_key", right(8)),
    row(f"shuffled {DEFAULT} 0.25", "multi_key", right(2)),
    row(f"profile {DEFAULT} 0.125", "multi_key", right(25)),
    row("profile keydiff 0.25", "single", right(49)),
    row("profile keydiff 0.25", "multi_key", right(40)),
    row("replay dynamic keydiff 0.25", "multi_key", right(41)),
    row("replay dynamic keydiff 0.25", "single", right(50)),
]


def test_bars_are_judged_by_the_figures() -> None:
    (bars,) = bars_of(GOOD).values()
    verdicts = {bar.name: bar.verdict for bar in bars}
    assert verdicts.pop("multi_key: static snapkv at most 3 points below dynamic") == "not measured"
    missing = {name for name, verdict in verdicts.items() if verdict == "not measured"}
    assert missing == {
        name for name in verdicts if any(other in name for other in ("snapkv", "expected_attention"))
    }
    assert {v for name, v in verdicts.items() if name not in missing} == {"met"}


QUARTER = f"profile {DEFAULT} 0.25"
MISSED = [
    (QUARTER, "single", right(47), f"single: {QUARTER} at least 95% of full"),
    (QUARTER, "multi_key", right(37), f"multi_key: {QUARTER} at least 85% of full"),
    (f"uniform {DEFAULT} 0.25", "multi_key", right(11), f"multi_key: {QUARTER} at least 4 times uniform"),
    (QUARTER, "loss", [2.03] * 50, f"loss: {QUARTER} within 0.02 nats of full"),
    ("replay dynamic keydiff 0.25", "multi_key", right(43), "multi_key: static keydiff at most 3 points"),
    (
        f"profile {DEFAULT} 0.125",
        "multi_key",
        right(21),
        f"multi_key: profile {DEFAULT} 0.125 at least 50% of full",
    ),
    (f"shuffled {DEFAULT} 0.25", "multi_key", right(20), "multi_key: shuffled budgets fail"),
    ("full", "multi_key", right(30), "multi_key: the ordering full"),
    ("full", "single", right(30, 30), "at least 50 samples a cell"),
]


@pytest.mark.parametrize(("condition", "task", "values", "bar"), MISSED)
def test_each_bar_can_be_missed(condition: str, task: str, values: list[float], bar: str) -> None:
    worse = row(condition, task, values)
    kept = [one for one in GOOD if (one["condition"], one["cell"]) != (worse["condition"], worse["cell"])]
    (bars,) = bars_of([*kept, worse]).values()
    assert [one.verdict for one in bars if one.name.startswith(bar)] == ["MISSED"]


def test_other_models_are_judged_by_the_ordering() -> None:
    rows = [one | {"model": "larger"} for one in GOOD]
    names = [bar.name for bar in bars_of([*GOOD, *rows])["larger"]]
    assert len(names) == 3
    assert names[0].startswith("multi_key: the ordering")
    assert Judge(rows, "nobody", 4096).enough().met is None


def test_figures_and_pairs() -> None:
    figure = figure_of(row("full", "single", right(45)))
    assert (figure.value, figure.count, figure.resumed) == (0.9, 50, 0.9)
    assert (round(figure.low, 3), round(figure.high, 3)) == (0.786, 0.957)
    one, base = row("a", "loss", [2.0, 3.0, 4.0]), row("full", "loss", [1.5, 2.5, 3.5, 9.0])
    assert paired(one, base) == pytest.approx((0.5, 0.5, 0.5))
    several = row("full", "dialogue", [1.0, 0.0])
    several["answers"] += [answer | {"turn": 5, "score": 1.0} for answer in several["answers"]]
    figure = figure_of(several)
    assert (figure.value, figure.count) == (0.75, 2), "a conversation counts once"


def test_the_row_of_the_most_samples_counts() -> None:
    few, many, again = (row("full", "single", right(n, c)) for n, c in ((5, 5), (9, 10), (8, 10)))
    assert latest([few, many, again]) == [again]
    assert latest([many, few]) == [many]


def test_the_tables_and_the_summary(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    made_profile(samples=10).save(path)
    regular = regularity(path)
    assert regular is not None
    talk = row("full", "dialogue", right(40))
    text = report([*GOOD, talk], [regular])
    assert "| full | 50% | 50 | 100 (93-100) | 88 (76-94) |" in text
    assert "+0.010 (+0.010 to +0.010)" in text
    assert "| condition | turn 3, user's |" in text
    rows = summary([*GOOD, talk], [regular], {"seconds": 1.0})
    assert json.loads(json.dumps(rows)) == rows
    assert rows["benchmark"] == "accuracy"
    assert len(rows["figures"]) == len(GOOD) + 1
    assert set(rows["figures"][0]) >= {"model", "condition", "cell", "value", "low", "high", "count", "kept"}
    assert rows["bars"][MODEL][0]["met"] is True


def test_regularity_comes_from_the_stored_needs(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile = made_profile(samples=10)
    profile.save(path)
    found = regularity(path)
    assert found is not None
    assert len(found["kinds"]) == 15
    assert all(-1 <= value <= 1 for value in found["kinds"].values())
    assert found["heads"]["mean"] == sorted(found["heads"]["mean"], reverse=True)
    covered = [one["covered"] for one in found["alphas"]]
    assert covered == sorted(covered)
    ranges = zip(*(found["heads"][name] for name in ("least", "mean", "most")), strict=True)
    assert all(least <= mean <= most for least, mean, most in ranges)
    Profile(profile.mean, profile.std).save(path)
    assert regularity(path) is None


def test_shuffled_budgets_are_the_same_budgets(tmp_path: Path) -> None:
    profile = made_profile()
    other = shuffled(profile)
    assert sorted(sum(other.mean, ())) == sorted(sum(profile.mean, ()))
    pairs = {pair for rows in zip(profile.mean, profile.std, strict=True) for pair in zip(*rows, strict=True)}
    assert {p for rows in zip(other.mean, other.std, strict=True) for p in zip(*rows, strict=True)} == pairs
    assert sum(a != b for a, b in zip(sum(other.mean, ()), sum(profile.mean, ()), strict=True)) > 6
    assert shuffled(profile) == other
    profile.save(tmp_path / "p.json")
    asked = Condition("engine", "shuffled", 0.25).to_dict()
    config = settings(asked, {"kvzip": str(tmp_path / "p.json")}, tmp_path)
    assert Profile.load(str(config.profile), 4, 3).mean == other.mean
    with pytest.raises(ProfileError, match="snapkv, which was not given"):
        settings(Condition("engine", "own", 0.25, "snapkv").to_dict(), {}, tmp_path)


# ---- running ----------------------------------------------------------------------------------------------


def test_the_plan_begins_with_what_the_bars_are_about() -> None:
    jobs = plan(4096, [2048, 8192], ["snapkv"])
    names = [job.condition.name for job in jobs]
    assert names[:4] == ["full", *(f"{b} {DEFAULT} 0.25" for b in ("profile", "uniform", "shuffled"))]
    assert [job.rank for job in jobs] == list(range(len(jobs)))
    assert "own snapkv 0.25" in names
    assert {"profile keyvalue_query 0.25", "uniform keyvalue_query 0.25"} <= set(names)
    cells = [(job.condition.name, cell.name) for job in jobs for cell in job.cells]
    assert len(cells) == len(set(cells))
    other = [job.condition for job in plan(4096, [2048], whole=False)]
    assert {one.runs for one in other} == {"engine"}
    assert {one.scorer for one in other} == {DEFAULT}
    assert (f"uniform {DEFAULT} 0.25", "multi_key@8192") in cells


def test_neighbouring_children_are_on_different_gpus() -> None:
    assert slots_of("cuda", "0,1", 2) == ("0", "1", "0", "1")
    assert slots_of("cpu", "0,1", 2) == (None,)


@pytest.fixture(scope="module")
def tiny(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and a profile for it."""
    folder = random_llama(tmp_path_factory.mktemp("tiny"), bundled_model_dir)
    profile = tmp_path_factory.mktemp("profile") / "p.json"
    Profile(((0.9, 0.1), (0.3, 0.06), (0.05, 0.6)), ((0.0, 0.0),) * 3).save(profile)
    return folder, profile


def test_a_run_is_gone_on_with(
    tiny: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, profile = tiny
    line = [
        "run",
        "--model",
        str(model),
        "--profile",
        str(profile),
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
    ]
    line += [
        "--samples",
        "2",
        "--length",
        "1024",
        "--long",
        "--dtype",
        "float32",
        "--tasks",
        "single",
        "loss",
    ]
    first = command.parse([*line, "--conditions", "replay dynamic keydiff 0.25"])
    assert command.run(first) == 0
    stored = (tmp_path / "answers.jsonl").read_text().splitlines()
    rows = [json.loads(text) for text in stored]
    assert [one["cell"] for one in rows] == ["single@1024", "loss@1024"]
    assert [len(one["answers"]) for one in rows] == [2, 2]
    answer = rows[0]["answers"][0]
    assert set(answer) >= {"seed", "turn", "expected", "got", "score"}
    assert all(one["loss"] > 0 for one in rows[1]["answers"])
    assert rows[0]["kept"] == pytest.approx((512 * 0.25 + 528) / 1040, abs=0.01)
    assert "0 cells left" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} >= {"accuracy.json", "summary.json", "report.md"}
    # A line that was cut off is done again, whole ones are not.
    (tmp_path / "answers.jsonl").write_text(stored[0] + "\n" + stored[1][:40])
    runner_rows = Store(tmp_path / "answers.jsonl").rows
    assert len(runner_rows) == 1


def options(folder: Path, **changes: Any) -> Options:
    usual: dict[str, Any] = {"samples": 2, "offline_samples": 2, "device": "cpu", "dtype": "float32"}
    usual |= {"kv_gib": 1.0, "slots": (None, None), "deadline": 1e12}
    return Options(folder=folder, **usual | changes)


def jobs(model: Model) -> list[tuple[Model, Job]]:
    cells = (Cell("single", 4096), Cell("single", 16384))
    return [(model, Job(n, Condition("engine", "uniform", r), cells)) for n, r in enumerate((0.25, 0.5))]


def test_what_is_done_and_what_has_no_room_is_left_out(
    tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    model = Model(str(folder), {})
    store = Store(tmp_path / "answers.jsonl")
    runner = Runner(options(tmp_path), store)
    asked: list[str] = []

    def child(slot: str | None, model: Model, job: Job, cells: list[Cell]) -> None:
        asked.append(job.condition.name)
        for cell in cells:
            runner._add(row(job.condition.name, "single", [1.0, 0.0], model=model.name, cell=cell.name))

    monkeypatch.setattr(runner, "_child", child)
    runner.run(jobs(model))
    assert sorted(asked) == [f"uniform {DEFAULT} 0.25", f"uniform {DEFAULT} 0.5"]
    assert [one["cell"] for one in store.rows] == ["single@4096"] * 2
    runner.run(jobs(model))
    assert len(asked) == 2
    again = Runner(options(tmp_path, samples=3), Store(tmp_path / "answers.jsonl"))
    assert len(again.missing(*jobs(model)[0])) == 1, "more samples are asked for"
    late = Runner(options(tmp_path, samples=3, deadline=0.0), Store(tmp_path / "answers.jsonl"))
    monkeypatch.setattr(late, "_child", child)
    late.run(jobs(model))
    assert len(asked) == 2


def test_a_child_that_fails_is_told_and_the_rest_goes_on(
    tiny: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(str(tiny[0]), {})
    runner = Runner(options(tmp_path, slots=(None,)), Store(tmp_path / "answers.jsonl"))
    bad = Job(0, Condition("replay", "profile", 0.25), (Cell("single", 1024),))
    runner.run([(model, bad)])
    assert runner.failed == [f"{model.name}, replay profile {DEFAULT} 0.25"]
    assert "which was not given" in capsys.readouterr().out
    assert runner.store.rows == []


def test_a_run_that_is_stopped_ends_its_children(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    model, profile = tiny
    line = ["--model", str(model), "--profile", str(profile), "--out", str(tmp_path), "--device", "cpu"]
    line += ["--samples", "500", "--length", "1024", "--conditions", "replay dynamic keydiff 0.25"]
    command_line = [sys.executable, "-m", "benchmarks.accuracy", "run", *line]

    def workers() -> list[int]:
        """Running ones of this run: their job lies in its folder for temporary files."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"benchmarks.accuracy.worker" in words and str(tmp_path).encode() in words[-2]:
                found.append(int(path.parent.name))
        return found

    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command_line, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            end = time.monotonic() + 5 * PATIENCE
            while not workers() and time.monotonic() < end:
                time.sleep(0.1)
            assert len(workers()) == 1
            process.terminate()
            assert "goes on here" in process.communicate(timeout=4 * PATIENCE)[1]
        except BaseException:
            kill_session(process.pid)  # which `with` would wait for
            raise
    assert workers() == []


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--profile", "a", "--profile", "b"], "as many --profile as --model"),
        (["--profile", "nowhere.json"], "nowhere.json is not there"),
        (["--profile", "x", "--own", "snapkv"], "SCORER=FILE is wanted"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, more: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit, match=sentence):
        command.run(command.parse(["run", "--model", str(tmp_path), "--out", str(tmp_path / "o"), *more]))


def test_all_conditions_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command.parse(["run", "--model", "m", "--profile", "p", "--out", "o", "--conditions", "list"])
    assert command.run(arguments) == 0
    assert "kvpress KVzip 0.25" in capsys.readouterr().out
    assert isinstance(arguments, Namespace)


def test_changed_budgets_leave_what_heads_are_asked() -> None:
    found = load_profile_file(next(shipped.folder().glob("smollm2*.json")))
    assert found.calibration is not None
    for other in (shuffled(found), level(found)):
        assert other.mean_queries() == found.mean_queries()
        assert other.budgets(0.25, 1.0) != found.budgets(0.25, 1.0)
    assert len({value for row in level(found).budgets(0.25, 1.0) for value in row}) == 1
