"""``tangram profile show|diff|check``: looks at profile files, without a model.

``tangram profile add-queries`` completes one that was calibrated before mean queries were noted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tangram.calibration.command import (
    INTERRUPTED,
    add_computing,
    ended_gently,
    fields_as_options,
    say,
    teller,
)
from tangram.calibration.settings import BUILTIN, CONVERSATIONS
from tangram.config import TangramConfig
from tangram.errors import ConfigError, ProfileError, TangramError
from tangram.profile import Profile, load_profile_file
from tangram.profile_file import Calibration

RETUNED = ("retention", "alpha", "scope", "group_size")


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "profile",
        help="look at profiles of calibrated budgets, or complete one",
        description="Look at profile files, or complete one.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    shown = actions.add_parser(
        "show", help="statistics, budgets, memory, advice", description="Show a profile.", allow_abbrev=False
    )
    shown.add_argument("file", metavar="FILE")
    shown.set_defaults(run=show)
    compared = actions.add_parser(
        "diff", help="compare two profiles", description="Compare two profiles.", allow_abbrev=False
    )
    compared.add_argument("file", metavar="FILE")
    compared.add_argument("other", metavar="FILE")
    compared.set_defaults(run=diff)
    for command in (shown, compared):
        command.add_argument(
            "--retention", type=float, metavar="SHARE", help="retune to it (default: the profile's)"
        )
        command.add_argument(
            "--alpha", type=float, metavar="A", help="safety margin (default: the profile's)"
        )
    shown.add_argument("--scope", choices=("model", "layer"), help="of tiers (default: the profile's)")
    shown.add_argument("--group-size", type=int, metavar="G", help="heads that share pages (default: auto)")
    checked = actions.add_parser(
        "check",
        help="whether a profile is whole, well founded, and made for a model",
        description="Check a profile: refuse one that no engine would take, and name what weakens it.",
        allow_abbrev=False,
    )
    checked.add_argument("file", metavar="FILE")
    checked.add_argument("--model", metavar="MODEL", help="a directory or a hub id, to compare with")
    checked.set_defaults(run=check)
    completed = actions.add_parser(
        "add-queries",
        help="add the mean queries that the scorer keyvalue_query needs",
        description="Add mean queries to a profile that was calibrated without them, for the scorer "
        "keyvalue_query: its model reads the samples again, and nothing else in the profile changes.",
        allow_abbrev=False,
    )
    completed.add_argument("file", metavar="FILE")
    completed.add_argument("--model", required=True, metavar="MODEL", help="a directory or a hub id")
    completed.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="texts to read (default: as many as the profile was calibrated with)",
    )
    completed.add_argument(
        "--data",
        metavar=f"{BUILTIN}|{CONVERSATIONS}|FILE.jsonl",
        help="texts, as for tangram calibrate; built-in ones are chosen by the profile's own seed and length "
        "(default: built-in ones, where the profile was calibrated with them)",
    )
    completed.add_argument(
        "--output", type=Path, metavar="FILE", help="the profile to write (default: the same file)"
    )
    completed.add_argument(
        "--force", action="store_true", help="find them anew where the profile has mean queries"
    )
    add_computing(completed)
    completed.set_defaults(run=add_queries)


def show(arguments: argparse.Namespace) -> int:
    """Print all that is known."""
    from tangram.profile_text import show as text

    profile = load_profile_file(arguments.file)
    print("\n".join(text(arguments.file, profile, _config(arguments, profile))))
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """Print how two profiles differ."""
    from tangram.profile_text import diff as text

    config = _config(arguments, load_profile_file(arguments.file))
    print("\n".join(text(arguments.file, arguments.other, config)))
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Print what weakens a profile. Raises ProfileError for one that cannot be used."""
    profile = load_profile_file(arguments.file)
    known = profile.calibration
    if arguments.model is not None:
        _compare(arguments.file, known, arguments.model)
    notes = ["it names no model, so no engine can tell whether it is for another one"]
    if known is not None:
        from tangram.advice import weaknesses

        notes = weaknesses(profile, known)
    for note in notes:
        print(f"{arguments.file}: {note}")
    if not notes:
        print(f"{arguments.file}: in order")
    return 0


def add_queries(arguments: argparse.Namespace) -> int:
    """Complete a profile. Returns the exit status."""
    try:
        from tangram.calibration.completion import Wanted
        from tangram.calibration.completion import add_queries as completed
    except ImportError as error:
        sentence = f"this needs torch and transformers, which come with vLLM 0.32 ({error})"
        raise TangramError(sentence) from None
    path = Path(arguments.file)
    out: Path = arguments.output or path
    wanted = Wanted(**{name: getattr(arguments, name) for name in Wanted.__dataclass_fields__})
    try:
        with fields_as_options(), ended_gently():
            tell = teller("tangram profile add-queries", arguments.progress)
            profile = completed(path, out, wanted, tell, say)
    except KeyboardInterrupt:
        say("stopped; nothing was written")
        return INTERRUPTED
    means = profile.mean_queries()
    print(f"{out}: mean queries of {len(means)} layers x {len(means[0])} KV heads")
    print(f"Serve with `--tangram-profile {out}`: the scorer auto is keyvalue_query then.")
    return 0


def _compare(path: str, known: Calibration | None, model: str) -> None:
    from tangram.hub import check_reachable, local_path
    from tangram.identity import config_fingerprint, weights_fingerprint

    if known is None:
        raise ProfileError(f"profile {path} names no model that {model} could be compared with")
    model = local_path(model)
    check_reachable(model, None)
    try:
        from transformers import AutoConfig

        text = AutoConfig.from_pretrained(model).get_text_config()
    except ImportError as error:
        raise TangramError(f"comparing with a model needs transformers ({error})") from None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("MODEL", f"{model} cannot be read: {' '.join(str(error).split())}") from None
    known.model.refuse_other(path, config_fingerprint(text), weights_fingerprint(model))


def _config(arguments: argparse.Namespace, profile: Profile) -> TangramConfig:
    """What the options ask for; where they are silent, what the profile was made with."""
    known = profile.calibration
    values: dict[str, Any] = {}
    if known is not None:
        values = {name: known.settings[name] for name in ("retention", "alpha", "scope")}
    given = {name: getattr(arguments, name, None) for name in RETUNED}
    return TangramConfig.from_mapping(values | {name: v for name, v in given.items() if v is not None})
