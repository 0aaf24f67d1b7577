"""``tangram profile show|diff|check``: looks at profile files, without a model."""

from __future__ import annotations

import argparse
from typing import Any

from tangram.config import TangramConfig
from tangram.errors import ConfigError, ProfileError, TangramError
from tangram.profile import Profile, load_profile_file
from tangram.profile_file import Calibration

FEW_SAMPLES = 10
AGREEMENT = 0.9
COVERED = 0.9
RETUNED = ("retention", "alpha", "scope", "group_size")


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "profile", help="look at profiles of calibrated budgets", description="Look at profile files."
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
        notes = weaknesses(profile, known)
    for note in notes:
        print(f"{arguments.file}: {note}")
    if not notes:
        print(f"{arguments.file}: in order")
    return 0


def weaknesses(profile: Profile, known: Calibration) -> list[str]:
    """Sentences on what makes a usable profile doubtful."""
    from tangram.advice import needs_of
    from tangram.calibration.statistics import coverage, split_half

    needs, alpha, notes = needs_of(known), float(known.settings["alpha"]), []
    if known.samples < FEW_SAMPLES:
        notes.append(f"{known.samples} samples are few: spread and coverage are uncertain")
    agreement = split_half(needs)
    if agreement is not None and agreement < AGREEMENT:
        notes.append(f"the heads' ranks in two halves of the samples agree by {agreement:.2f} only")
    covered = coverage(needs, alpha, profile.floor)
    if covered < COVERED:
        notes.append(f"alpha {alpha:g} covers {covered:.0%} of the samples' needs, before scaling")
    return notes


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
