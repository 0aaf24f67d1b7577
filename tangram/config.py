"""The one configuration object of the engine, read once from the command line and the environment.

Every field has an option ``--tangram-FIELD`` (of ``tangram serve``) and a variable ``TANGRAM_FIELD``;
the option wins. The result travels to vLLM's processes inside ``--additional-config``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tangram.errors import ConfigError

SCOPES = ("model", "layer", "uniform")
SCORERS = (
    "keydiff",
    "keyvalue",
    "keyvalue_query",
    "knorm",
    "expected_attention",
    "snapkv",
    "tova",
    "streamingllm",
    "random",
)
QUERY_SCORERS = ("expected_attention", "snapkv", "tova")
"""Those that look at the last ``query_window`` queries. Named here because scorers themselves load torch."""
PROFILE_SCORERS = ("keyvalue_query",)
"""Those that look at the mean queries of a profile."""
FUSED_SCORERS = {"keydiff": False, "keyvalue": True, "keyvalue_query": True}
"""Those that the sealing operator itself computes, from a chunk and what its heads are asked on average:
inside a layer too; and whether the norms of values count."""
AUTO, NONE = "auto", "none"
WITH_QUERIES, WITHOUT_QUERIES = "keyvalue_query", "keyvalue"
"""What the scorer ``auto`` stands for, with a profile that has mean queries and without: a profile decides,
so ask :func:`tangram.mean_queries.scorer_in_force`, not the configuration."""
KEY = "tangram"
"""Our key inside vLLM's ``additional_config``."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str) -> str:
    """Text that any log and any terminal takes, as names from outside may not be."""
    return text.encode("ascii", "backslashreplace").decode("ascii")


def _whole(text: Any) -> int:
    if isinstance(text, bool) or (isinstance(text, float) and not text.is_integer()):
        raise ValueError("not a whole number")
    return int(text)


def _number(text: Any) -> float:
    if isinstance(text, bool):
        raise ValueError("not a number")
    return float(text)


def _group_size(text: Any) -> int | None:
    return None if text is None or str(text).strip().lower() == "auto" else _whole(text)


def _flag(text: Any) -> bool:
    if isinstance(text, bool):
        return text
    word = str(text).strip().lower()
    if word not in ("on", "off", "true", "false", "1", "0", "yes", "no"):
        raise ValueError("neither on nor off")
    return word in ("on", "true", "1", "yes")


def _scorer(text: Any) -> str:
    word = str(text).strip()
    return AUTO if word.lower() == AUTO else word


def _choice(text: Any) -> bool | None:
    return None if text is None or str(text).strip().lower() == "auto" else _flag(text)


def _profile(text: Any) -> str | None:
    return None if not text or str(text).strip().lower() == NONE else str(text)


_PARSERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "retention": (_number, "a number such as 0.25"),
    "chunk": (_whole, "a whole number of tokens"),
    "window": (_whole, "a whole number of tokens"),
    "sink": (_whole, "a whole number of tokens"),
    "page_tokens": (_whole, "a whole number of tokens"),
    "group_size": (_group_size, "a whole number of heads, or 'auto'"),
    "scope": (str, f"one of {', '.join(SCOPES)}"),
    "scorer": (_scorer, f"one of {', '.join(SCORERS)}, or auto"),
    "query_window": (_whole, "a whole number of tokens"),
    "alpha": (_number, "a number such as 1.0"),
    "rewind": (_whole, "a whole number of tokens"),
    "reserve": (_flag, "on or off"),
    "resident_share": (_number, "a number such as 0.8"),
    "returning_first": (_flag, "on or off"),
    "wide_steps": (_choice, "on, off or auto"),
    "profile": (_profile, "a file name, auto or none"),
    "drift_every": (_whole, "a whole number of chunks"),
    "drift_warning": (_number, "a number such as 2"),
}

HELP = {
    "retention": "mean share of an old conversation that is kept, above 0 up to 1 (1 keeps everything)",
    "chunk": "tokens that are compressed together",
    "window": "latest tokens that are never compressed",
    "sink": "first tokens of a conversation that are always kept",
    "page_tokens": "tokens of a page",
    "group_size": "heads that share a page table, or 'auto' for a sixth of the model's heads",
    "scope": "which heads may share: model (across layers), layer, uniform (one budget for all)",
    "scorer": f"how tokens are ranked when a chunk is sealed: {', '.join(SCORERS)}; auto: {WITH_QUERIES} "
    f"with a profile that has mean queries, {WITHOUT_QUERIES} without",
    "query_window": "latest tokens whose queries rank a chunk (scorers expected_attention, snapkv, tova)",
    "alpha": "safety margin: a head's budget is its mean need plus alpha standard deviations",
    "rewind": "how many tokens before its end a conversation can be resumed without re-reading",
    "reserve": "on: admit a request only when it can be carried to its last token, so that none is ever "
    "preempted; off: admit more, and preempt when the cache is full",
    "resident_share": "the most of the cache that idle conversations may hold, above 0 up to 1",
    "returning_first": "on: when requests have to wait, short ones and those of conversations that are still "
    "in the cache go first, for 15 seconds at most, and conversations that were active lately are kept; off: "
    "all go strictly in the order of arrival. Under vLLM's --scheduling-policy priority it is always off",
    "wide_steps": "on: a prefill step may span several chunks, which are sealed inside the layers; off: "
    "steps end wherever a chunk is sealed; auto: on where there is a GPU and the scorer allows it",
    "profile": "file of calibrated head budgets; auto: the one that is shipped for this very model, if there "
    "is one; none, or nothing found: all heads get the same",
    "drift_every": "with a profile, look at the keys of one sealed chunk in so many, to tell whether text is "
    "still of the kind that it was calibrated on (at most a hundredth of the time); 0 never looks",
    "drift_warning": "the drift at which the log is told, once: 1 is as far as one calibration text lies "
    "from the others; 0 never warns",
}


@dataclass(frozen=True)
class TangramConfig:
    """What decides the shape of the cache. See ``HELP`` for what each field means.

    Raises:
        ConfigError: naming the field, when a value cannot work.
    """

    retention: float = 0.5
    chunk: int = 512
    window: int = 128
    sink: int = 4
    page_tokens: int = 16
    group_size: int | None = None
    scope: str = "model"
    scorer: str = AUTO
    query_window: int = 64
    alpha: float = 1.0
    rewind: int = 64
    reserve: bool = False
    resident_share: float = 1.0
    returning_first: bool = True
    wide_steps: bool | None = None
    profile: str | None = AUTO
    drift_every: int = 8
    drift_warning: float = 2.0

    def __post_init__(self) -> None:
        if not 0.0 < self.retention <= 1.0:
            raise ConfigError("retention", f"must be above 0 and at most 1, not {self.retention}")
        if self.page_tokens < 1 or self.page_tokens & (self.page_tokens - 1):
            raise ConfigError("page_tokens", f"must be a power of two such as 16, not {self.page_tokens}")
        for name in ("chunk", "window", "rewind"):
            value = getattr(self, name)
            if value < 0 or value % self.page_tokens:
                raise ConfigError(
                    name, f"must be a multiple of page_tokens ({self.page_tokens}), not {value}"
                )
        if self.chunk == 0:
            raise ConfigError("chunk", f"must be at least one page ({self.page_tokens} tokens), not 0")
        if self.rewind < self.page_tokens:
            raise ConfigError(
                "rewind",
                f"must be at least one page ({self.page_tokens} tokens), not {self.rewind}: "
                "a conversation resumes at a page's edge",
            )
        if not 0 <= self.sink <= self.chunk:
            raise ConfigError("sink", f"must be from 0 to chunk ({self.chunk}), not {self.sink}")
        if self.group_size is not None and self.group_size < 1:
            raise ConfigError("group_size", f"must be at least 1 or 'auto', not {self.group_size}")
        if self.scope not in SCOPES:
            raise ConfigError("scope", f"must be one of {', '.join(SCOPES)}, not {self.scope!r}")
        if self.scorer not in (*SCORERS, AUTO):
            raise ConfigError("scorer", f"must be one of {', '.join(SCORERS)}, or auto, not {self.scorer!r}")
        if not 0.0 < self.resident_share <= 1.0:
            raise ConfigError("resident_share", f"must be above 0 and at most 1, not {self.resident_share}")
        if not 0.0 <= self.alpha <= 10.0:
            raise ConfigError("alpha", f"must be from 0 to 10, not {self.alpha}")
        if self.drift_every < 0:
            raise ConfigError("drift_every", f"must be 0 or more, not {self.drift_every}")
        if not 0.0 <= self.drift_warning <= 1000.0:
            raise ConfigError("drift_warning", f"must be from 0 to 1000, not {self.drift_warning}")
        if self.wide_steps and not self._fused:
            raise ConfigError(
                "wide_steps",
                f"can be on with the scorer {', '.join(FUSED_SCORERS)} only, not with {self.scorer}: others "
                "rank a chunk between two steps; leave wide_steps on auto",
            )
        self._check_query_window()

    def _check_query_window(self) -> None:
        width = self.query_window
        if width < 1:
            raise ConfigError("query_window", f"must be at least 1, not {width}")
        if self.scorer not in QUERY_SCORERS:
            return
        if width % self.page_tokens:
            raise ConfigError(
                "query_window", f"must be a multiple of page_tokens ({self.page_tokens}), not {width}"
            )
        # The queries must come after the chunk that they rank. A conversation that is resumed in their middle
        # goes back to their first one. And a prefix that others continue, one page beyond a boundary, must
        # come before the first one of the next boundary.
        limits = {
            "window": self.window,
            "rewind": self.rewind,
            "chunk - page_tokens": self.chunk - self.page_tokens,
        }
        for name, limit in limits.items():
            if width > limit:
                raise ConfigError(
                    "query_window",
                    f"must be at most {name} ({limit}), not {width}: the scorer {self.scorer} looks at that "
                    f"many queries; lower query_window or raise {name.split()[0]}",
                )

    def steps_wide(self, on_gpu: bool) -> bool:
        """Whether a step may cross seal boundaries."""
        if self.wide_steps is None:
            return on_gpu and self._fused
        return self.wide_steps

    @property
    def _fused(self) -> bool:
        """Whatever ``auto`` stands for is."""
        return self.scorer in (*FUSED_SCORERS, AUTO)

    @property
    def uses_profile(self) -> bool:
        """Whether a profile decides. ``auto`` is settled before vLLM starts (:mod:`tangram.shipped`): where
        nobody did, as in stock vLLM that was started by hand, there is none."""
        return self.profile not in (None, AUTO) and self.scope != "uniform"

    @property
    def observed(self) -> int:
        """Tokens before a seal boundary whose queries rank its chunk; 0 where the scorer uses none."""
        return self.query_window if self.scorer in QUERY_SCORERS else 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TangramConfig:
        """Build from names to values of any type that parses; unknown names are refused."""
        parsed: dict[str, Any] = {}
        for name, value in values.items():
            if name not in _PARSERS:
                raise ConfigError(printable(name), f"is no setting; there are: {', '.join(_PARSERS)}")
            parse, expected = _PARSERS[name]
            try:
                parsed[name] = parse(value)
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(name, f"must be {expected}, not {_shown(value)}") from None
        return cls(**parsed)

    @classmethod
    def from_sources(
        cls, options: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
    ) -> TangramConfig:
        """Merge the environment (``TANGRAM_FIELD``) with options, which win. Empty variables are unset."""
        environment = os.environ if environment is None else environment
        merged: dict[str, Any] = {}
        for field in fields(cls):
            value = environment.get(f"TANGRAM_{field.name.upper()}", "")
            if value != "":
                merged[field.name] = value
        merged.update(options or {})
        return cls.from_mapping(merged)

    @classmethod
    def from_additional_config(cls, additional: Any) -> TangramConfig:
        """Read what ``tangram serve`` put into vLLM's ``additional_config``; the environment where stock
        vLLM was started by hand."""
        values = additional.get(KEY) if isinstance(additional, Mapping) else None
        return cls.from_sources() if values is None else cls.from_mapping(values)

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready."""
        return asdict(self)

    def to_json(self) -> str:
        """The form inside ``--additional-config``."""
        return json.dumps({KEY: self.to_dict()})
