"""What an operator should be told without asking: judged from facts, for the console and for metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

POOL_SHARE = 0.9
DISK_SHARE, DISK_BYTES = 0.1, 2 << 30
BACKUP_DAYS = 7
DRIFT = 2.0
RECENT_MINUTES = 10

NAMES = (
    "engine_down",
    "engine_stalled",
    "pool_full",
    "preemptions",
    "budget_drift",
    "disk_low",
    "backup_old",
)


@dataclass(frozen=True)
class Facts:
    """What is known now; None for what is not.

    state, detail: of the engine, as its supervisor says. stalled: seconds with work and without progress, 0
    unless that is too long. pool_share: of the pool's pages, those that cannot be given up: of running
    requests, and pinned. preemptions: in the last ten minutes. drift: see docs/calibration.md. disk_free,
    disk_total: bytes. backup_age: seconds since the last backup; without one, since the first account.
    """

    state: str = "ready"
    detail: str = ""
    stalled: float = 0.0
    pool_share: float | None = None
    preemptions: int = 0
    drift: float | None = None
    disk_free: int | None = None
    disk_total: int | None = None
    backup_age: float | None = None
    backup_exists: bool = True


@dataclass(frozen=True)
class Alert:
    """name: one of NAMES. tone: "bad" needs somebody now, "warn" soon. advice: what to do."""

    name: str
    tone: str
    text: str
    advice: str


def judge(facts: Facts) -> list[Alert]:
    """What is wrong, the worst first."""
    found = [alert for rule in _RULES for alert in rule(facts)]
    return sorted(found, key=lambda alert: (alert.tone != "bad", NAMES.index(alert.name)))


def _engine_down(facts: Facts) -> Iterator[Alert]:
    if facts.state in ("failed", "stopped"):
        text = f"The engine does not run. {facts.detail}".strip()
        yield Alert("engine_down", "bad", text, "Read its log in the tab Engine, then restart it there.")
    elif facts.state == "restarting":
        text = f"The engine ended and is started again. {facts.detail}".strip()
        yield Alert("engine_down", "bad", text, "If that goes on, its log in the tab Engine says why.")


def _engine_stalled(facts: Facts) -> Iterator[Alert]:
    if facts.stalled:
        text = f"The engine has work and wrote nothing for {facts.stalled:.0f} seconds."
        yield Alert("engine_stalled", "bad", text, "It is started again if that goes on.")


def _pool_full(facts: Facts) -> Iterator[Alert]:
    if facts.pool_share is not None and facts.pool_share > POOL_SHARE:
        text = f"{facts.pool_share:.0%} of the page pool cannot be given up: running replies fill it."
        advice = "Further requests wait. Lower the retention in the tab Tune, or unpin conversations."
        yield Alert("pool_full", "bad" if facts.pool_share > 0.98 else "warn", text, advice)


def _preemptions(facts: Facts) -> Iterator[Alert]:
    if facts.preemptions:
        times = "once" if facts.preemptions == 1 else f"{facts.preemptions} times"
        text = f"Running replies had to wait for memory {times} in the last {RECENT_MINUTES} minutes."
        yield Alert(
            "preemptions", "warn", text, "Lower the retention, or how many run at once (--max-num-seqs)."
        )


def _drift(facts: Facts) -> Iterator[Alert]:
    if facts.drift is not None and facts.drift > DRIFT:
        text = f"People write other text than the profile was calibrated on (drift {facts.drift:.1f})."
        yield Alert("budget_drift", "warn", text, "Calibrate on such text in the tab Profiles, and compare.")


def _disk_low(facts: Facts) -> Iterator[Alert]:
    free, total = facts.disk_free, facts.disk_total
    if free is None or total is None:
        return
    # A tenth of a large disk is plenty.
    if free < max(DISK_BYTES, min(DISK_SHARE * total, 10 * DISK_BYTES)):
        tone = "bad" if free < DISK_BYTES / 4 else "warn"
        text = f"The disk has {free / (1 << 30):.1f} GiB left."
        yield Alert("disk_low", tone, text, "Delete old backups and profiles, or vacuum the database.")


def _backup_old(facts: Facts) -> Iterator[Alert]:
    if facts.backup_age is not None and facts.backup_age > BACKUP_DAYS * 86400:
        days = facts.backup_age / 86400
        text = f"The last backup is {days:.0f} days old." if facts.backup_exists else "There is no backup."
        yield Alert("backup_old", "warn", text, "Make one in the tab Health.")


_RULES: tuple[Callable[[Facts], Iterator[Alert]], ...] = (
    _engine_down,
    _engine_stalled,
    _pool_full,
    _preemptions,
    _drift,
    _disk_low,
    _backup_old,
)
