"""``tangram evaluate``: tries profiles on their model, before any engine runs with them."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram.calibration.command import (
    INTERRUPTED,
    MARK,
    add_computing,
    ended_gently,
    fields_as_options,
    say,
)
from tangram.calibration.verdict import sentences
from tangram.config import AUTO, NONE, WITHOUT_QUERIES, TangramConfig
from tangram.errors import TangramError

if TYPE_CHECKING:
    from tangram.calibration.evaluation import Progress


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "evaluate",
        help="try a profile on its model, or compare two, without an engine",
        description="Ask a model about facts that look alike, and take its loss on text, with everything "
        "kept and with the budgets of one profile or two.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "profiles",
        nargs="+",
        metavar="FILE",
        help=f"a profile, {AUTO} for the release's, or {NONE} for equal budgets",
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help="a directory or a hub id")
    parser.add_argument("--retention", type=float, metavar="SHARE", help="of the engine (default 0.5)")
    parser.add_argument("--alpha", type=float, metavar="A", help="safety margin (default 1)")
    parser.add_argument(
        "--settings",
        type=_settings,
        default={},
        metavar="JSON",
        help="other settings of the engine, an object as the field config of GET /tangram/memory",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the result as JSON")
    add_computing(parser, "cpu", "or the model's own where that does not fit")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Try them. Returns the exit status."""
    if len(arguments.profiles) > 2:
        raise TangramError("at most two profiles can be compared")
    _end_first()
    try:
        with fields_as_options(), ended_gently():
            found = _evaluated(arguments)
    except KeyboardInterrupt:
        say("stopped")
        return INTERRUPTED
    if arguments.out is not None:
        fresh = arguments.out.with_name(arguments.out.name + ".new")
        try:
            fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            fresh.replace(arguments.out)
        except OSError as error:
            raise TangramError(f"--out: {arguments.out} cannot be written: {error.strerror}") from None
    print("\n".join(table(found)))
    return 0


def table(found: dict[str, Any]) -> list[str]:
    """The result for a terminal."""
    lines = [f"{'':<28} right   loss of an answer   loss of text   scorer"]
    rows = [("everything kept", found["everything"] | {"scorer": "-"})]
    rows += [(one["profile"], one) for one in found["profiles"]]
    for name, one in rows:
        count = f"{one['right']}/{one['asked']}"
        figures = f"{count:>5}   {one['answer_loss']:>17.3f}   {one['text_loss']:>12.3f}"
        lines.append(f"{name[:28]:<28} {figures}   {one['scorer']}")
    lines.append("Losses are in nats, of an answer and of a token: less is better.")
    names = [one["profile"] for one in found["profiles"]]
    if len({one["scorer"] for one in found["profiles"]}) > 1:
        lines.append(
            "Not only the budgets differ but also what ranks; "
            f"""--settings '{{"scorer": "{WITHOUT_QUERIES}"}}' compares budgets alone."""
        )
    if found["difference"] is not None:
        return [*lines, *sentences(found, names[0], names[1])]
    whole = found["everything"]
    return (
        lines
        if whole["right"]
        else [*lines, f"This model cannot answer even with everything kept (0 of {whole['asked']})."]
    )


def _evaluated(arguments: argparse.Namespace) -> dict[str, Any]:
    own = {name: getattr(arguments, name) for name in ("retention", "alpha")}
    given = {name: value for name, value in own.items() if value is not None}
    settings = TangramConfig.from_mapping({**arguments.settings, "profile": None, **given})
    try:
        from tangram.calibration.evaluation import evaluate
    except ImportError as error:
        sentence = f"this needs torch and transformers, which come with vLLM 0.32 ({error})"
        raise TangramError(sentence) from None
    tell = _tell_programs if arguments.progress == "json" else _tell
    return evaluate(arguments.model, arguments.profiles, settings, arguments.device, arguments.dtype, tell)


def _settings(text: str) -> dict[str, Any]:
    """The value of ``--settings``."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return found


def _end_first() -> None:
    """Where memory runs out, the system ends this process rather than the engine beside it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _tell_programs(progress: Progress) -> None:
    about = {"done": progress.done, "total": progress.total}
    print(f"{MARK}{json.dumps(about)}", file=sys.stderr, flush=True)


def _tell(progress: Progress) -> None:
    say(f"{progress.done} of {progress.total} readings done")
