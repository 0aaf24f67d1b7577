"""Profiles tried on a model before any engine runs with them: look-alike facts, and loss behind sealed text.

Every profile, and the whole cache, reads the same passages with the cache's own arithmetic
(:mod:`tangram.calibration.replay`) at the settings of an engine. The model is loaded once, in this process:
an engine beside it is not asked for anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import log_softmax

from tangram import shipped
from tangram.advice import shape_of
from tangram.calibration.framing import frame_of
from tangram.calibration.model import Reader, load_whole
from tangram.calibration.passages import QUESTION_ROOM, SCORED, Passage, hash_of, passages
from tangram.calibration.replay import Replay, ranked_by
from tangram.calibration.room import compute_type
from tangram.calibration.verdict import FORMAT, VERSION, Figures, difference, file_hash
from tangram.cli import own_version
from tangram.config import AUTO, NONE, TangramConfig
from tangram.errors import ProfileError
from tangram.profile import build_geometry

PASSAGES, FACTS = 4, 6
BLOCK = 32
"""Tokens whose mean loss counts as one value: neighbours are not independent."""


@dataclass(frozen=True)
class Progress:
    """So many of so many passages are read; a passage counts once for each way to keep it."""

    done: int
    total: int


def evaluate(
    model: str,
    profiles: Sequence[str],
    settings: TangramConfig,
    device: str = "cpu",
    dtype: str = "auto",
    on_progress: Callable[[Progress], None] = lambda _: None,
    count: int = PASSAGES,
    facts: int = FACTS,
) -> dict[str, Any]:
    """Try one profile, or compare two.

    Args:
        profiles: files, ``auto`` for the release's of this model, or ``none`` for equal budgets.
        settings: of the engine; its profile does not count.

    Returns:
        JSON-ready; see :mod:`tangram.calibration.verdict`.

    Raises:
        TangramError: model, profiles or settings cannot work, or there is not enough memory.
    """
    began = time.monotonic()
    profiles = [_file(profile, model) for profile in profiles]
    kind = compute_type(model, device, dtype)
    reader, head = load_whole(model, device, kind)
    shape = shape_of(reader.identity)
    configs = [_config(settings, profile) for profile in profiles]
    geometries = [build_geometry(config, shape) for config in configs]
    scorers = [ranked_by(reader, config)[1] for config in configs]
    whole = replace(settings, profile=None, retention=1.0)
    ways = [(whole, build_geometry(whole, shape)), *zip(configs, geometries, strict=True)]
    texts = passages(frame_of(reader.tokenizer), settings, reader.identity.max_model_len, count, facts)
    found: list[list[Figures]] = [[] for _ in ways]
    total = len(texts) * len(ways)
    on_progress(Progress(0, total))
    for text in texts:
        for figures, (config, geometry) in zip(found, ways, strict=True):
            cache = Replay(reader, head, config, geometry, len(text.tokens) + QUESTION_ROOM)
            figures.append(_tried(cache, text))
            on_progress(Progress(sum(map(len, found)), total))
    everything, *each = (Figures.joined(parts) for parts in found)
    return {
        "format": FORMAT,
        "version": VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "tool": own_version(),
        "model": _model(reader),
        "settings": {name: getattr(settings, name) for name in SHAPING},
        "dtype": str(next(reader.decoder.parameters()).dtype).removeprefix("torch."),
        "device": reader.device.type,
        "seconds": round(time.monotonic() - began, 1),
        "probe": {"hash": hash_of(texts), "passages": len(texts), "tokens": len(texts[0].tokens)},
        "everything": everything.to_dict(),
        "profiles": [
            _profile(name) | {"budget": geometry.budget, "scorer": scorer} | figures.to_dict()
            for name, geometry, scorer, figures in zip(profiles, geometries, scorers, each, strict=True)
        ],
        "difference": difference(*each) if len(each) == 2 else None,
    }


SHAPING = ("retention", "alpha", "scope", "group_size", "scorer", "chunk", "window", "sink", "page_tokens")
"""Settings that decide what a query sees."""


def _file(profile: str, model: str) -> str:
    if profile != AUTO:
        return profile
    found = shipped.find(model)
    if found is None:
        raise ProfileError(f"the release has no profile for the weights of {model}: name a file, or {NONE}")
    return str(shipped.folder() / found.file)


def _config(settings: TangramConfig, profile: str) -> TangramConfig:
    if profile == NONE:
        return replace(settings, profile=None)
    scope = "model" if settings.scope == "uniform" else settings.scope
    return replace(settings, profile=profile, scope=scope)


def _profile(name: str) -> dict[str, Any]:
    path = Path(name)
    return {"profile": path.name, "file_hash": None if name == NONE else file_hash(path)}


def _model(reader: Reader) -> dict[str, Any]:
    known = reader.identity
    return {"name": known.name, "config_hash": known.config_hash, "weights_hash": known.weights_hash}


def _tried(cache: Replay, text: Passage) -> Figures:
    losses = _losses(cache, text.tokens, text.first)
    blocks = [losses[start : start + BLOCK] for start in range(0, SCORED, BLOCK)]
    right: list[bool] = []
    answers: list[float] = []
    for asked in text.asked:
        branch = cache.copy()
        told = _losses(branch, [*asked.prompt, *asked.answer], len(asked.prompt), right)
        answers.append(sum(told))
    return Figures(tuple(right), tuple(answers), tuple(sum(block) / len(block) for block in blocks))


def _losses(cache: Replay, tokens: Sequence[int], first: int, right: list[bool] | None = None) -> list[float]:
    """Loss of each of ``tokens[first:]`` behind those before and what the cache holds; and whether all of
    them would have been said."""
    states, at = [], 0
    for part in cache.feed(tokens):
        begin, end = max(at, first - 1), min(at + len(part), len(tokens) - 1)
        if begin < end:
            states.append(part[begin - at : end - at])
        at += len(part)
    targets = torch.tensor(list(tokens[first:]), device=cache.reader.device)
    with torch.inference_mode():
        told = log_softmax(cache.head(torch.cat(states)).float(), dim=-1)
        if right is not None:
            right.append(bool((told.argmax(dim=-1) == targets).all()))
        return (-told.gather(1, targets[:, None])[:, 0]).tolist()
