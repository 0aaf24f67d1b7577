"""How a text is put before a chat model, and how the model is asked to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONTEXT, REQUEST = "<|tangram-context|>", "<|tangram-request|>"
"""Stand in a template where context and request will be; no tokenizer sees them."""
FROM_START = "Repeat the text above word for word, from its beginning."
FROM_HERE = "Repeat the text above word for word, going on after the words: "
LEAD_TOKENS = 8
"""So many of the tokens before a part tell the model where to go on."""


@dataclass(frozen=True)
class Frame:
    """What stands around a context.

    Attributes:
        before: tokens in front of the context.
        between: text from the context to the request.
        after: text from the request to where the answer begins.
    """

    tokenizer: Any
    before: tuple[int, ...]
    between: str
    after: str

    def request(self, lead: Sequence[int]) -> list[int]:
        """Tokens from the end of the context to where its repetition begins.

        Args:
            lead: the tokens before the part that is to be repeated; empty for the first part.
        """
        asked = FROM_START if not lead else FROM_HERE + self.tokenizer.decode(list(lead[-LEAD_TOKENS:]))
        return encode(self.tokenizer, self.between + asked + self.after)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text, without any that the tokenizer would add around it."""
    # A text may be longer than the model: whoever reads it cuts it, the tokenizer need not warn.
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def frame_of(tokenizer: Any) -> Frame:
    """The model's chat template, its user asking; plain paragraphs where it has none that can be used."""
    if getattr(tokenizer, "chat_template", None):
        asked = [{"role": "user", "content": f"{CONTEXT}\n\n{REQUEST}"}]
        try:
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template may raise what it likes, of any kind
            text = ""
        before, found, rest = text.partition(CONTEXT)
        between, asks, after = rest.partition(REQUEST)
        if found and asks:
            return Frame(tokenizer, tuple(encode(tokenizer, before)), between, after)
    begin = [tokenizer.bos_token_id] if tokenizer.encode("")[:1] == [tokenizer.bos_token_id] else []
    return Frame(tokenizer, tuple(begin), "\n\n", "\n\n")
