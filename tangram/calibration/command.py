"""``tangram calibrate``: its options, its progress, and what it says at the end."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram.calibration.settings import BUILTIN, CONVERSATIONS, DEVICES, DTYPES, ORACLES, SCOPES, Settings
from tangram.errors import ConfigError, TangramError, Unreachable

if TYPE_CHECKING:
    from tangram.calibration.job import Progress

INTERRUPTED = 130
PROGRESS = ("text", "json")
MARK = "tangram-progress "
"""Stands in front of a line for programs."""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "calibrate",
        help="find out how much of its history each head of a model needs",
        description="Let a model read samples, find out how much of its cache each head needs, and write a "
        "profile. Stopped, it goes on where it was when the same command is given again.",
        allow_abbrev=False,
    )
    default = Settings("", 0.5)
    parser.add_argument("--model", required=True, metavar="MODEL", help="a directory or a hub id")
    parser.add_argument(
        "--retention",
        required=True,
        type=_shares,
        metavar="SHARE[,SHARE...]",
        help="the share of all cached tokens that the best ones are, or several, which cost no more time: an "
        "engine uses the one nearest to its own retention. The first is what the profile proposes",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the profile to write")
    parser.add_argument(
        "--samples",
        type=int,
        default=default.samples,
        metavar="N",
        help="texts to read (default %(default)s)",
    )
    parser.add_argument(
        "--oracle",
        choices=ORACLES,
        default=default.oracle,
        help="who judges tokens: kvzip, by what the model looks at when it repeats the text, or one of the "
        "engine's own scorers (default %(default)s)",
    )
    parser.add_argument(
        "--scope",
        choices=SCOPES,
        default=default.scope,
        help="where the best tokens are sought: in the whole model, or by layer (default %(default)s)",
    )
    parser.add_argument(
        "--alpha",
        type=float,
        default=default.alpha,
        metavar="A",
        help="safety margin that is proposed, in standard deviations (default %(default)g)",
    )
    parser.add_argument(
        "--data",
        default=default.data,
        metavar=f"{BUILTIN}|{CONVERSATIONS}|FILE.jsonl",
        help="texts: ours; the product's conversations of people who allow it; or a file of JSON objects "
        "with a 'text', one a line (default %(default)s)",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=default.length,
        metavar="TOKENS",
        help="tokens of a text; longer ones are cut (default %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=default.seed,
        metavar="S",
        help="chooses the texts (default %(default)s)",
    )
    add_computing(parser)
    parser.set_defaults(run=run)


def add_computing(
    parser: argparse.ArgumentParser, device: str = "auto", elsewhere: str = "the model's own on a GPU"
) -> None:
    """Add the options of commands that load a model themselves: where and how they compute and tell of it.

    Args:
        device: the default.
        elsewhere: which type ``auto`` is where it is not float32 on a CPU.
    """
    parser.add_argument(
        "--device", choices=DEVICES, default=device, help="where to compute (default %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help=f"type to compute in; auto is float32 on a CPU, {elsewhere} (default %(default)s)",
    )
    parser.add_argument(
        "--progress",
        choices=PROGRESS,
        default=PROGRESS[0],
        help="how to tell it: for people, or as JSON objects, one a line, for programs (default %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Calibrate. Returns the exit status."""
    with fields_as_options():
        return _run(arguments)


@contextmanager
def fields_as_options() -> Iterator[None]:
    """What is wrong with a setting is said of its option."""
    try:
        yield
    except Unreachable:
        raise
    except ConfigError as error:
        where = error.field if error.field == "MODEL" else f"--{error.field}"
        raise TangramError(str(error).replace(error.field, where, 1)) from None


def _run(arguments: argparse.Namespace) -> int:
    named = {name: value for name, value in vars(arguments).items() if name in Settings.__dataclass_fields__}
    first, *others = named.pop("retention")
    settings = Settings(**named, retention=first, others=tuple(others))
    try:
        from tangram.calibration.job import calibrate, state_path
    except ImportError as error:
        sentence = f"calibrating needs torch and transformers, which come with vLLM 0.32 ({error})"
        raise TangramError(sentence) from None
    out: Path = arguments.out
    try:
        with ended_gently():
            tell = teller("tangram calibrate", arguments.progress)
            profile = calibrate(settings, out, tell, say)
    except KeyboardInterrupt:
        state = state_path(out)
        kept = f"; what was found is in {state}, and the same command goes on" if state.exists() else ""
        say(f"stopped{kept}")
        return INTERRUPTED
    spread = sum(map(sum, profile.std)) / sum(map(len, profile.std))
    print(f"{out}: {len(profile.mean)} layers x {len(profile.mean[0])} KV heads, mean spread {spread:.3f}")
    print(f"See `tangram profile show {out}`; serve with `--tangram-profile {out}`.")
    return 0


def _shares(text: str) -> list[float]:
    """The value of ``--retention``."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        sentence = f"must be a share such as 0.25, or several with commas between them, not {text!r}"
        raise argparse.ArgumentTypeError(sentence) from None


@contextmanager
def ended_gently() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: it says what was kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def teller(command: str, kind: str) -> Callable[[Progress], None]:
    """Tells each sample on standard error, in one of the ways of ``PROGRESS``.

    Args:
        command: stands in front of a bar.
    """
    return _tell_programs if kind == "json" else _teller(command)


def _tell_programs(progress: Progress) -> None:
    about = {"done": progress.done, "total": progress.total, "kind": progress.kind, "new": progress.new}
    print(f"{MARK}{json.dumps(about)}", file=sys.stderr, flush=True)


def say(sentence: str) -> None:
    print(f"tangram: {sentence}", file=sys.stderr, flush=True)


def _teller(command: str) -> Callable[[Progress], None]:
    """For people: a bar in a terminal that has tqdm, else a line."""
    began = time.monotonic()
    bar: Any = None

    def tell(progress: Progress) -> None:
        nonlocal bar
        if bar is None and sys.stderr.isatty():
            bar = _bar(command, progress.total)
        if bar is not None:
            bar.set_postfix_str(progress.kind, refresh=False)
            bar.update(1)
            if progress.done == progress.total:
                bar.close()
            return
        elapsed = time.monotonic() - began
        say(f"sample {progress.done} of {progress.total} ({progress.kind}), {elapsed:.0f} s since the start")

    return tell


def _bar(command: str, total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, unit="sample", desc=command)
