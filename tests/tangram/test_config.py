"""The configuration object: sources, precedence, errors that name the field."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tangram.config import HELP, PROFILE_SCORERS, QUERY_SCORERS, SCORERS, TangramConfig
from tangram.errors import ConfigError
from tangram.scorers import Need, get_scorer


def test_options_win_over_the_environment() -> None:
    environment = {"TANGRAM_RETENTION": "0.25", "TANGRAM_CHUNK": "256", "TANGRAM_WINDOW": ""}
    config = TangramConfig.from_sources({"retention": "0.75"}, environment)
    assert (config.retention, config.chunk, config.window) == (0.75, 256, 128)


def test_every_field_can_come_from_the_environment_and_has_help() -> None:
    values = {
        "retention": 0.25, "chunk": 64, "window": 32, "sink": 2, "page_tokens": 32, "group_size": 7,
        "scope": "layer", "scorer": "snapkv", "query_window": 32, "alpha": 2.0, "rewind": 32,
        "reserve": True, "resident_share": 0.5, "wide_steps": False, "returning_first": False,
        "profile": "p.json",
        "drift_every": 3, "drift_warning": 1.5,
    }  # fmt: skip
    assert set(values) == {field.name for field in dataclasses.fields(TangramConfig)} == set(HELP)
    environment = {f"TANGRAM_{name.upper()}": str(value) for name, value in values.items()}
    assert TangramConfig.from_sources({}, environment) == TangramConfig(**values)


@pytest.mark.parametrize(("given", "on_gpu", "wide"), [
    ("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False),
])  # fmt: skip
def test_wide_steps_are_left_to_the_device_unless_told(given: str, on_gpu: bool, wide: bool) -> None:
    assert TangramConfig.from_mapping({"wide_steps": given}).steps_wide(on_gpu) is wide


def test_the_profile_chooses_the_scorer_unless_told() -> None:
    config = TangramConfig()
    assert config.scorer == "auto" == TangramConfig.from_mapping({"scorer": " AUTO"}).scorer
    assert TangramConfig.from_mapping({"wide_steps": "on"}).steps_wide(on_gpu=False), "auto is fused"
    assert not config.observed


def test_wide_steps_need_a_scorer_that_works_inside_a_layer() -> None:
    assert not TangramConfig(scorer="snapkv").steps_wide(on_gpu=True)
    with pytest.raises(ConfigError, match="leave wide_steps on auto"):
        TangramConfig(scorer="snapkv", wide_steps=True)


def test_it_travels_as_json() -> None:
    config = TangramConfig(retention=0.25, group_size=8)
    assert TangramConfig.from_additional_config(json.loads(config.to_json())) == config


def test_without_our_key_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_RETENTION", "0.125")
    assert TangramConfig.from_additional_config({"other": 1}).retention == 0.125


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TangramConfig().retention = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("retention", 0), ("retention", -1), ("retention", 1.01), ("retention", "half"), ("retention", "nan"),
        ("chunk", 0), ("chunk", 500), ("chunk", "12.5"), ("window", -16), ("window", 100), ("rewind", 0),
        ("rewind", 8), ("sink", -1), ("sink", 513), ("page_tokens", 0), ("page_tokens", 24),
        ("group_size", 0), ("group_size", "many"), ("scope", "head"), ("scorer", "magic"), ("alpha", -0.1),
        ("alpha", 11), ("chunk", True), ("query_window", 0),
    ],
)  # fmt: skip
def test_bad_values_name_their_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: ") as error:
        TangramConfig.from_mapping({field: value})
    assert error.value.field == field


def test_the_query_window_must_fit_where_queries_are_used() -> None:
    assert TangramConfig(page_tokens=128, rewind=128).query_window == 64, "it does not matter to keydiff"
    assert TangramConfig(scorer="snapkv", window=32, rewind=48, query_window=32).query_window == 32
    for bad, why in (
        ({"query_window": 40}, r"a multiple of page_tokens \(16\), not 40"),
        ({"rewind": 32}, r"at most rewind \(32\), not 64: .* lower query_window or raise rewind"),
        ({"window": 32}, r"at most window \(32\), not 64"),
        ({"chunk": 64}, r"at most chunk - page_tokens \(48\), not 64"),
    ):
        for scorer in QUERY_SCORERS:
            with pytest.raises(ConfigError, match=f"^query_window: must be {why}"):
                TangramConfig.from_mapping({"scorer": scorer, **bad})


def test_only_scorers_that_use_queries_hold_resumption_back() -> None:
    assert TangramConfig(scorer="tova", query_window=48).observed == 48
    assert TangramConfig(scorer="knorm", query_window=48).observed == 0


def test_the_configuration_knows_the_scorers() -> None:
    """It names them itself, as it must load without torch."""
    known = {name: get_scorer(name) for name in SCORERS}
    assert {name: scorer.name for name, scorer in known.items()} == {name: name for name in SCORERS}
    asking = {name for name, scorer in known.items() if Need.MEAN_QUERY in scorer.needs}
    assert set(PROFILE_SCORERS) == asking
    assert set(QUERY_SCORERS) == {name for name, scorer in known.items() if Need.QUERIES in scorer.needs}
    with pytest.raises(ConfigError, match=f"scorer: must be one of {', '.join(SCORERS)}, not 'none'"):
        get_scorer("none")


def test_hostile_input_is_a_clear_error_too() -> None:
    with pytest.raises(ConfigError, match="retention: must be a number"):
        TangramConfig.from_mapping({"retention": 10**400})
    with pytest.raises(ConfigError, match="retention: must be a number"):
        TangramConfig.from_mapping({"retention": True})
    with pytest.raises(ConfigError) as long:
        TangramConfig.from_mapping({"group_size": "9" * 5000})
    assert len(str(long.value)) < 200
    with pytest.raises(ConfigError) as error:
        TangramConfig.from_mapping({"\ud800": 1})
    str(error.value).encode("utf-8")


def test_unknown_names_are_refused_and_the_known_listed() -> None:
    with pytest.raises(ConfigError, match=r"retension: is no setting; there are: retention, .*"):
        TangramConfig.from_mapping({"retension": 0.5})
