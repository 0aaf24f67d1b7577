"""The tabs Users, Audit and Health in words, and nothing that a name could smuggle in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

import pytest

from admin.audit_tab import audit_table
from admin.errors import TuneError
from admin.findings import findings, findings_panel, host_findings
from admin.health_tab import backups_panel, disk_panel, drill_panel, versions_panel
from admin.users_tab import links_table, quota_text, users_table, whole_or_none
from admin.watch import Disk
from app.backups import Backup, Drill
from app.errors import BadRequest
from app.preflight.probes import Gpu, Host
from db.views import AuditView, LinkView, PersonView, QuotaView
from tangram.config import TangramConfig
from tangram.predict import predict
from tangram.profile import ModelShape, build_geometry
from tests.admin.conftest import Installed
from tests.admin.test_page import Viewer, sampled

GIB = 1 << 30
EVIL = "<img src=x onerror=alert(1)>"
STATUS: dict[str, Any] = {
    "kernels": "native",
    "profile": "p.json",
    "pool": {"total_pages": 1000},
    "config": {"retention": 0.25},
    "model": {"max_model_len": 8192},
}
SHAPE = ModelShape("m", 4, 2, 64, 2, "bfloat16", 8192)
GEOMETRY = build_geometry(TangramConfig(retention=0.25), SHAPE)


def test_findings_tell_what_to_change() -> None:
    (room,) = findings(STATUS | {"pool": {"total_pages": 5000}}, GEOMETRY)
    assert room.tone == "info"
    told = predict(TangramConfig(retention=0.25), SHAPE).within(5000 * GEOMETRY.page_bytes).at[-1]
    assert f"room for {told.conversations} conversations" in room.text, "as the tab Tune says"
    assert "retention 25%" in room.text
    few = GEOMETRY.pages(8192) + GEOMETRY.idle_pages(8192)
    bad = findings(
        STATUS | {"kernels": "reference", "profile": "uniform", "pool": {"total_pages": few}}, GEOMETRY
    )
    assert [one.tone for one in bad] == ["warn"] * 3
    text = findings_panel(bad)
    for part in ("slow", "room for 2 conversations", "loses details"):
        assert part in text
    engine = {"pool": {"total_pages": few}}
    (both,) = findings(STATUS | {"pool": {"total_pages": 2 * few}, "engines": [engine, engine]}, GEOMETRY)
    assert "The pools of 2 engines have room for 4 conversations" in both.text, "what is over adds up to none"
    assert both.tone == "warn"
    assert findings({}, None) == []
    assert findings({"kernels": "native"}, GEOMETRY) == []


class OtherHost(Host):
    """With these GPUs."""

    def __init__(self, *gpus: Gpu) -> None:
        self._gpus = list(gpus)

    def gpus(self) -> list[Gpu]:
        return self._gpus


def test_findings_tell_of_the_host() -> None:
    good = Gpu(0, "NVIDIA H200", 140 * GIB, 12 * GIB, (9, 0), "580.65.06")
    (one,) = host_findings(OtherHost(good), wants_gpu=True)
    assert one.tone == "info"
    for part in ("NVIDIA H200", "12 GiB of 140 GiB free", "driver 580.65.06", "capability 9.0"):
        assert part in one.text
    old = Gpu(1, "Tesla T4", 0, 0, (7, 5), "535.10")
    tones = [(one.tone, one.text) for one in host_findings(OtherHost(good, old), wants_gpu=True)]
    assert [tone for tone, _ in tones] == ["info", "info", "warn", "warn"]
    assert "CUDA 13 needs" in tones[2][1]
    assert "compute capability 7.5" in tones[3][1]
    missing, memory = host_findings(OtherHost(), wants_gpu=True)
    assert (missing.tone, memory.tone) == ("warn", "info")
    assert "no GPU is visible" in missing.text
    assert "of memory are free" in memory.text
    assert memory.advice == "VLLM_CPU_KVCACHE_SPACE sets how much."
    assert [one.tone for one in host_findings(OtherHost(), wants_gpu=False)] == ["info"]


def test_backups_and_the_drill() -> None:
    one = Backup("chat-1.sqlite3", Path("/b/chat-1.sqlite3"), time() - 7200, 1536)
    text = backups_panel([one] * 12)
    assert "2 h 0 min ago" in text
    assert 'href="/admin/backups/chat-1.sqlite3"' in text
    assert "and 2 older ones" in text
    assert "no backup" in backups_panel([])
    good = Drill("a.sqlite3", (), {"users": 2, "messages": 1234}, time(), 0.5)
    assert "2 users, 1,234 messages" in drill_panel(good)
    bad = Drill("a.sqlite3", (EVIL,), {}, time(), 0.5)
    assert "&lt;img" in drill_panel(bad)
    assert "is not usable" in drill_panel(bad)
    assert "44%" not in disk_panel(None)
    assert "25%" in disk_panel(Disk(1 << 30, 4 << 30, 5, 6))
    away = disk_panel(Disk(1 << 30, 4 << 30, None, 6, "PostgreSQL"))
    assert "Database (PostgreSQL)" in away
    assert "does not answer" in away
    assert "Database (PostgreSQL 15.1)" in disk_panel(Disk(1, 4, 5, 6, "PostgreSQL 15.1"))
    for backups in ([], [one]):
        assert "The server keeps it &amp; more" in backups_panel(backups, "The server keeps it & more")
    assert "Tangram Chat" in versions_panel({"kernels": EVIL})
    assert "<img" not in versions_panel({"kernels": EVIL})


def test_people_and_links() -> None:
    person = PersonView("id", EVIL, True, 0, 5, None, 1, 2, QuotaView(2, None, 30))
    text = users_table([person])
    assert "<img" not in text
    for part in ("Remove administrator", "disabled", "never", "2 running, 30 a minute", 'data-act="enable"'):
        assert part in text
    assert quota_text(QuotaView()) == "default"
    link = LinkView("l", "invite", None, True, EVIL, None, 0, 10**13, None, None)
    assert "Invitation of an administrator" in links_table([link])
    assert "<img" not in links_table([link])
    assert "No link is open" in links_table([])


@pytest.mark.parametrize("value", [-1, 1.5, True, "5", float("nan")])
def test_a_quota_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TuneError, match="Waiting must be a"):
        whole_or_none("Waiting", value)
    assert whole_or_none("Waiting", None) is None
    assert whole_or_none("Waiting", 3.0) == 3


def test_the_audit_is_searched_and_cut() -> None:
    entries = [
        AuditView(str(n), "u", "engine.tune", {"retention": 0.5}, {"note": EVIL}, 1000 * n, "::1", None)
        for n in range(300)
    ]
    entries.append(AuditView("x", None, "sign_in.failed", None, "y" * 2000, 0, None, None))
    text = audit_table(entries, lambda _: "Ann")
    assert text.count("<tr data-key") == 200
    assert "<img" not in text
    found = audit_table(entries, lambda _: "Ann", "FAILED sign")
    assert found.count("<tr data-key") == 1
    assert len(found) < 2000
    assert "Nothing was found" in audit_table(entries, lambda _: "Ann", "engine.tune bob")


def test_who_it_was_and_when_in_which_zone() -> None:
    typed = AuditView("1", None, "user.invite", None, {}, 1_764_500_000_000)
    stranger = replace(typed, id="2", action="sign_in.failed", request_id="r")
    text = audit_table([typed, stranger], lambda _: "Ann")
    assert text.count("command line") == 1
    assert "<td>–</td><td><code>sign_in.failed" in text
    assert text.count("2025-11-30 10:53:20 UTC") == 2


async def test_each_tab_answers_when_it_is_opened_and_only_administrators(installed: Installed) -> None:
    await sampled(installed)
    async with installed.client("ann", is_admin=True) as http:
        viewer = await Viewer.open(http)
        wanted = {
            "engine": ("engine-state", "ready"),
            "users": ("users", "ann"),
            "audit": ("audit", "sign_in"),
            "health": ("versions", "Engine: vLLM"),
        }
        for tab, (part, words) in wanted.items():
            shown = await viewer.send(viewer.opening(tab), "Budget", "", -1, "")
            assert words in shown[part], tab
        backup = await installed.services.backups.make(await user_id(installed, "ann"))
        got = await http.get(f"/admin/backups/{backup.name}")
        assert got.content == backup.path.read_bytes()
        trail = await installed.services.store.list_audit()
        assert (trail[0].action, trail[0].after) == ("backup.download", {"backup": backup.name})
        assert (await http.get("/admin/backups/no.sqlite3")).status_code == 404
        assert (await http.get("/admin/backups/..%2Fdb%2Fchat.sqlite3")).status_code == 404
    for name in (None, "bob"):
        async with installed.client(name) as http:
            refused = await http.get(f"/admin/backups/{backup.name}")
            assert refused.status_code == (401 if name is None else 403)


async def test_an_account_is_made_without_an_invitation(installed: Installed) -> None:
    people, store = installed.services.people, installed.services.store
    async with installed.client("ann", is_admin=True):
        ann = await store.user_by_name("ann")
    made = await people.create(ann, " kim ", "a long enough password")
    assert (made.name, made.is_admin) == ("kim", False)
    with pytest.raises(BadRequest):
        await people.create(ann, "lee", "short")
    (entry, *_) = await store.list_audit()
    assert (entry.action, entry.after["name"]) == ("user.create", "kim")
    assert ann is not None
    assert entry.user_id == ann.id


async def user_id(installed: Installed, name: str) -> str:
    user = await installed.services.store.user_by_name(name)
    assert user is not None
    return user.id
