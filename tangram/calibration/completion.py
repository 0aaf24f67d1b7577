"""Mean queries for a profile that was calibrated without them: samples are read again, nothing is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tangram.calibration.framing import frame_of
from tangram.calibration.job import Progress, check_out, chosen
from tangram.calibration.mean_queries import over_samples, rotary_of
from tangram.calibration.model import Reader, load
from tangram.calibration.oracle import asked
from tangram.calibration.samples import Sample, hash_of
from tangram.calibration.settings import BUILTIN, Settings
from tangram.cli import own_version
from tangram.errors import ConfigError, ProfileError, UnsupportedError
from tangram.hub import local_path
from tangram.identity import ModelIdentity, weights_fingerprint
from tangram.profile import Profile, load_of_model, load_profile_file
from tangram.profile_file import Calibration, QueryOrigin


@dataclass(frozen=True)
class Wanted:
    """What is asked for.

    Attributes:
        model: a directory or a hub id, of the profile's model.
        samples: texts to read; None for as many as the profile was calibrated with.
        data: ``builtin``, ``conversations``, or a JSONL file; None for built-in texts where the profile was
            calibrated with them.
        force: also where the profile has mean queries.
    """

    model: str
    samples: int | None = None
    data: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    force: bool = False


def add_queries(
    path: Path,
    out: Path,
    wanted: Wanted,
    on_progress: Callable[[Progress], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Find the mean queries of a profile's model, and write the profile with them. All else in it stays.

    They are those that a calibration with the same samples, oracle and type of computation notes. Beside the
    model, one text's cache is held at a time.

    Args:
        path: the profile.
        out: the file to write, which may be the same.
        on_progress: called after each sample.
        say: gets sentences for the user.

    Raises:
        ProfileError: the profile cannot be used or completed, or is of another model.
        TangramError: model, samples or settings cannot work.
    """
    profile = load_profile_file(path)
    known = profile.calibration
    if known is None:
        raise ProfileError(f"profile {path} was not calibrated, so nothing can be added to it: calibrate one")
    if known.mean_queries is not None and not wanted.force:
        raise ProfileError(f"profile {path} has mean queries already; --force finds them anew")
    with _blamed(path):
        settings = _settings(known, wanted)
    check_out(out, "output")

    def accept(identity: ModelIdentity) -> None:
        load_of_model(path, identity)

    reader = load(settings.model, settings.device, settings.dtype, accept)
    if reader.identity.weights_hash is None:  # their files may have come from the hub since
        known.model.refuse_other(str(path), None, weights_fingerprint(local_path(wanted.model)))
    _check_rotation(reader)
    frame = frame_of(reader.tokenizer)
    with _blamed(path):
        samples = chosen(settings, reader, frame, say)
    if len(samples) == known.samples and hash_of(samples) != known.samples_hash:
        say(f"these are not the texts that {path} was calibrated with")

    def found() -> Iterator[list[list[list[float]]] | None]:
        for number, sample in enumerate(samples, 1):
            means = asked(reader, frame, sample.tokens, settings.oracle, settings.geometry).means()
            on_progress(Progress(number, len(samples), sample.kind))
            yield means

    calibration = replace(
        known, mean_queries=over_samples(found()), queries_from=_origin(settings, reader, samples)
    )
    completed = replace(profile, source=str(out), calibration=calibration)
    completed.save(out)
    return completed


def _settings(known: Calibration, wanted: Wanted) -> Settings:
    """Those of the profile, as far as they decide what is read and how."""
    made = known.settings
    if wanted.data is None and made["data"] != BUILTIN:
        raise ConfigError(
            "data",
            f"must be given: the profile was calibrated with {made['data']}; "
            f"{BUILTIN} reads the built-in texts instead",
        )
    return Settings(
        model=wanted.model,
        retention=made["retention"],
        samples=known.samples if wanted.samples is None else wanted.samples,
        oracle=made["oracle"],
        data=wanted.data or BUILTIN,
        length=made["length"],
        seed=made["seed"],
        device=wanted.device,
        dtype=wanted.dtype,
    )


@contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """What is wrong with a setting that comes from the profile is said of the profile."""
    try:
        yield
    except ConfigError as error:
        if error.field in Wanted.__dataclass_fields__:
            raise
        raise ProfileError(
            f"profile {path} was calibrated in a way that cannot be repeated: {error}"
        ) from None


def _check_rotation(reader: Reader) -> None:
    """Raise UnsupportedError where it is not known how the model rotates."""
    try:
        rotary_of(reader)
    except UnsupportedError as error:
        raise UnsupportedError(f"{reader.identity.name} can have no mean queries: {error}") from None


def _origin(settings: Settings, reader: Reader, samples: list[Sample]) -> QueryOrigin:
    return QueryOrigin(
        samples=len(samples),
        samples_hash=hash_of(samples),
        data=Path(settings.data).name,
        length=settings.length,
        seed=settings.seed,
        dtype=str(next(reader.decoder.parameters()).dtype).removeprefix("torch."),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool=own_version(),
    )
