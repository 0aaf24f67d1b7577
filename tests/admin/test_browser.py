"""The console in Chromium, over the product with the imitated engine as its child process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from admin import figures
from tangram.calibration.verdict import FORMAT, VERSION, Figures, difference, file_hash
from tangram.shipped import folder as shipped_folder
from tests.admin.browser import AdminPage
from tests.patience import PATIENCE
from tests.ui.support import DESKTOP, PHONE, ROOT, Product, chromium, eventually, fetch, product

pytestmark = [pytest.mark.ui, pytest.mark.timeout(300)]

# Retention 0.13 is what this engine cannot start with; it waits while a file "hold" is beside its script.
_ENGINE = f"""
import runpy, sys, time
from pathlib import Path
if "0.13" in sys.argv:
    sys.exit("ValueError: no memory for a single conversation")
while Path(sys.argv[0]).with_name("hold").exists():
    time.sleep(0.05)
sys.argv[0] = {str(ROOT / "tests" / "fake_engine.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


WORDS = ("Layer 2, KV head 0", "Tier", "Budget", "Tokens kept", "Pages")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "engine.py"


@pytest.fixture(scope="module")
def served(bundled_model_dir: Path, script: Path) -> Iterator[Product]:
    script.write_text(_ENGINE)
    environment = {
        "TANGRAM_ENGINE_COMMAND": f"{sys.executable} {script}",
        "MODEL": str(bundled_model_dir),
        "OMP_NUM_THREADS": "1",
    }
    with product(environment, lambda _: 0, ready=120) as running:
        yield running


def send(admin: AdminPage, text: str) -> None:
    """A whole turn over the product's interface, as the signed-in user."""
    request, origin = admin.context.request, {"origin": admin.url}
    conversation = request.post(f"{admin.url}/api/conversations", data={}, headers=origin).json()["id"]
    answer = request.post(
        f"{admin.url}/api/conversations/{conversation}/messages",
        data={"content": text},
        headers=origin,
        timeout=120_000,
    )
    assert answer.ok


def test_the_map_is_redrawn_in_place_while_people_chat(browser: Browser, served: Product) -> None:
    with AdminPage(browser, served.url) as admin:
        admin.page.evaluate("window.firstElement = document.querySelector('#memory-map-figure .main-svg')")
        empty = admin.values()
        assert (len(empty), len(empty[0])) == (3, 30)
        assert sum(map(sum, empty)) == 0
        send(admin, "/tokens 600 /delay 0.001")
        admin.page.wait_for_function("document.querySelector('#memory-map-figure').data[0].z[0][0] > 0")
        filled = admin.values()
        assert min(min(row) for row in filled) > 0
        assert admin.page.evaluate(
            "document.querySelector('#memory-map-figure .main-svg') === window.firstElement"
        ), "the chart was replaced instead of updated"
        admin.show(figures.TIER)
        assert admin.values() != filled
        expect(admin.page.locator("table.sequences tbody tr")).not_to_have_count(0)
        eventually(lambda: "1" in admin.card("Conversations"), PATIENCE, "it is counted")
        assert not admin.problems
        assert not admin.foreign


def test_hovering_tells_the_head(browser: Browser, served: Product) -> None:
    with AdminPage(browser, served.url) as admin:
        plot = admin.page.locator("#memory-map-figure .nsewdrag").first.bounding_box()
        assert plot is not None
        label = admin.page.locator("#memory-map-figure .hoverlayer")

        def told() -> bool:
            """The map may be drawn anew at any moment, which takes away what hovering showed."""
            x, y = plot["x"] + plot["width"] * 2.5 / 30, plot["y"] + plot["height"] / 6
            admin.page.mouse.move(x + 1, y)
            admin.page.mouse.move(x, y)
            admin.page.wait_for_timeout(200)
            said = label.text_content() or ""
            return all(words in said for words in WORDS)

        eventually(told, PATIENCE, f"hovering tells {WORDS}")


def test_tuning_and_going_back(browser: Browser, served: Product, script: Path) -> None:
    with AdminPage(browser, served.url) as admin:
        admin.tab("Tune")
        expect(admin.preview).to_contain_text("This is what runs now")
        admin.set("group", "400")
        expect(admin.preview).to_contain_text("Group size: must be a whole number from 1 to 90")
        admin.set("group", "12")
        admin.set("retention", "25")
        expect(admin.preview).to_contain_text("groups of 12 heads")
        expect(admin.preview).to_contain_text("25%")
        expect(admin.preview).to_contain_text("→")
        admin.page.locator("#tune-apply").click()
        admin.page.locator("#tune-cancel").click()
        expect(admin.page.locator("#tune-restart")).to_be_hidden()
        expect(admin.progress).to_be_empty()
        hold = script.with_name("hold")
        hold.touch()
        admin.apply()
        expect(admin.progress).to_contain_text("Restarting the engine")
        hold.unlink()
        expect(admin.progress).to_contain_text("ready with the new settings", timeout=120_000)
        expect(admin.preview).to_contain_text("This is what runs now")
        admin.set("retention", "13")
        expect(admin.preview).to_contain_text("13%")
        admin.apply()
        expect(admin.progress).to_contain_text("went back to the previous ones", timeout=120_000)
        expect(admin.progress).to_contain_text("no memory for a single conversation")
        assert fetch(f"{served.url}/health/ready")[0] == 200
        admin.tab("Engine")
        expect(admin.page.locator("#config")).to_contain_text("25%")
        expect(admin.page.locator("#config")).to_contain_text("auto (keyvalue)")
        admin.page.get_by_text("Engine log").click()
        expect(admin.page.locator("#log pre")).to_contain_text("--tangram-group-size 12")
        admin.page.reload()
        admin.tab("Tune")
        expect(admin.page.locator("#tune-retention input[type=number]")).to_have_value("25")
        assert not admin.problems


def test_choosing_a_profile_and_going_back(browser: Browser, served: Product) -> None:
    with AdminPage(browser, served.url) as admin:
        admin.tab("Profiles")
        page = admin.page
        expect(page.locator("#profile-state")).to_contain_text("No profile is in use")
        expect(page.locator("#profile-comparison")).to_contain_text("choose it by its name")
        admin.pick("profile-choice", "SmolLM2-135M-Instruct")
        compared = page.locator("#profile-comparison")
        expect(compared).to_contain_text("Heads that differ most")
        expect(compared.locator("tr", has_text="4,096 tokens").locator("td")).to_have_count(3)
        expect(page.locator("#profile-difference-figure .nsewdrag").first).to_be_visible()
        expect(page.locator("#evaluation-start")).to_be_visible()
        admin.pick("profile-other", "SmolLM2-135M-Instruct")
        expect(compared).to_contain_text("Both are the same profile")
        expect(page.locator("#profile-difference-figure")).to_be_hidden()
        page.locator("#profile-use").click()
        expect(page.locator("#profile-confirm")).to_contain_text("The engine restarts")
        expect(page.locator("#profile-table .tag.used")).to_have_count(0)
        page.locator("#profile-sure").click()
        expect(page.locator("#profile-progress")).to_contain_text("ready with this profile", timeout=120_000)
        expect(page.locator("#profile-table .tag.used")).to_have_count(1)
        expect(page.locator("#profile-confirm")).to_be_hidden()
        admin.pick("profile-other", "Qwen2.5-Coder-0.5B")
        expect(page.locator("#profile-comparison")).to_contain_text("they cannot be compared")
        page.locator("#profile-back").click()
        page.locator("#profile-sure").click()
        expect(page.locator("#profile-table .tag.used")).to_have_count(0, timeout=120_000)
        expect(page.locator("#profile-confirm")).to_be_hidden()
        page.locator("#profile-discard").click()
        page.locator("#profile-sure").click()
        expect(page.locator("#profile-refusal")).to_contain_text("of the release cannot be deleted")
        assert not admin.problems


def test_trying_a_profile_beside_the_engine(browser: Browser, served: Product) -> None:
    with AdminPage(browser, served.url) as admin:
        admin.tab("Profiles")
        page = admin.page
        admin.pick("profile-choice", "SmolLM2-135M-Instruct")
        expect(page.locator("#evaluation-cancel")).to_be_hidden()
        page.locator("#evaluation-start").click()
        expect(page.locator("#evaluation-progress")).to_contain_text("against equal budgets")
        expect(page.locator("#evaluation-start")).to_be_disabled()
        page.locator("#evaluation-cancel").click()
        expect(page.locator("#evaluation-progress")).to_contain_text("was cancelled")
        expect(page.locator("#evaluation-start")).to_be_enabled()
        result = made_result(served.home / "profiles", "smollm2-135m-instruct.json")
        page.reload()
        admin.tab("Profiles")
        admin.pick("profile-choice", "SmolLM2-135M-Instruct")
        shown = page.locator("#evaluation-result")
        expect(shown.locator("tr", has_text="Right answers")).to_contain_text(f"{result['right']} of 24")
        expect(shown).to_contain_text("No difference can be told from 24 answers.")
        expect(shown).to_contain_text("2026-11-30 12:17 UTC")
        assert fetch(f"{served.url}/health/ready")[0] == 200
        assert not admin.problems


def made_result(folder: Path, name: str) -> dict[str, int]:
    """What `tangram evaluate` would have left of a profile of the release against equal budgets."""
    first = Figures((True,) * 6 + (False,) * 18, (4.4,) * 24, (1.5, 1.6))
    second = Figures((True,) + (False,) * 23, (10.0,) * 24, (2.4, 2.5))
    whole = Figures((True,) * 12 + (False,) * 12, (2.6,) * 24, (1.4, 1.5))
    found = {
        "format": FORMAT,
        "version": VERSION,
        "created": "2026-11-30T12:17:33+00:00",
        "model": {"name": "SmolLM2-135M-Instruct"},
        "settings": {"retention": 0.25, "alpha": 1.0},
        "dtype": "float32",
        "seconds": 188.0,
        "probe": {"passages": 4, "tokens": 1344},
        "everything": whole.to_dict(),
        "profiles": [
            {"profile": name, "file_hash": file_hash(shipped_folder() / name)} | first.to_dict(),
            {"profile": "none", "file_hash": None} | second.to_dict(),
        ],
        "difference": difference(first, second),
    }
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.evaluations").write_text(json.dumps({"none": found}))
    return first.to_dict()


def test_texts_are_uploaded_through_the_page(browser: Browser, served: Product, tmp_path: Path) -> None:
    good, bad = tmp_path / "texts.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"text": "One text."}\n{"text": "Another one."}\n')
    bad.write_text('{"text": "One text."}\n{"word": "Another one."}\n')
    with AdminPage(browser, served.url) as admin:
        admin.tab("Profiles")
        page = admin.page
        told = page.locator("#calibration-uploaded")
        chosen = page.locator("#calibration-upload input[type=file]")
        page.get_by_label("An uploaded file").check()
        page.locator("#calibration-start").click()
        expect(page.locator("#calibration-refusal")).to_contain_text("No texts were uploaded yet.")
        chosen.set_input_files(good)
        expect(told).to_contain_text("2 texts are ready to be read.")
        kept = served.home / "calibration" / "texts.jsonl"
        assert kept.read_bytes() == good.read_bytes()
        assert kept.stat().st_mode & 0o777 == 0o600
        page.locator("#calibration-upload").get_by_label("Clear").first.click()
        chosen.set_input_files(bad)
        expect(told).to_contain_text("Line 2 is no object with a `text`.")
        assert kept.read_bytes() == good.read_bytes(), "what was there stays"
        admin.tab("Audit")
        expect(page.locator("#audit")).to_contain_text("calibration.texts")
        assert not admin.problems


@pytest.mark.parametrize(
    ("name", "typed", "sentence"),
    [
        ("retention", "0.25", "Retention is in percent here: 25 keeps a quarter."),
        ("retention", "0", "Retention must be between 1 and 100 percent."),
        ("retention", "101", "Retention must be between 1 and 100 percent."),
        ("retention", "", "Retention must be a number."),
        ("group", "0", "Group size must be a whole number of heads, 1 or more."),
        ("group", "1000", "Group size: must be a whole number from 1 to 90"),
        ("alpha", "-1", "Safety margin must be between 0 and 10 standard deviations."),
    ],
)
def test_a_value_out_of_range_gets_a_sentence(
    browser: Browser, served: Product, name: str, typed: str, sentence: str
) -> None:
    with AdminPage(browser, served.url) as admin:
        admin.tab("Tune")
        expect(admin.preview).to_contain_text("This is what runs now")
        field = admin.page.locator(f"#tune-{name} input[type=number]")
        good = field.input_value()
        admin.set(name, typed)
        expect(admin.preview).to_contain_text(sentence)
        expect(admin.preview.locator("table")).to_have_count(0)
        expect(field).to_have_value(typed)
        admin.page.locator("#tune-apply").click()
        expect(admin.refusal).to_contain_text(sentence)
        expect(admin.page.locator("#tune-restart")).to_be_hidden()
        admin.set(name, good)
        expect(admin.preview).to_contain_text("This is what runs now")
        expect(admin.refusal).to_be_empty()
        admin.page.locator("#tune-apply").click()
        expect(admin.page.locator("#tune-confirm")).to_contain_text(
            "get about 10 seconds to finish and are then interrupted, with their text kept"
        )
        expect(admin.page.locator(".toast-body")).to_have_count(0)
        assert not admin.problems


@pytest.mark.parametrize("view", [figures.BUDGET, figures.TOKENS, figures.TIER])
def test_a_phone_shows_the_whole_colour_bar(browser: Browser, served: Product, view: str) -> None:
    with AdminPage(browser, served.url, PHONE) as admin:
        if view != figures.TOKENS:
            admin.show(view)
        numbers = admin.page.locator("#memory-map-figure .cbaxis text")
        window = admin.page.locator("#memory-map .live-plot-scroll").bounding_box()
        assert window is not None
        boxes = [number.bounding_box() for number in numbers.all()]
        assert len(boxes) >= 2
        for box in boxes:
            assert box is not None
            assert window["x"] <= box["x"]
            assert box["x"] + box["width"] <= window["x"] + window["width"]


_MAP_PLACES = """() => {
  const map = document.querySelector("#memory-map-figure");
  const window = map.parentElement.getBoundingClientRect();
  const within = (name) => {
    const box = map.querySelector(name).getBoundingClientRect();
    return [box.left - window.left, box.top - window.top, box.right - window.left, box.bottom - window.top];
  };
  return [within(".nsewdrag"), [window.width, window.height]].map((places) => places.map(Math.round));
}"""


def test_a_resized_map_is_as_one_opened_at_that_size(browser: Browser, served: Product) -> None:
    """All layers are seen on a phone, and the cells have the room that the colour bar leaves."""
    with AdminPage(browser, served.url, PHONE) as admin:
        cells, window = admin.page.evaluate(_MAP_PLACES)
        assert cells[2] <= window[0]
        phone = (cells, window)
    with AdminPage(browser, served.url, DESKTOP) as admin:
        wide = tuple(admin.page.evaluate(_MAP_PLACES))
        for size, wanted in ((PHONE, phone), (DESKTOP, wide), (PHONE, phone)):
            admin.page.set_viewport_size({"width": size[0], "height": size[1]})

            def same(wanted: object = wanted) -> bool:
                return tuple(admin.page.evaluate(_MAP_PLACES)) == wanted

            eventually(same, PATIENCE, f"the map at {size} is {wanted}")
        cells = admin.page.locator("#memory-map-figure .nsewdrag").first
        cells.click(position={"x": 20, "y": 20})
        expect(admin.page.locator("#tier")).to_contain_text("share pages")
        assert not admin.problems


def test_a_phone_shows_what_the_tables_of_memory_have(browser: Browser, served: Product) -> None:
    """Also a row whose last use is long ago, without scrolling sideways."""
    with AdminPage(browser, served.url, PHONE) as admin:
        page = admin.page
        send(admin, "/tokens 60 /delay 0.001")
        expect(page.locator("table.sequences .acts button").first).to_be_visible()
        page.evaluate(
            """for (const cell of document.querySelectorAll("table.sequences td.num"))
                 cell.textContent = "23 min 57 s" """
        )
        for place in (".acts button", "td"):
            for cell in page.locator(f"table:is(.sequences, .pool) {place}").all():
                box = cell.bounding_box()
                assert box is None or box["x"] + box["width"] <= PHONE[0], cell.inner_html()
        for table in page.locator(".table-scroll:has(> :is(.sequences, .pool))").all():
            assert table.evaluate("box => box.scrollWidth - box.clientWidth") <= 0


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_tab_fits_the_window(
    browser: Browser, served: Product, size: tuple[int, int], scheme: str
) -> None:
    with AdminPage(browser, served.url, size, scheme) as admin:
        for tab in ("Memory", "Tune", "Profiles", "Engine"):
            admin.tab(tab)
            assert admin.overflow() <= 0, tab
        colour = admin.page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(int(part) for part in colour.strip("rgb()").split(",")) > 3 * 128
        assert light == (scheme == "light"), colour
        assert not admin.problems


def test_an_ended_session_leads_to_the_sign_in(browser: Browser, served: Product) -> None:
    with AdminPage(browser, served.url) as admin:
        admin.context.clear_cookies()
        admin.page.wait_for_url("**/login")
