"""The admin console on the real engine: what it shows while people chat, and a change of settings.

Runs after the chat's tests, which want to see the first start without an account.
"""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from admin import figures
from tests.admin.browser import AdminPage
from tests.ui.support import ChatPage, Product, fetch

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def total(admin: AdminPage) -> float:
    return sum(map(sum, admin.values()))


def grown_to(admin: AdminPage, least: float) -> float:
    """Wait until the map shows at least this much in all."""
    admin.page.wait_for_function(
        "least => document.querySelector('#memory-map-figure').data[0].z.flat()"
        ".reduce((sum, value) => sum + value, 0) >= least",
        arg=least,
        timeout=60_000,
    )
    return total(admin)


def test_the_map_changes_while_a_chat_runs(
    browser: Browser, served: Product, chat: ChatPage, story: str
) -> None:
    with AdminPage(browser, served.url) as admin:
        map_of_model = admin.values()
        assert (len(map_of_model), len(map_of_model[0])) == (3, 30), "SmolLM2 has 30 layers of 3 KV heads"
        before = total(admin)
        chat.send(story)
        expect(admin.page.locator(".tag.good")).to_have_count(1, timeout=60_000)
        started = grown_to(admin, before + 1)
        later = grown_to(admin, started + 90)
        assert later > started > before
        chat.stop()
        chat.settled()
        expect(admin.page.locator(".tag.good")).to_have_count(0, timeout=20_000)
        expect(admin.page.locator("table.sequences .tag.calm")).not_to_have_count(0)
        admin.show(figures.BUDGET)
        assert all(0 < value <= 1 for row in admin.values() for value in row)
        expect(admin.page.locator("#admin-head")).to_contain_text("Engine ready")
        admin.tab("Profiles")
        shipped = admin.page.locator("#profile-table li").filter(has_text="shipped")
        expect(shipped.filter(has_text="in use")).to_have_count(1)
        assert not admin.problems
        assert not admin.foreign


def test_less_memory_for_each_conversation(browser: Browser, served: Product, chat: ChatPage) -> None:
    with AdminPage(browser, served.url) as admin:
        admin.tab("Tune")
        expect(admin.preview).to_contain_text("This is what runs now")
        admin.set("group", "100000")
        expect(admin.preview.locator(".notice.bad")).to_contain_text("Group size")
        admin.set("group", "15")
        admin.set("retention", "30")
        expect(admin.preview).to_contain_text("→")
        admin.apply()
        expect(admin.progress).to_contain_text("Restarting the engine")
        expect(admin.progress).to_contain_text("ready with the new settings", timeout=600_000)
        admin.tab("Engine")
        expect(admin.page.locator("#config")).to_contain_text("30%")
        assert fetch(f"{served.url}/health/ready")[0] == 200
        assert chat.say("In one sentence: what is the sea?", 120).strip()
        assert not admin.problems
