"""Tokens in, tokens out: turns a conversation into the token ids that the engine is sent.

Rendering a chat template over text tokenises the assistant's replies again, and the result can differ from
the ids that were generated; the engine would then not recognise its own history. So each message keeps its
own segment of ids, and a prompt is the concatenation of the segments on its path:

    user segment       template text from the end of the previous reply's content to the start of the new
                       reply (first turn: from the start, with BOS and the system prompt)
    assistant segment  the generated ids, as the engine returned them

The text between a reply and the next one is found by rendering the template with a marker as the reply and
taking what follows the marker. Where that begins with the end-of-turn token that the reply already ends with,
it is not added twice; where the reply was cut short, it brings the token.

A user message whose reply failed with no text is not a turn: it is carried by the next user segment, which
holds both messages. `prompt` therefore skips such pairs.

Nobody can forge a turn: what looks like a special token inside a message is masked while the template is
rendered, and becomes the ids of its characters.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from app.chat_template import ChatTemplate, Message, TemplateRefused
from app.errors import BadRequest, ModelUnusable
from app.segments import Segments
from app.token_bytes import TokenBytes
from app.tokenizer import ModelText
from db.views import MessageView


@dataclass(frozen=True)
class Turn:
    """User messages that were sent one after another without a reply between them, and the reply's ids.

    reply: None for a turn that waits for its reply.
    """

    user: tuple[str, ...]
    reply: tuple[int, ...] | None = None


class Templating:
    """Segments and prompts of one model."""

    def __init__(self, model_name: str, text: ModelText) -> None:
        self.model_name = model_name
        self.text = text
        self._template = ChatTemplate(text.chat_template, text.special_tokens)
        self.segments = Segments()
        self._nonce = secrets.token_hex(16)
        self._special = re.compile("|".join(map(re.escape, text.special_texts)) or r"(?!)")
        self._masks = re.compile(rf"\[{self._nonce}:(\d+)\]")
        try:
            self.after_reply(("probe",), ())
        except TemplateRefused as error:
            raise ModelUnusable(f"The model's chat template cannot render a conversation: {error}") from error

    # ---- segments ----------------------------------------------------------------------------

    def first_segment(self, system_prompt: str, user: Sequence[str]) -> list[int]:
        """Ids from the start of a conversation to the start of its first reply."""
        return self._encode(self._render_first(system_prompt, tuple(user)))

    def after_reply(self, user: Sequence[str], reply: Sequence[int]) -> list[int]:
        """Ids from the end of a reply to the start of the next one.

        Args:
            user: the user's new messages (several when earlier ones got no reply).
            reply: ids of the reply that these messages follow.
        """
        return self._joined(reply, self._encode(self._render_delta(tuple(user))))

    def _joined(self, before: Sequence[int], ids: list[int]) -> list[int]:
        """`ids` without the end-of-turn token at their start where `before` ends with it already."""
        if ids and before and before[-1] == ids[0] and self.text.is_special(ids[0]):
            return ids[1:]
        return ids

    @cached_property
    def turn_end(self) -> int | None:
        """The special token with which the template ends a reply, if it has one."""
        ids = self._encode(self._render_delta(("probe",)))
        return ids[0] if ids and self.text.is_special(ids[0]) else None

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply and that the engine may not know of."""
        return () if self.turn_end is None else (self.turn_end,)

    def settle(self, ids: Sequence[int]) -> list[int]:
        """The ids to keep of a reply that ended.

        Drops an end token that is not the template's own end of turn (the next segment brings that one), and
        the tokens of a character that was cut in the middle: its text was never sent.
        """
        kept = list(ids)
        if kept and kept[-1] in self.text.eos_ids and kept[-1] != self.turn_end:
            kept.pop()
        return kept[: len(kept) - self.spell.unfinished(kept)]

    @cached_property
    def spell(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.text)

    # ---- conversations -----------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a whole conversation given as text, for the stateless API.

        Raises BadRequest when the template does not take these messages.
        """
        try:
            return self._encode(self._render(self._fold_system(self._masked(messages)), self._masked(tools)))
        except TemplateRefused as error:
            raise BadRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def after(
        self,
        messages: Sequence[Message],
        index: int,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int] | None:
        """Ids that follow the assistant's message `index` of a conversation, up to the start of the answer.

        ids: those of the conversation up to that message's end.
        None when the template does not show what was said, or does not take it as plain text.
        """
        marker = f"reply-{secrets.token_hex(16)}"
        masked = self._masked(messages)
        masked[index] = {"role": "assistant", "content": marker}
        try:
            text = self._render(self._fold_system(masked), self._masked(tools))
        except TemplateRefused:
            return None
        before, found, rest = text.rpartition(marker)
        if not found or marker in before:
            return None
        return self._joined(ids, self._encode(rest))

    def user_segment(self, path: Sequence[MessageView], system_prompt: str, content: str) -> list[int]:
        """Ids of a new user message under `path` (root to the reply it answers; empty: first turn)."""
        waiting, replied = split_unanswered(path)
        user = (*(message.content for message in waiting), content)
        if not replied:
            return self.first_segment(system_prompt, user)
        return self.after_reply(user, self.segment(replied, system_prompt))

    def history(self, path: Sequence[MessageView], system_prompt: str) -> list[int]:
        """Ids of `path` as they stand before a new user message: what `user_segment` covers is left out."""
        return self.prompt(split_unanswered(path)[1], system_prompt)

    def prompt(self, path: Sequence[MessageView], system_prompt: str, start: int = 0) -> list[int]:
        """Ids of the whole path: root to the user message to answer, whose stored ids are this model's.

        start: one of `shown_starts(path)`; the turns before it are left out, and the system prompt stands
            before this one instead.
        """
        ids: list[int] = []
        for end in _kept(path):
            if end <= start:
                continue
            if start and end == start + 1:
                _, replied = split_unanswered(path[:start])
                ids += self.user_segment(path[len(replied) : start], system_prompt, path[start].content)
            else:
                ids += self.segment(path[:end], system_prompt, path[end] if end < len(path) else None)
        return ids

    def segment(
        self, path: Sequence[MessageView], system_prompt: str, following: MessageView | None = None
    ) -> list[int]:
        """Ids of the last message of `path`: as stored, or made from its text if another model wrote them.

        A user message does not know its model, the reply that follows it does.
        """
        message = path[-1]
        model = following.model if message.role == "user" and following is not None else message.model
        if message.token_ids and model in (self.model_name, None):
            return list(message.token_ids)
        if message.role == "user":
            return self.user_segment(path[:-1], system_prompt, message.content)
        ids = self._encode(self._mask(message.content))
        return [*ids, self.turn_end] if message.status == "complete" and self.turn_end is not None else ids

    def unfinished(self, reply: MessageView) -> list[int]:
        """Ids of a reply that is to go on: as stored, or of its text when another model wrote them."""
        if reply.token_ids and reply.model in (self.model_name, None):
            return list(reply.token_ids)
        return self._encode(self._mask(reply.content))

    # ---- text --------------------------------------------------------------------------------

    def _mask(self, content: str) -> str:
        """Text in which each special token is replaced by a mark that nobody can guess."""
        texts = self.text.special_texts
        return self._special.sub(lambda found: f"[{self._nonce}:{texts.index(found[0])}]", content)

    def _masked(self, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages or tools in which every text is masked."""

        def masked(value: Any) -> Any:
            if isinstance(value, str):
                return self._mask(value)
            if isinstance(value, list):
                return [masked(item) for item in value]
            if isinstance(value, Mapping):
                return {self._mask(str(key)): masked(item) for key, item in value.items()}
            return value

        return [masked(value) for value in values]

    def _encode(self, rendered: str) -> list[int]:
        """Ids of a rendered template; what was masked in it becomes plain text."""
        pieces = self._masks.split(rendered)  # text, index of a special token, text, ...
        ids = self.text.encode(pieces[0])
        for index, text in zip(pieces[1::2], pieces[2::2], strict=True):
            ids += self.text.encode_plain(self.text.special_texts[int(index)])
            ids += self.text.encode(text)
        return ids

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        return self._template.render(messages, add_generation_prompt=True, tools=tools)

    def _render_first(self, system_prompt: str, user: tuple[str, ...]) -> str:
        messages = [_system(self._mask(system_prompt))] if system_prompt else []
        masked = [_user(self._mask(content)) for content in user]
        return self._first_that_renders([*messages, *masked], [*messages, _joined(masked)])

    def _render_delta(self, user: tuple[str, ...]) -> str:
        marker = f"reply-{secrets.token_hex(16)}"
        before = [_user("question"), {"role": "assistant", "content": marker}]
        masked = [_user(self._mask(content)) for content in user]
        text = self._first_that_renders([*before, *masked], [*before, _joined(masked)])
        _, found, after = text.rpartition(marker)
        if not found:
            raise ModelUnusable("The model's chat template does not show the assistant's replies.")
        return after

    def _first_that_renders(self, messages: list[Message], joined: list[Message]) -> str:
        try:
            return self._render(self._fold_system(messages))
        except TemplateRefused:
            if messages == joined:
                raise
            return self._render(self._fold_system(joined))  # this template wants the roles to alternate

    def _fold_system(self, messages: Sequence[Message]) -> list[Message]:
        if self._takes_system or len(messages) < 2 or messages[0]["role"] != "system":
            return list(messages)
        system, first, *rest = messages
        return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *rest]

    @cached_property
    def _takes_system(self) -> bool:
        marker = f"system-{secrets.token_hex(16)}"
        try:
            return marker in self._render([_system(marker), _user("question")])
        except TemplateRefused:
            return False


def _system(content: str) -> Message:
    return {"role": "system", "content": content}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _joined(messages: Sequence[Message]) -> Message:
    return _user("\n\n".join(message["content"] for message in messages))


def _failed_empty(message: MessageView) -> bool:
    """Whether a reply left nothing behind: it never got a token, or lost all of them."""
    return message.role == "assistant" and not message.content and not message.token_ids


def _kept(path: Sequence[MessageView]) -> Iterable[int]:
    """Ends of the sub-paths whose last message is part of the prompt: all but unanswered pairs."""
    for index, message in enumerate(path):
        followed = index + 1 < len(path)
        if _failed_empty(message) and followed:
            continue
        if message.role == "user" and followed and _failed_empty(path[index + 1]) and index + 2 < len(path):
            continue
        yield index + 1


def shown_starts(path: Sequence[MessageView]) -> list[int]:
    """Where in a path a prompt may begin: the user messages that are part of it, in order."""
    return [end - 1 for end in _kept(path) if path[end - 1].role == "user"]


def split_unanswered(path: Sequence[MessageView]) -> tuple[list[MessageView], Sequence[MessageView]]:
    """(trailing user messages that got no reply, the path up to the last reply with something in it)."""
    waiting: list[MessageView] = []
    end = len(path)
    while end and (path[end - 1].role == "user" or _failed_empty(path[end - 1])):
        end -= 1
        if path[end].role == "user":
            waiting.insert(0, path[end])
    return waiting, path[:end]
