"""GPUs by name: what their drivers report, so that a plan can be made before there is one."""

from __future__ import annotations

from dataclasses import dataclass

from tangram.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        title: its name, for people.
        memory_bytes: as the driver reports it, error correction on where the card has it.
        capability: compute capability; None where only the memory is known.
    """

    title: str
    memory_bytes: int
    capability: tuple[int, int] | None = None


CARDS = {
    "a10": Card("A10 24 GB", 23028 * MIB, (8, 6)),
    "l4": Card("L4 24 GB", 23034 * MIB, (8, 9)),
    "rtx3090": Card("RTX 3090 24 GB", 24576 * MIB, (8, 6)),
    "rtx4090": Card("RTX 4090 24 GB", 24564 * MIB, (8, 9)),
    "a100-40": Card("A100 40 GB", 40960 * MIB, (8, 0)),
    "l40s": Card("L40S 48 GB", 46068 * MIB, (8, 9)),
    "a100-80": Card("A100 80 GB", 81920 * MIB, (8, 0)),
    "h100-80": Card("H100 80 GB", 81559 * MIB, (9, 0)),
    "h200": Card("H200 141 GB", 143771 * MIB, (9, 0)),
}


def card(name: str) -> Card:
    """The card of that name, or one of so many GiB of memory. Raises ConfigError."""
    if name.lower() in CARDS:
        return CARDS[name.lower()]
    try:
        size = float(name)
    except ValueError:
        size = 0.0
    if not 0 < size < 10_000:
        raise ConfigError("--gpu", f"must be one of {', '.join(CARDS)}, or GiB of memory, not {name!r}")
    return Card(f"{size:g} GiB", int(size * GIB))


def several(count: int, title: str) -> str:
    """So many of a card, for people."""
    return title if count == 1 else f"{count} x {title}"
