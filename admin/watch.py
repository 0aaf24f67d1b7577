"""Watches what the sampler sees, and the disk and the backups beside it: alerts, and an engine that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Hashable
from dataclasses import dataclass

from admin.findings import Finding, host_findings
from admin.owners import Owners
from admin.sampler import Sample, Sampler
from admin.series import GENERATED, PROMPT
from app.alerts import RECENT_MINUTES, Alert, Facts, judge
from app.backups import Backup
from app.preflight.probes import Host
from app.services import Services
from app.stall import StallWatch
from db.errors import DbError

log = logging.getLogger(__name__)

SLOW_SECONDS = 30.0


@dataclass(frozen=True)
class Disk:
    """Bytes of the file system that holds the data, of the database with its WAL, and of all backups.

    database: None while it does not say. software: what keeps the database, with its version.
    """

    free: int
    total: int
    database: int | None
    backups: int
    software: str = "SQLite"


class Watch:
    """Judges each sample. ``alerts``: what is wrong now, the worst first."""

    def __init__(self, services: Services, sampler: Sampler, owners: Owners) -> None:
        self._services = services
        self._sampler = sampler
        self._owners = owners
        self._stall = StallWatch(services.settings.stall_seconds)
        self._condemned = False
        self._task: asyncio.Task[None] | None = None
        self._first_account: float | None = None
        self._wake = asyncio.Event()
        self.disk: Disk | None = None
        self.host: list[Finding] = []
        self.backups: list[Backup] = []
        self.alerts: list[Alert] = []
        sampler.on_sample = self.judge

    def start(self) -> None:
        """Look at the disk now and then."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="console watch")

    async def stop(self) -> None:
        """End that."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def refresh(self) -> None:
        """Look at the disk, the host, the backups and the accounts."""
        self.backups = await self._services.backups.every()
        self.disk = await asyncio.to_thread(self._look_at_disk)
        wants_gpu = self._services.settings.expect_gpu and not self._services.settings.engine_url
        self.host = await asyncio.to_thread(host_findings, Host(), wants_gpu)
        users = await self._services.store.list_users()
        self._first_account = min((user.created_at / 1000 for user in users), default=None)
        await self._owners.refresh()

    def judge(self, sample: Sample) -> None:
        """Take a sample in."""
        supervisor, snapshot = self._services.supervisor, sample.snapshot
        stalled = self._stalled(sample)
        pool = snapshot.pool if snapshot is not None and sample.error is None else None
        kept = 0 if snapshot is None else snapshot.pinned_pages
        newest = self.backups[0].made if self.backups else self._first_account
        if self._services.database.dialect.note and not self.backups:
            newest = None  # the server's own backups are not for us to see
        facts = Facts(
            state=supervisor.status.state.value,
            detail=supervisor.status.detail,
            stalled=stalled,
            pool_share=(pool.running + kept) / pool.total if pool is not None and pool.total else None,
            preemptions=round(self._sampler.series.grown("preemptions", RECENT_MINUTES * 60)),
            drift=sample.drift,
            disk_free=self.disk.free if self.disk else None,
            disk_total=self.disk.total if self.disk else None,
            backup_age=time.time() - newest if newest is not None else None,
            backup_exists=bool(self.backups),
        )
        self.alerts = judge(facts)
        self._services.metrics.alerts(alert.name for alert in self.alerts)
        if self._owners.stale:
            self._wake.set()

    def _stalled(self, sample: Sample) -> float:
        """Seconds for which the engine hangs, 0 unless that is too long; tells the supervisor of it."""
        supervisor = self._services.supervisor
        if not (supervisor.status.ready or supervisor.held):
            self._stall.forget()
            self._condemned = False
            return 0.0
        silent = sample.error is not None
        working = silent or bool(sample.waiting) or bool(_running(sample))
        seconds = self._stall.observe(time.monotonic(), working, None if silent else _progress(sample))
        stalled = self._stall.stalled(seconds)
        supervisor.report_stall(stalled)
        if self._stall.lost(seconds) and not self._condemned:
            self._condemned = True
            log.warning("the engine has work and does nothing for %.0f seconds: it is restarted", seconds)
            supervisor.condemn(f"The engine had work and did nothing for {seconds:.0f} seconds.")
        return seconds if stalled else 0.0

    def _look_at_disk(self) -> Disk:
        settings = self._services.settings
        usage = shutil.disk_usage(settings.home)
        kept = sum(backup.size for backup in self.backups)
        dialect = self._services.database.dialect
        try:
            size, software = dialect.size(), f"{dialect.name} {dialect.version()}"
        except DbError:  # a server that is away now; the next look may find it
            return Disk(usage.free, usage.total, None, kept, dialect.name)
        return Disk(usage.free, usage.total, size, kept, software)

    async def _run(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("the console could not look at disk and backups")
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SLOW_SECONDS):
                    await self._wake.wait()
            await asyncio.sleep(1)  # a name that is nowhere must not keep us busy


def _running(sample: Sample) -> list[tuple[str, int]]:
    rows = sample.snapshot.sequences if sample.snapshot is not None else ()
    return [(row.id, row.tokens) for row in rows if row.state == "running"]


def _progress(sample: Sample) -> Hashable:
    """Changes with every step that computes something, and not because somebody else comes to wait."""
    counters = sample.snapshot.counters if sample.snapshot is not None else {}
    written = (sample.values.get(GENERATED), sample.values.get(PROMPT))
    return (tuple(_running(sample)), tuple(sorted(counters.items())), written)
