"""A tokenizer of words and marks, which needs no files, for the accuracy benchmark's tests."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.accuracy.chat import Template


class Words:
    """Splits into words, digits and marks, each with the space before it."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [
            self.ids.setdefault(part, len(self.ids))
            for part in re.findall(r"\s*(?:[^\W\d]+|\d|\S)|\s+", text)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        parts = {number: part for part, number in self.ids.items()}
        return "".join(parts[token] for token in tokens)

    def template(self) -> Template:
        before, to_reply, to_user = (
            tuple(self.encode(text)) for text in ("<system> <user>", "<end> <reply>", "<stop> <user>")
        )
        return Template(before, to_reply, to_user, (-1,))
