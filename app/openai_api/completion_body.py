"""The body of POST /v1/completions, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from app.errors import BadRequest
from app.openai_api.fields import MOST_ANSWERS, CompletionFields
from app.tokenizer import ModelText

Token = Annotated[int, Field(ge=0, lt=2**31)]
DEFAULT_TOKENS = 16
"""What OpenAI's older API generates when nobody says how much."""


class CompletionBody(CompletionFields):
    """prompt: a text, several, the token ids of one, or of several."""

    unsupported: ClassVar[tuple[str, ...]] = ("suffix",)

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_ANSWERS)]
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=MOST_ANSWERS)
        ]
    )
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = False
    best_of: int | None = Field(default=None, ge=1)
    suffix: Any = None

    def check(self) -> None:
        """Raises BadRequest for what this server does not do."""
        self.check_supported()
        if self.best_of is not None and self.best_of != self.answers:
            raise BadRequest("best_of is not supported: it must equal n.", param="best_of")
        if self.echo and self.logprobs is not None:
            raise BadRequest("echo together with logprobs is not supported.", param="echo")

    def prompts(self, text: ModelText, limit: int) -> list[list[int]]:
        """Token ids of each prompt. A text's special tokens are recognised: this API is the model itself.

        limit: tokens that the model reads at most; 0: not known. Raises BadRequest, ContextTooLong.
        """
        given: Sequence[str | int | list[int]] = (
            [self.prompt] if isinstance(self.prompt, str) else self.prompt
        )
        one = [token for token in given if isinstance(token, int)]
        several = [item for item in given if not isinstance(item, int)]
        for item in several:
            if isinstance(item, str):
                text.check_length(len(item), limit)
        found = (
            [one]
            if one
            else [text.encode_prompt(item) if isinstance(item, str) else item for item in several]
        )
        if len(found) * self.answers > MOST_ANSWERS:
            raise BadRequest(
                f"At most {MOST_ANSWERS} answers in one request: prompts times n.", param="prompt"
            )
        size = text.tokenizer.get_vocab_size(with_added_tokens=True)
        for ids in found:
            if not ids:
                raise BadRequest("A prompt must have at least one token.", param="prompt")
            if max(ids) >= size:
                raise BadRequest(f"This model's token ids are below {size}.", param="prompt")
        return found
