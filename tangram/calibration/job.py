"""A calibration from beginning to end: samples, needs, profile. Who calls it may watch and stop it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from tangram.calibration.conversations import conversation_lines
from tangram.calibration.framing import LEAD_TOKENS, Frame, encode, frame_of
from tangram.calibration.mean_queries import QuerySums, over_samples
from tangram.calibration.model import Reader, load
from tangram.calibration.oracle import PART, judge, key_needs, needs
from tangram.calibration.samples import Sample, builtin, from_conversations, from_file, hash_of
from tangram.calibration.settings import BUILTIN, CONVERSATIONS, Settings
from tangram.calibration.state import Found, State, Table
from tangram.calibration.statistics import DECIMALS, Needs, mean_and_std
from tangram.cli import own_version
from tangram.errors import ConfigError
from tangram.profile import Profile
from tangram.profile_file import KEY_SCORER, KEY_SHARE, Calibration, KeyNeeds, Target, as_matrix

REQUEST_ROOM = 64
"""Tokens that are left at least for asking the model to repeat."""


@dataclass(frozen=True)
class Progress:
    """So many of so many samples are done; ``kind`` is that of the last one, which is ``new`` if it was read
    now."""

    done: int
    total: int
    kind: str
    new: bool = True


class Stopped(Exception):
    """The caller asked to stop. What was found is kept."""


def calibrate(
    settings: Settings,
    out: Path,
    on_progress: Callable[[Progress], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Profile:
    """Make a profile and write it.

    Args:
        out: the profile's file. A state beside it keeps what was found until the profile is complete.
        on_progress: called after each sample.
        say: gets sentences for the user.
        stop: asked before each sample.

    Raises:
        TangramError: model, samples or settings cannot work.
        Stopped: ``stop`` said so.
    """
    check_out(out)
    reader = load(settings.model, settings.device, settings.dtype)
    frame = frame_of(reader.tokenizer)
    samples = chosen(settings, reader, frame, say)
    state, sentence = State.open(state_path(out), _depends(settings, reader))
    if sentence:
        say(sentence)
    done = sum(sample.key in state.found for sample in samples)
    if done:
        say(f"going on: {done} of {len(samples)} samples were done before")
    for number, sample in enumerate(samples, 1):
        new = sample.key not in state.found
        if new:
            if stop():
                raise Stopped
            state.add(sample.key, _needs_of(settings, reader, frame, sample))
        on_progress(Progress(number, len(samples), sample.kind, new))
    profile = _profile(settings, reader, samples, state, str(out))
    profile.save(out)
    state.remove()
    return profile


def state_path(out: Path) -> Path:
    """Where the state lies while the profile is not complete."""
    return out.with_name(out.name + ".state")


def chosen(settings: Settings, reader: Reader, frame: Frame, say: Callable[[str], None]) -> list[Sample]:
    """:func:`choose`, which is said where there are fewer than asked for."""
    samples = choose(settings, reader, frame)
    if len(samples) < settings.samples:
        say(f"{settings.data} has {len(samples)} samples, all are used")
    return samples


def choose(settings: Settings, reader: Reader, frame: Frame) -> list[Sample]:
    """The samples, each checked to fit the model."""

    def tokens(text: str) -> list[int]:
        return encode(reader.tokenizer, text)

    room = reader.identity.max_model_len - len(frame.before)
    if settings.oracle == "kvzip":
        room -= min(PART, settings.length) + max(REQUEST_ROOM, len(frame.request([])) + 4 * LEAD_TOKENS)
    if settings.length > room:
        raise ConfigError(
            "length",
            f"must be at most {room}, not {settings.length}: {reader.identity.name} holds "
            f"{reader.identity.max_model_len} tokens, of which the oracle {settings.oracle} needs the rest",
        )
    if settings.data == BUILTIN:
        return builtin(tokens, settings.samples, settings.length, settings.seed)
    limits = (settings.samples, settings.length, settings.least_length, settings.seed)
    if settings.data == CONVERSATIONS:
        return from_conversations(conversation_lines(), tokens, *limits)
    return from_file(Path(settings.data), tokens, *limits)


def _needs_of(settings: Settings, reader: Reader, frame: Frame, sample: Sample) -> Found:
    tokens = len(frame.before) + len(sample.tokens)
    keys: list[Table] = []

    def look_at_keys(cache: object) -> None:
        keys.append(_rounded(key_needs(reader, cache, tokens, settings.geometry)))

    sums = QuerySums(reader)
    scores = judge(reader, frame, sample.tokens, settings.oracle, settings.geometry, look_at_keys, sums)
    sink = settings.geometry.sink
    found = [_rounded(needs(scores, share, settings.scope, sink)) for share in settings.retentions]
    return Found(found, keys[0], sums.means())


def _rounded(table: Any) -> Table:
    return [[round(float(need), DECIMALS) for need in row] for row in table]


def _depends(settings: Settings, reader: Reader) -> dict[str, Any]:
    """All that a sample's needs depend on. The number of samples, their seed and alpha do not count: more
    samples go on where fewer ended."""
    geometry, identity = settings.geometry, reader.identity
    about: dict[str, Any] = {name: getattr(settings, name) for name in ("oracle", "scope")}
    about["retention"] = list(settings.retentions)
    about |= {name: getattr(geometry, name) for name in ("chunk", "window", "sink", "query_window")}
    about["mean_queries"] = True
    about |= {"model": identity.config_hash, "weights": identity.weights_hash, "part": PART}
    about |= {"dtype": str(next(reader.decoder.parameters()).dtype), "tokenizer": identity.tokenizer_hash}
    return about | {"version": own_version()}


def _profile(settings: Settings, reader: Reader, samples: list[Sample], state: State, source: str) -> Profile:
    every = [state.found[sample.key] for sample in samples]
    first, *others = (
        _target(retention, np.array([found.needs[place] for found in every]))
        for place, retention in enumerate(settings.retentions)
    )
    kept = ("retention", "oracle", "scope", "alpha", "length", "seed")
    calibration = Calibration(
        model=reader.identity,
        settings={name: getattr(settings, name) for name in kept}
        | {
            "data": Path(settings.data).name,
            "dtype": str(next(reader.decoder.parameters()).dtype).removeprefix("torch."),
            "window": settings.geometry.window,
            "sink": settings.geometry.sink,
        },
        samples=len(samples),
        samples_hash=hash_of(samples),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool=own_version(),
        least=first.least,
        most=first.most,
        needs=first.needs,
        others=tuple(others),
        key_needs=KeyNeeds(KEY_SCORER, KEY_SHARE, tuple(as_matrix(found.keys) for found in every)),
        mean_queries=over_samples(found.queries for found in every),
    )
    return Profile(first.mean, first.std, source=source, calibration=calibration)


def _target(retention: float, every: Needs) -> Target:
    """Statistics of [samples, layers, kv_heads]."""
    mean, std = mean_and_std(every)
    return Target(
        retention=retention,
        mean=as_matrix(mean),
        std=as_matrix(std),
        least=as_matrix(every.min(axis=0)),
        most=as_matrix(every.max(axis=0)),
        needs=tuple(as_matrix(one) for one in every),
    )


def check_out(out: Path, field: str = "out") -> None:
    """Raise ConfigError, about ``field``, before hours of work if the profile cannot be written."""
    if out.is_dir():
        raise ConfigError(field, f"{out} is a directory, a file name is wanted")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        trial = out.with_name(out.name + ".new")
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(field, f"{out} cannot be written: {error.strerror}") from None
