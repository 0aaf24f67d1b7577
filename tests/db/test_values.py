import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from db.errors import InvalidInput
from db.values import (
    Clock,
    checked_json,
    checked_object,
    clean_name,
    clean_text,
    new_id,
    pack_tokens,
    title_from,
    unpack_tokens,
)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_tokens_survive(token_ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(token_ids)) == tuple(token_ids)


def test_tokens_are_little_endian_int32() -> None:
    assert pack_tokens([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@pytest.mark.parametrize("bad", [[-1], [2**31], [2**70], ["1"], [None], [1.5]])
def test_bad_tokens_are_refused(bad: list[int]) -> None:
    with pytest.raises(InvalidInput, match=r"token_ids: must be integers from 0 to 2147483647"):
        pack_tokens(bad)


@given(st.text(st.characters(exclude_categories=())))
def test_clean_text_can_be_stored(text: str) -> None:
    cleaned = clean_text(text)
    assert "\0" not in cleaned
    assert cleaned.encode().decode() == cleaned
    assert len(cleaned) == len(text)


def test_clean_text_keeps_every_proper_character() -> None:
    text = "naïve 你好 👩‍🚀 \t\r\n 'quotes' \x7f"
    assert clean_text(text) == text
    assert clean_text("a\ud800b\0c") == "a\ufffdb\ufffdc"


def test_names_are_trimmed_composed_and_bounded() -> None:
    assert clean_name("title", "  two\n words ") == "two words"
    assert clean_name("name", "Zoe\u0308") == "Zo\u00eb"
    assert clean_name("title", "x" * 200) == "x" * 200
    with pytest.raises(InvalidInput, match="title: must not be empty"):
        clean_name("title", " \n ")
    with pytest.raises(InvalidInput, match="title: must be at most 200 characters"):
        clean_name("title", "x" * 201)


@pytest.mark.parametrize(
    ("content", "title"),
    [
        ("What is a page?", "What is a page?"),
        ("\n\n  First   line \nsecond", "First line"),
        (" \n\t", ""),
        ("x" * 60, "x" * 60),
        ("x" * 61, "x" * 59 + "…"),
    ],
)
def test_title_from_message(content: str, title: str) -> None:
    assert title_from(content) == title


def test_json_is_checked() -> None:
    assert checked_json("value", {"a": (1, None)}) == {"a": [1, None]}
    for bad in (float("nan"), float("inf"), {1, 2}, object()):
        with pytest.raises(InvalidInput, match="value: is not JSON"):
            checked_json("value", bad)
    with pytest.raises(InvalidInput, match="settings: must be a JSON object"):
        checked_object("settings", [1])


@pytest.mark.parametrize("bad", [{"x": "\ud800"}, {"\udfff": 1}, [{"x": ["a\ud83d"]}]])
def test_json_with_lone_surrogates_is_refused(bad: object) -> None:
    with pytest.raises(InvalidInput, match="settings: must be Unicode text throughout"):
        checked_json("settings", bad)


def test_json_is_bounded() -> None:
    def nested(levels: int) -> object:
        value: object = 1
        for level in range(levels):
            value = [value] if level % 2 else {"a": value}
        return value

    assert checked_json("value", nested(32)) == nested(32)
    for levels in (33, 100_000):
        with pytest.raises(InvalidInput, match="value: must not be nested deeper than 32 levels"):
            checked_json("value", nested(levels))
    assert checked_json("value", "é" * 32767) == "é" * 32767  # 65,534 bytes and the quotes
    with pytest.raises(InvalidInput, match="value: must take at most 64 KiB as JSON"):
        checked_json("value", "é" * 32768)


def test_ids_are_url_safe_and_differ() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(json.dumps(i) == f'"{i}"' and i.isalnum() and len(i) == 32 for i in ids)


def test_clock_never_repeats() -> None:
    clock = Clock()
    times = [clock() for _ in range(5000)]
    assert times == sorted(set(times))
