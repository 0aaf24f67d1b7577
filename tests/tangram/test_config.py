"""The configuration object: sources, precedence, errors that name the field."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tangram.config import HELP, TangramConfig
from tangram.errors import ConfigError


def test_options_win_over_the_environment() -> None:
    environment = {"TANGRAM_RETENTION": "0.25", "TANGRAM_CHUNK": "256", "TANGRAM_WINDOW": ""}
    config = TangramConfig.from_sources({"retention": "0.75"}, environment)
    assert (config.retention, config.chunk, config.window) == (0.75, 256, 128)


def test_every_field_can_come_from_the_environment_and_has_help() -> None:
    values = {
        "retention": 0.25, "chunk": 64, "window": 32, "sink": 2, "page_tokens": 32, "group_size": 7,
        "scope": "layer", "scorer": "keydiff", "alpha": 2.0, "rewind": 32, "reserve": True,
        "resident_share": 0.5, "profile": "p.json",
    }  # fmt: skip
    assert set(values) == {field.name for field in dataclasses.fields(TangramConfig)} == set(HELP)
    environment = {f"TANGRAM_{name.upper()}": str(value) for name, value in values.items()}
    assert TangramConfig.from_sources({}, environment) == TangramConfig(**values)


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
        ("alpha", 11), ("chunk", True),
    ],
)  # fmt: skip
def test_bad_values_name_their_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: ") as error:
        TangramConfig.from_mapping({field: value})
    assert error.value.field == field


def test_hostile_input_is_a_clear_error_too() -> None:
    with pytest.raises(ConfigError, match="retention: must be a number"):
        TangramConfig.from_mapping({"retention": 10**400})
    with pytest.raises(ConfigError) as error:
        TangramConfig.from_mapping({"\ud800": 1})
    str(error.value).encode("utf-8")


def test_unknown_names_are_refused_and_the_known_listed() -> None:
    with pytest.raises(ConfigError, match=r"retension: is no setting; there are: retention, .*"):
        TangramConfig.from_mapping({"retension": 0.5})
