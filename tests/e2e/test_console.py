"""The admin console on the real engine: what it shows while people chat, and a change of settings.

Runs after the chat's tests, which want to see the first start without an account.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, expect

from admin import figures
from tangram.profile import load_profile_file
from tests.admin.browser import AdminPage
from tests.e2e.conftest import FAKE, tell
from tests.ui.support import NAME, ChatPage, Product, fetch

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def total(admin: AdminPage) -> float:
    return sum(map(sum, admin.values()))


def grown_to(admin: AdminPage, least: float) -> float:
    """Wait until the map shows at least this much in all."""
    admin.page.wait_for_function(
        "least => document.querySelector('#memory-map-figure').data[0].z.flat()"
        ".reduce((sum, value) => sum + value, 0) >= least",
        arg=least,
        timeout=120_000,
    )
    return total(admin)


def test_the_map_changes_while_a_chat_runs(
    browser: Browser, served: Product, chat: ChatPage, story: str
) -> None:
    with AdminPage(browser, served.url) as admin:
        map_of_model = admin.values()
        assert (len(map_of_model), len(map_of_model[0])) == (3, 30), "SmolLM2 has 30 layers of 3 KV heads"
        before = total(admin)
        tell(chat, story)
        expect(admin.page.locator(".tag.good")).to_have_count(1, timeout=120_000)
        running = admin.page.locator("#sequences tbody tr", has=admin.page.locator(".tag.good"))
        expect(running).to_contain_text(NAME), "the engine's row is known to be this user's"
        started = grown_to(admin, before + 1)
        later = grown_to(admin, started + 90)
        assert later > started > before
        chat.stop()
        chat.settled()
        expect(admin.page.locator(".tag.good")).to_have_count(0)
        expect(admin.page.locator("table.sequences .tag.calm")).not_to_have_count(0)
        admin.show(figures.BUDGET)
        assert all(0 < value <= 1 for row in admin.values() for value in row)
        expect(admin.page.locator("#admin-head")).to_contain_text("Engine ready")
        admin.tab("Profiles")
        shipped = admin.page.locator("#profile-table li").filter(has_text="shipped")
        # The imitated engine has no model of which the release could have a profile.
        expect(shipped.filter(has_text="in use")).to_have_count(0 if FAKE else 1)
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
        assert chat.say("In one sentence: what is the sea?", 300).strip()
        assert not admin.problems


def choose(admin: AdminPage, option: str) -> None:
    """Use a profile, and wait until the engine is back."""
    page = admin.page
    admin.pick("profile-choice", option)
    page.locator("#profile-use").click()
    page.locator("#profile-sure").click()
    expect(page.locator("#profile-progress")).to_contain_text("Restarting the engine")
    expect(page.locator("#profile-progress .notice:not(.info)")).to_be_visible(timeout=600_000)


@pytest.mark.skipif(FAKE, reason="calibrates a real model")
def test_calibrating_and_what_becomes_of_a_broken_profile(browser: Browser, served: Product) -> None:
    with AdminPage(browser, served.url) as admin:
        page = admin.page
        admin.show(figures.BUDGET)
        before = admin.values()
        admin.tab("Profiles")
        page.locator("#calibration-samples input").fill("2")
        page.locator("#calibration-length input").fill("704")
        admin.pick("calibration-oracle", "KeyDiff")
        page.locator("#calibration-start").click()
        expect(page.locator("#calibration-progress")).to_contain_text("Calibrated", timeout=400_000)
        # The new profile is tried at once, on the real model; that takes minutes, so it is seen to work only.
        tried = page.locator("#evaluation-progress")
        expect(tried).to_contain_text(
            re.compile(r"against smollm2-135m-instruct\.json: [1-9]"), timeout=120_000
        )
        page.locator("#evaluation-cancel").click()
        expect(tried).to_contain_text("was cancelled", timeout=60_000)
        (made,) = (served.home / "profiles").glob("*-*.json")
        own = page.locator("#profile-table li").filter(has_not_text="shipped")
        expect(own).to_have_count(1)
        choose(admin, own.locator("b").inner_text())
        expect(page.locator("#profile-progress")).to_contain_text("ready with this profile")
        expect(page.locator("#profile-progress")).to_contain_text("quick check")
        expect(own.locator(".tag.used")).to_have_count(1)
        admin.tab("Memory")
        admin.page.wait_for_function(
            "before => document.querySelector('#memory-map-figure').data[0].z.flat()"
            ".some((value, place) => Math.abs(value - before[place]) > 1e-6)",
            arg=[value for row in before for value in row],
            timeout=60_000,
        )
        # One that names other weights looks sound from outside; the engine refuses it.
        profile = load_profile_file(made)
        known = profile.calibration
        assert known is not None
        stranger = replace(known, model=replace(known.model, weights_hash="0" * 64, name="Stranger"))
        replace(profile, calibration=stranger).save(made.with_name("stranger.json"))
        shown = admin.values()
        admin.tab("Profiles")
        expect(page.locator("#profile-table li", has_text="Stranger")).to_be_visible()
        choose(admin, "Stranger")
        expect(page.locator("#profile-progress .notice.bad")).to_contain_text("previous settings again")
        expect(page.locator("#profile-table li", has_text="Stranger").locator(".tag.used")).to_have_count(0)
        expect(own.filter(has_not_text="Stranger").locator(".tag.used")).to_have_count(1)
        assert fetch(f"{served.url}/health/ready")[0] == 200
        admin.tab("Memory")
        admin.show(figures.PAGES)
        admin.show(figures.BUDGET)
        assert admin.values() == shown
        assert not admin.problems
