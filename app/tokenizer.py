"""Loads a model's tokenizer, chat template and generation defaults. No torch, no Transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from app.errors import ContextTooLong, ModelUnusable, TooLong

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
]


@dataclass(frozen=True)
class ModelText:
    """What the app knows of a model: how it turns text into ids, and how a chat is laid out.

    eos_ids: tokens that end a generation. defaults: sampling fields that the model's makers recommend.
    """

    tokenizer: FastTokenizer
    chat_template: str
    special_tokens: dict[str, str]
    eos_ids: frozenset[int]
    defaults: dict[str, float] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered template: special tokens in the text are recognised, none are added."""
        return _ids(self.tokenizer, text)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text that is a whole prompt: with the special tokens that the tokenizer adds by itself."""
        return _ids(self.tokenizer, text, add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of somebody's text: what looks like a special token is text too."""
        return _ids(self._plain, text)

    def check_length(self, characters: int, limit: int, what: TooLong = "conversation") -> None:
        """Refuse, before it is tokenised, text that cannot fit: no token stands for more than the longest.

        limit: tokens that the model reads at most; 0: not known. Raises ContextTooLong.
        """
        least = -(-characters // self.longest_token)
        if limit and least >= limit:
            raise ContextTooLong(least + 1, limit, what=what, at_least=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token as the vocabulary writes it: never fewer than its text has."""
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)))

    @cached_property
    def _plain(self) -> FastTokenizer:
        copy = FastTokenizer.from_str(self.tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def added(self) -> dict[int, AddedToken]:
        """The tokens that were added to the vocabulary, by id; the special ones are among them."""
        return dict(self.tokenizer.get_added_tokens_decoder())

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """How the special tokens are written, the longest first."""
        texts = (token.content for token in self.added.values() if token.special and token.content)
        return tuple(sorted(texts, key=len, reverse=True))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def is_special(self, token: int) -> bool:
        added = self.added.get(token)
        return added is not None and added.special


def _ids(tokenizer: FastTokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Ids of a text. The library lets other threads run during a batch, and not during a single `encode`."""
    return list(tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)


def load_model_text(model: str) -> ModelText:
    """Read the tokenizer of a local directory or, through the hub's cache, of a hub id. Blocks.

    Raises ModelUnusable with what to do.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _from_hub(model)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelUnusable(
            f"{model} has no tokenizer.json. Save its tokenizer in the fast format (save_pretrained)."
        )
    try:
        tokenizer = FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise ModelUnusable(f"The tokenizer of {model} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = {**_read(folder / "special_tokens_map.json"), **_read(folder / "tokenizer_config.json")}
    special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name)))}
    generation = _read(folder / "generation_config.json")
    return ModelText(
        tokenizer=tokenizer,
        chat_template=_chat_template(model, folder, config),
        special_tokens=special,
        eos_ids=_eos_ids(tokenizer, special, generation, _read(folder / "config.json")),
        defaults={
            name: float(generation[name])
            for name in ("temperature", "top_p")
            if isinstance(generation.get(name), int | float)
        },
    )


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if model.startswith(("/", ".", "~")):
        raise ModelUnusable(f"There is no model directory {model}.")
    try:
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelUnusable(
            f"{model} is neither a directory nor a model that the hub gives us ({type(error).__name__}). "
            "Set MODEL to a model directory or to a hub id that this machine may fetch."
        ) from error


def _chat_template(model: str, folder: Path, config: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = _read(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):  # several named templates
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    if not isinstance(found, str):
        raise ModelUnusable(f"{model} has no chat template. Use an instruction-tuned model.")
    return found


def _eos_ids(
    tokenizer: FastTokenizer, special: dict[str, str], generation: dict[str, Any], config: dict[str, Any]
) -> frozenset[int]:
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = {token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int)}
    eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return frozenset(ids | ({eos} if eos is not None else set()))


def _token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelUnusable(f"{path} is not valid JSON: {error}") from error
    return data if isinstance(data, dict) else {}
