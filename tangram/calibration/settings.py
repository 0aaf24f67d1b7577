"""What is calibrated, and how. Without torch: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass

from tangram.config import TangramConfig
from tangram.errors import ConfigError

BUILTIN = "builtin"
CONVERSATIONS = "conversations"
ORACLES = ("kvzip", "keydiff", "expected_attention", "snapkv")
SCOPES = ("model", "layer")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Settings:
    """What is calibrated, and how.

    Attributes:
        model: a directory or a hub id.
        retention: the share of all cached tokens that the best ones are.
        data: ``builtin``, ``conversations`` (of the product's people who allow it), or a JSONL file.
        length: tokens of a sample.
        others: further such shares, for which needs are noted too: the scores, which cost the time, are
            the same.

    Raises:
        ConfigError: naming the field, when a value cannot work.
    """

    model: str
    retention: float
    samples: int = 50
    oracle: str = "kvzip"
    scope: str = "model"
    alpha: float = 1.0
    data: str = BUILTIN
    length: int = 3072
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    others: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for share in self.retentions:
            if not 0.0 < share < 1.0:
                raise ConfigError("retention", f"must be above 0 and below 1, not {share:g}")
        if len(set(self.retentions)) < len(self.retentions):
            raise ConfigError("retention", "names a share twice")
        if self.samples < 1:
            raise ConfigError("samples", f"must be at least 1, not {self.samples}")
        for name, choices in (
            ("oracle", ORACLES),
            ("scope", SCOPES),
            ("device", DEVICES),
            ("dtype", DTYPES),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(name, f"must be one of {', '.join(choices)}, not {value!r}")
        if not 0.0 <= self.alpha <= 10.0:
            raise ConfigError("alpha", f"must be from 0 to 10, not {self.alpha:g}")
        if self.length < self.least_length:
            raise ConfigError("length", f"must be at least {self.least_length}, not {self.length}")

    @property
    def retentions(self) -> tuple[float, ...]:
        """All shares, the one that the profile proposes first."""
        return (self.retention, *self.others)

    @property
    def geometry(self) -> TangramConfig:
        """Chunk, window and sink that the engine has by default."""
        return TangramConfig()

    @property
    def least_length(self) -> int:
        """Tokens of which one chunk would be sealed."""
        return self.geometry.chunk + self.geometry.window
