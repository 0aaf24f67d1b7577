"""Names of files made of titles, which may hold anything: `../`, control characters, nothing at all."""

import unicodedata
from urllib.parse import quote

_LONGEST = 80
_KEPT = frozenset(" -_()&+,'")
# What Windows keeps for devices, whatever the ending.
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))]
)


def file_name(title: str, ending: str, taken: set[str] | None = None) -> str:
    """A name without a folder, for any title: letters and digits of all scripts, a few signs, no dot but one.

    `taken` holds the names that are in use, in lower case; the new one is added, made unique by a number.
    """
    composed = unicodedata.normalize("NFC", title)
    plain = "".join(
        character if character in _KEPT or unicodedata.category(character)[0] in "LMN" else " "
        for character in composed
    )
    stem = " ".join(plain.split())[:_LONGEST].strip(" -")
    if not stem or stem.lower() in _DEVICES:
        stem = f"conversation {stem}".strip()
    name, count = f"{stem}.{ending}", 1
    while taken is not None and name.lower() in taken:
        count += 1
        name = f"{stem} ({count}).{ending}"
    if taken is not None:
        taken.add(name.lower())
    return name


def disposition(name: str) -> str:
    """The header `Content-Disposition` of a download with this name."""
    ascii_name = name.encode("ascii", "replace").decode().replace("?", "_").replace('"', "_")
    return f"attachment; filename=\"{ascii_name}\"; filename*=UTF-8''{quote(name, safe='')}"
