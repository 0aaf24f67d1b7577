"""How far the text that is served has moved from what a profile was calibrated on.

Measured by what heads need by their keys alone (:mod:`tangram.key_needs`), which calibration noted for its
samples and the engine finds for some of the chunks that it seals. No text is looked at or kept, shares only.

    difference = mean over heads of |live need - the samples' mean need|
    spread     = the same, of each calibration sample from the others' mean, averaged over samples
    drift      = difference / spread

So 1 is as far as one calibration text lies from the rest, whatever the model. A mean difference is in the
unit of budgets; a rank correlation is near 1 for all text of a model and hardly tells how far they are off.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tangram.calibration.statistics import LEAST_LEFT_OUT, rank_correlation
from tangram.profile import Profile
from tangram.profile_file import KEY_SHARE

logger = logging.getLogger("vllm.tangram.drift")  # vLLM shows what is logged below its own name

Table = NDArray[np.float64]
FIRST_CHUNKS = 32
"""Where the profile has no needs by keys, so many first chunks are what later ones are compared with."""
LEAST_CHUNKS = 8
"""Before so many chunks no drift is told."""
WARN_CHUNKS = 32
"""Before so many there is no warning: a few conversations are no trend."""
MEMORY_CHUNKS = 64
"""Live needs are a running mean over about so many chunks."""
LEAST_SPREAD = 0.005
"""A spread below it, of samples that are nearly the same, would make a drift of noise."""
TIES = 0.02
"""More scores than this above ``KEY_SHARE`` are equal ones: no text does that, an empty row does."""


@dataclass(frozen=True)
class KeyReference:
    """What live needs are compared with.

    Attributes:
        mean: [layers, kv_heads].
        spread: see the module.
        origin: ``profile``, or ``first chunks``.
    """

    mean: Table
    spread: float
    origin: str

    @classmethod
    def of(cls, needs: Table, origin: str = "profile") -> KeyReference:
        """Of needs [samples, layers, kv_heads]."""
        mean, count = needs.mean(axis=0), len(needs)
        # The mean of the others differs from a sample by count / (count - 1) of what the mean of all does.
        others = count / (count - 1) if count > 1 else 1.0
        spread = float(np.abs(needs - mean).mean()) * others
        return cls(mean, max(spread, LEAST_SPREAD), origin)


def reference(profile: Profile) -> KeyReference | None:
    """The profile's; None where it has none that this release can compare with."""
    known = profile.calibration
    keys = known.key_needs if known is not None else None
    if keys is None or len(keys.needs) < LEAST_LEFT_OUT:
        return None
    return KeyReference.of(np.array(keys.needs)) if keys.same_score else None


class DriftMeter:
    """One per worker. One thread observes, others may read.

    Args:
        reference: None: the first chunks become it.
        warning: the drift at which the log is told, once; 0: never.
    """

    def __init__(self, reference: KeyReference | None, warning: float) -> None:
        self._reference = reference
        self._warning = warning
        self._first: list[Table] = []
        self._live: Table | None = None
        self._chunks = 0
        self._warned = False

    def observe(self, needs: Table) -> None:
        """Take the needs [layers, kv_heads] of one chunk."""
        if needs.mean() > KEY_SHARE + TIES:
            return
        if self._reference is None:
            self._first.append(needs)
            if len(self._first) == FIRST_CHUNKS:
                self._reference = KeyReference.of(np.stack(self._first), "first chunks")
                self._first = []
            return
        self._chunks += 1
        weight = 1 / min(self._chunks, MEMORY_CHUNKS)
        self._live = needs if self._live is None else self._live + weight * (needs - self._live)
        drift = self.to_dict()["drift"]
        if self._warning and not self._warned and self._chunks >= WARN_CHUNKS and drift is not None:
            self._warned = drift >= self._warning
            if self._warned:
                logger.warning(
                    "budgets may not fit what is served now: by their keys heads need other shares than in "
                    "the calibration samples, %.1f times as far off as these are from each other (warning at "
                    "%g). Calibrate again on text like this: docs/calibration.md",
                    drift,
                    self._warning,
                )

    def to_dict(self) -> dict[str, Any]:
        """``drift``, ``difference`` and ``rank_correlation`` (None until known), ``chunks`` looked at,
        ``reference`` and its ``spread``, the ``warning`` level, and ``live``: needs [layers][kv_heads]."""
        reference, live, chunks = self._reference, self._live, self._chunks
        found: dict[str, Any] = {
            "drift": None,
            "difference": None,
            "rank_correlation": None,
            "chunks": chunks,
            "reference": reference.origin if reference is not None else None,
            "spread": round(reference.spread, 5) if reference is not None else None,
            "warning": self._warning,
            "live": None,
        }
        if reference is None or live is None or chunks < LEAST_CHUNKS:
            return found
        difference = float(np.abs(live - reference.mean).mean())
        return found | {
            "drift": round(difference / reference.spread, 4),
            "difference": round(difference, 5),
            "rank_correlation": round(rank_correlation(live, reference.mean), 4),
            "live": live.round(4).tolist(),
        }
