"""The panels in words and numbers, and nothing that a name could smuggle in."""

from __future__ import annotations

import re
from dataclasses import replace

from admin import memory_panels, panels
from admin.engine_panels import log_panel
from admin.preview import preview_panel
from admin.snapshot import MemorySnapshot, SequenceRow
from admin.tuning import TuneValues
from tests.admin.support import Engine, report

EVIL = "<img src=x onerror=alert(1)>"


def test_cards_give_the_operator_the_numbers() -> None:
    snapshot = MemorySnapshot.parse(report(4, 2, sequences=8))
    text = panels.cards(snapshot, 0.25, 0.02)
    used = snapshot.pool.running + snapshot.pool.resident
    assert f"{used:,} of {snapshot.pool.total:,} pages" in text
    assert "3.0× less than a full cache" in text
    assert "<b>8</b><small>2 running</small>" in text
    assert "250 ms" in text
    assert "then 20 ms a token" in text


def test_cards_before_the_first_report_are_dashes() -> None:
    assert panels.cards(None, None, None).count("<b>–</b>") == 4


def test_saving_line_compares_with_a_full_cache() -> None:
    snapshot = replace(MemorySnapshot.parse(report(4, 2)), full_cache_bytes=3 * 1024**3, used_bytes=1024**3)
    line = memory_panels.saving_line(snapshot)
    assert "A full cache would need <b>3 GiB</b>; used <b>1 GiB</b> (3.0× less)." in line
    assert "No conversation" in memory_panels.saving_line(replace(snapshot, sequences=()))


def test_sequences_are_sorted_by_memory_and_bounded() -> None:
    snapshot = MemorySnapshot.parse(report(4, 2, sequences=500))
    rows = re.findall(r"<tr[ >].*?</tr>", memory_panels.sequences_table(snapshot, limit=25))[1:]
    assert len(rows) == 26
    pages = [int(re.findall(r'class="num">([\d,]+)', row)[1].replace(",", "")) for row in rows]
    assert pages[:25] == sorted((row.pages for row in snapshot.sequences), reverse=True)[:25]
    assert sum(pages) == sum(row.pages for row in snapshot.sequences), "the last line holds the rest"
    assert "and 475 more" in rows[-1]


def test_rows_tell_their_engine_where_there_are_several() -> None:
    data = report(4, 2, sequences=3)
    assert ">engine " not in memory_panels.sequences_table(MemorySnapshot.parse(data))
    for rank, row in enumerate(data["sequences"]):
        row |= {"engine": rank, "id": "same"}
    data["engines"] = [{"engine": rank} for rank in range(3)]
    table = memory_panels.sequences_table(MemorySnapshot.parse(data))
    assert sorted(re.findall(r">engine (\d)<", table)) == ["0", "1", "2"]
    keys = re.findall(r'data-key="([^"]*)"', table)
    assert len(set(keys)) == 3, "rows of one name in several engines stay apart"


def test_a_map_of_one_colour_is_explained() -> None:
    snapshot = MemorySnapshot.parse(report(4, 2))
    same = replace(snapshot, heads=replace(snapshot.heads, budget=((0.5, 0.5),) * 4))
    line = "All heads keep the same share: no calibrated profile is active."
    assert line in memory_panels.map_title(same)
    for uneven in (None, snapshot):
        assert "same share" not in memory_panels.map_title(uneven)
    calibrated = replace(same, config={**same.config, "profile": "bundled"})
    assert "All heads keep the same share." in memory_panels.map_title(calibrated)


def test_pool_table_adds_up() -> None:
    snapshot = MemorySnapshot.parse(report(4, 2))
    numbers = re.findall(r"([\d,]+) pages", memory_panels.pool_table(snapshot.pool))
    assert sum(int(number.replace(",", "")) for number in numbers) == snapshot.pool.total


def test_what_rounding_saves_is_not_called_less() -> None:
    """80 tokens of 85 are held, and 96 counted as a full cache's: nothing was dropped."""
    snapshot = MemorySnapshot.parse(report(4, 2))
    raw = replace(snapshot, sequences=tuple(replace(row, sealed_chunks=0) for row in snapshot.sequences))
    for text in (panels.cards(raw, None, None), memory_panels.saving_line(raw)):
        assert "less" not in text
        assert "full cache" in memory_panels.saving_line(raw)


def test_a_shared_prefix_is_no_conversation() -> None:
    snapshot = MemorySnapshot.parse(report(4, 2, sequences=4))
    assert "<b>4</b><small>1 running" in panels.cards(snapshot, None, None)
    prefix = replace(snapshot.sequences[1], state="prefix")
    with_prefix = replace(snapshot, sequences=(*snapshot.sequences, prefix))
    assert "<b>4</b><small>1 running" in panels.cards(with_prefix, None, None)


def test_counters_and_configuration() -> None:
    snapshot = MemorySnapshot.parse(report(4, 2, scale=2))
    counters = panels.counters_panel(snapshot.counters)
    for label, value in (("Takeovers", 10), ("Evictions", 1), ("Seals", 24), ("Preemptions", 0)):
        assert f"<span>{label}</span><b>{value}</b>" in counters
    config = panels.config_table(snapshot)
    assert "<th>Retention</th><td>50%</td>" in config
    assert "<th>Profile</th><td>uniform budgets</td>" in config
    assert "<th>Group size</th><td>16</td>" in config
    chosen = replace(snapshot, config={**snapshot.config, "group_size": None})
    assert "<th>Group size</th><td>16 (automatic)</td>" in panels.config_table(chosen)
    assert "4 layers × 2 KV heads × 64" in config


def test_the_scorer_in_force_is_shown_beside_what_was_left_open() -> None:
    def shown(configured: str, **told: str) -> str:
        return panels.config_table(MemorySnapshot.parse(report(4, 2, config={"scorer": configured}) | told))

    assert "<th>Scorer</th><td>auto (keyvalue_query)</td>" in shown("auto", scorer="keyvalue_query")
    assert "<th>Scorer</th><td>keydiff</td>" in shown("keydiff", scorer="keydiff")
    assert "<th>Scorer</th><td>auto</td>" in shown("auto"), "an engine that does not tell"


def test_nothing_from_outside_becomes_markup() -> None:
    snapshot = MemorySnapshot.parse(report(4, 2))
    row = SequenceRow(EVIL, EVIL, 1, 0, 1, None)
    evil = replace(
        snapshot,
        sequences=(row,),
        model={**snapshot.model, "name": EVIL},
        config={**snapshot.config, "profile": EVIL},
        scorer=EVIL,
    )
    texts = (
        panels.header("ready", EVIL, 1.0),
        panels.state_pill(EVIL),
        panels.notice(EVIL, EVIL),
        memory_panels.sequences_table(evil),
        panels.config_table(evil),
        panels.text_table([(EVIL, EVIL)], (EVIL,), "facts"),
        log_panel([EVIL]),
    )
    for text in texts:
        assert "<img" not in text
        assert "&lt;img" in text


async def test_preview_shows_before_and_after() -> None:
    engine = Engine()
    before = await engine.preview(retention=0.5, group_size=16, alpha=1.0)
    after = await engine.preview(retention=0.25, group_size=50, alpha=1.0)
    panel = preview_panel(TuneValues(0.25, 50, 1.0), None, before, after)
    text = panel.replace("\u00a0", " ")  # a number stays with its unit
    assert "45 MiB → 22.5 MiB" in text
    assert "1.41 GiB" in text
    assert "256 KiB → 800 KiB" in text
    assert "<td>Padding of pages</td><td class=num>7.0%</td>" in text
    assert "One group holds every head" in text
    assert [length for length in ("4k", "16k", "64k") if f"{length} tokens" in text] == ["4k", "16k", "64k"]
    assert "This is what runs now" not in text
    assert "This is what runs now" in preview_panel(TuneValues(0.5, None, 1.0), 16, before, before)


async def test_preview_explains_what_names_do_not_tell() -> None:
    engine = Engine()
    values, found = TuneValues(0.5, 16, 1.0), await engine.preview(retention=0.5, group_size=16, alpha=1.0)
    told = {
        "Page ids in a row": {"row_width": 700},
        "Evenness of the split of work": {"split_at": {"16384": 0.9}},
        "The same with a block a head": {"split_at": {"16384": 0.9}, "split_unsplit_at": {"16384": 0.4}},
    }
    bare = {key: value for key, value in found.items() if key not in ("row_width", "split_at")}
    assert "meanings" not in preview_panel(values, 16, bare, bare)
    for name, figures in told.items():
        text = preview_panel(values, 16, bare | figures, bare | figures)
        assert f"<td>{name}</td>" in text
        assert f"<li>{name}: " in text
