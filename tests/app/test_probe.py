"""The quick look at whether details are still found, and what follows when they are not."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine_settings import EngineSettings
from app.errors import EngineStartFailed
from app.probe import LINES, QUESTIONS, ProbeResult, facts, probed_text, worse
from app.settings import Settings
from tests.admin.support import Engine, Keeper, Supervisor

GOOD, POOR = ProbeResult(6, 6), ProbeResult(2, 6)
DEAD = ProbeResult(error="no answer: it hangs")


def test_the_facts_look_alike_and_each_question_has_one_answer() -> None:
    text, asked = facts(LINES)
    assert len(text.splitlines()) == LINES
    assert len(set(asked)) == QUESTIONS
    assert facts(LINES) == (text, asked), "the same every time"
    for fact in asked:
        assert fact.sentence in text.splitlines()
        assert fact.place in fact.question
        assert f"{fact.lead} {fact.code}." == fact.sentence
        assert text.count(fact.code) == 1


@pytest.mark.parametrize(
    ("before", "after", "bad"),
    [
        (GOOD, GOOD, False),
        (GOOD, ProbeResult(3, 6), False),
        (GOOD, POOR, True),
        (ProbeResult(0, 6), ProbeResult(0, 6), False),
        (ProbeResult(1, 6), ProbeResult(0, 6), False),
        (ProbeResult(2, 6), ProbeResult(0, 6), False),
        (ProbeResult(3, 6), ProbeResult(1, 6), True),
        (None, ProbeResult(0, 6), False),
        (GOOD, DEAD, True),
        (None, DEAD, True),
        (DEAD, POOR, False),
        (GOOD, None, False),
    ],
)
def test_what_is_taken_back(before: ProbeResult | None, after: ProbeResult | None, bad: bool) -> None:
    assert worse(before, after) is bad


def test_it_is_told_in_words() -> None:
    assert probed_text((GOOD, POOR)) == " Details found in a quick check: 2 of 6, before the change 6 of 6."
    assert probed_text((None, GOOD)) == " Details found in a quick check: 6 of 6."
    assert probed_text((GOOD, None)) == ""
    mute, mended = ProbeResult(0, 6, unsealed=0), ProbeResult(0, 6, unsealed=5)
    assert "cannot answer the quick check even with everything kept (0 of 6)" in probed_text((mute, mute))
    assert probed_text((mended, mended)).endswith(
        "0 of 6, before the change 0 of 6. Of a text so short that everything is kept it finds 5 of 6."
    )


class Found:
    """Probe results in turn."""

    def __init__(self, *results: ProbeResult | None) -> None:
        self.results = list(results)

    async def __call__(self) -> ProbeResult | None:
        return self.results.pop(0)


async def changed(tmp_path: Any, *found: ProbeResult | None) -> tuple[EngineSettings, Supervisor, Keeper]:
    supervisor, keeper = Supervisor(Settings(home=tmp_path), Engine()), Keeper()
    return EngineSettings(keeper, supervisor, "m", Found(*found)), supervisor, keeper


async def test_a_change_that_ruins_recall_is_taken_back(tmp_path: Any) -> None:
    settings, supervisor, keeper = await changed(tmp_path, GOOD, POOR)
    with pytest.raises(EngineStartFailed, match="before it found 6 of 6, now 2 of 6") as error:
        await settings.use_profile("ann", "bad.json")
    assert error.value.rolled_back
    assert [one.get("profile") for one in supervisor.applied] == ["bad.json", None]
    assert await settings.profile() == "auto", "nothing is stored"
    assert [action for _, action, *_ in keeper.audit] == ["engine.profile_failed"]


async def test_a_change_that_keeps_it_stays_and_is_told(tmp_path: Any) -> None:
    settings, supervisor, _ = await changed(tmp_path, GOOD, ProbeResult(5, 6))
    await settings.use_profile("ann", "good.json")
    assert [one.get("profile") for one in supervisor.applied] == ["good.json"]
    assert settings.probed == (GOOD, ProbeResult(5, 6))
    assert await settings.profile() == "good.json"


async def test_another_model_is_judged_by_its_answering_alone(tmp_path: Any) -> None:
    settings, supervisor, keeper = await changed(tmp_path, POOR, DEAD)
    await settings.use_model("ann", "/models/other")
    assert supervisor.models == ["/models/other"]
    assert settings.model == "/models/other"
    assert keeper.settings["engine_model"] == {"configured": "m", "model": "/models/other"}
    with pytest.raises(EngineStartFailed, match="no answer"):
        await settings.use_model("ann", "/models/third")
    assert supervisor.models == ["/models/other", "/models/third", "/models/other"]
    assert settings.model == "/models/other"


async def test_the_chosen_model_is_served_again_unless_the_configuration_changed(tmp_path: Any) -> None:
    for configured, expected in (("m", "/models/other"), ("new", "new")):
        supervisor, keeper = Supervisor(Settings(home=tmp_path, model=configured), Engine()), Keeper()
        keeper.settings["engine_model"] = {"configured": "m", "model": "/models/other"}
        settings = EngineSettings(keeper, supervisor, configured)
        await settings.load_model()
        assert settings.model == supervisor.settings.model == expected
