"""The bytes that a token stands for: a character can take several tokens, so not every token is text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property

from app.tokenizer import ModelText

_MOST_BYTES = 4
"""Of one character in UTF-8."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Looks tokens up in a vocabulary, byte-level or with a mark for spaces and <0xAB> for bytes."""

    def __init__(self, text: ModelText) -> None:
        self._text = text

    def __call__(self, token: int) -> bytes:
        """The bytes of one token; none for an id that the vocabulary does not have."""
        added = self._text.added.get(token)
        if added is not None:
            return added.content.encode()
        name = self._text.tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._byte_level:
            return b"".join(self._bytes.get(character, character.encode()) for character in name)
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def unfinished(self, ids: Sequence[int]) -> int:
        """How many tokens at the end hold the bytes of a character that is not whole yet."""
        tail, count = b"", 0
        while len(tail) < _MOST_BYTES and count < len(ids):
            count += 1
            tail = self(ids[-count]) + tail
        missing = _begun(tail)
        count = 0
        while missing > 0:
            count += 1
            missing -= len(self(ids[-count]))
        return count

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in set(_types(json.loads(self._text.tokenizer.to_str()).get("decoder")))

    @cached_property
    def _bytes(self) -> dict[str, bytes]:
        """Byte-level BPE writes a byte that is no visible Latin-1 character as one from U+0100 on."""
        visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        hidden = [byte for byte in range(0x100) if byte not in visible]
        table = {chr(byte): bytes([byte]) for byte in visible}
        return table | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(hidden)}


def _begun(tail: bytes) -> int:
    """How many bytes at the end begin a character of UTF-8 without ending it."""
    for size in range(1, min(len(tail), _MOST_BYTES - 1) + 1):
        byte = tail[-size]
        if byte >= 0xC0:  # the first byte of a character tells its length
            whole = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return size if size < whole else 0
        if byte < 0x80:
            return 0
    return 0


def _types(decoder: object) -> Iterable[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders", ()):
            yield from _types(part)
