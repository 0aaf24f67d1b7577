"""Making, checking and packing the values that go into columns."""

import json
import re
import secrets
import sys
import time
import unicodedata
from array import array
from collections.abc import Iterable
from threading import Lock
from typing import Any

from db.errors import InvalidInput

MAX_TITLE = 200
_TITLE_FROM_MESSAGE = 60
_MAX_JSON_BYTES = 64 * 1024
_MAX_JSON_DEPTH = 32
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class Clock:
    """UTC milliseconds that never repeat, so that records made in one millisecond keep their order."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = Lock()

    def __call__(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, time.time_ns() // 1_000_000)
            return self._last


def new_id() -> str:
    """A random, URL-safe identifier of 128 bits that never starts with a dash."""
    return secrets.token_hex(16)


def clean_text(text: str) -> str:
    """`text` with what SQLite text cannot hold faithfully (NUL, lone surrogates) as U+FFFD."""
    return _UNSTORABLE.sub("\ufffd", text)


def clean_name(field: str, name: str) -> str:
    """A trimmed, composed, one-line name. Raises InvalidInput when nothing is left or it is too long."""
    name = " ".join(unicodedata.normalize("NFC", clean_text(name)).split())
    if not name:
        raise InvalidInput(field, "must not be empty")
    if len(name) > MAX_TITLE:
        raise InvalidInput(field, f"must be at most {MAX_TITLE} characters")
    return name


def name_key(name: str) -> str:
    """What two names that people take for one have in common.

    That is the letters without their case (of all scripts) and without compatibility forms (fullwidth,
    ligatures) or characters that are not seen.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", clean_text(name)).casefold())
    return " ".join("".join(each for each in folded if unicodedata.category(each) != "Cf").split())


def title_from(content: str) -> str:
    """A title made of the first line of a message that has any text."""
    line = next((line for line in clean_text(content).splitlines() if line.strip()), "")
    title = " ".join(line.split())
    return title if len(title) <= _TITLE_FROM_MESSAGE else title[: _TITLE_FROM_MESSAGE - 1].rstrip() + "…"


def checked_json(field: str, value: Any) -> Any:
    """`value` as it will read back.

    Raises InvalidInput when it is not JSON (NaN and infinities are not), holds lone surrogates, is nested
    deeper than 32 levels, or takes more than 64 KiB.
    """
    too_deep = f"must not be nested deeper than {_MAX_JSON_DEPTH} levels"
    try:
        encoded = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        stored = json.loads(encoded)
    except UnicodeEncodeError as error:
        raise InvalidInput(field, "must be Unicode text throughout, without lone surrogates") from error
    except RecursionError as error:
        raise InvalidInput(field, too_deep) from error
    except (TypeError, ValueError) as error:
        raise InvalidInput(field, f"is not JSON: {error}") from error
    if len(encoded) > _MAX_JSON_BYTES:
        raise InvalidInput(field, f"must take at most {_MAX_JSON_BYTES // 1024} KiB as JSON")
    if _deeper_than(stored, _MAX_JSON_DEPTH):
        raise InvalidInput(field, too_deep)
    return stored


def _deeper_than(value: Any, levels: int) -> bool:
    """Whether objects and arrays are nested more than `levels` deep."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(item, levels - 1) for item in inner)


def checked_object(field: str, value: Any) -> dict[str, Any]:
    """As `checked_json`, and the value must be a JSON object."""
    value = checked_json(field, value)
    if not isinstance(value, dict):
        raise InvalidInput(field, "must be a JSON object")
    return value


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32. Raises InvalidInput for anything but ids from 0 to 2**31 - 1."""
    try:
        packed = array("i", token_ids)
    except (TypeError, OverflowError) as error:
        raise InvalidInput("token_ids", "must be integers from 0 to 2147483647") from error
    if packed and min(packed) < 0:
        raise InvalidInput("token_ids", "must be integers from 0 to 2147483647")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(blob: bytes) -> tuple[int, ...]:
    """The token ids in a blob of little-endian int32."""
    unpacked = array("i", blob)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return tuple(unpacked)
