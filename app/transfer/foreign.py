"""Files of other programs: ShareGPT, OpenAI's chat messages, and the export of ChatGPT."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.generation import MAX_CONTENT
from app.transfer.own import MAX_SYSTEM_PROMPT
from app.transfer.reading import MAX_MESSAGES, Item, milliseconds
from app.transfer.tree import BETWEEN, Budget, Node, NotATree, build, chain
from db.transfer import NewConversation
from db.values import MAX_TITLE
from db.views import Role

_SPEAKERS: Mapping[str, Role] = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
}
_SYSTEM = frozenset({"system", "developer"})
_NOT_SHOWN = frozenset({"tool", "function", "function_call", "observation"})
"""Calls of tools and what they gave back: they are left out, and counted."""


class Reader:
    """Reads the conversations of a file. `skipped` counts the messages that were left out."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.skipped = 0

    def sharegpt(self, item: Item, source: Mapping[str, Any]) -> NewConversation:
        """{"conversations": [{"from", "value"}]}. Raises BadImport."""
        turns = item.list_of_objects(source["conversations"], "conversations")
        return self._chain(item, source, turns, "from", "value")

    def messages(self, item: Item, source: Mapping[str, Any]) -> NewConversation:
        """{"messages": [{"role", "content"}]}. Raises BadImport."""
        turns = item.list_of_objects(source["messages"], "messages")
        return self._chain(item, source, turns, "role", "content")

    def chatgpt(self, item: Item, source: Mapping[str, Any]) -> NewConversation:
        """{"mapping": {id: {"message", "parent", "children"}}, "current_node"}. Raises BadImport."""
        mapping = source["mapping"]
        if not isinstance(mapping, dict) or not all(isinstance(node, dict) for node in mapping.values()):
            raise item.refuse("“mapping” must be an object of objects")
        if len(mapping) > MAX_MESSAGES:
            raise item.refuse(f"“mapping” has more than {MAX_MESSAGES} entries")
        read: dict[str, Node] = {}
        prompts: list[str] = []
        for number, (own, entry) in enumerate(mapping.items(), start=1):
            node = self._chatgpt_node(item, number, entry.get("message"), prompts)
            if node is not None:
                read[own] = node
        places = {own: place for place, own in enumerate(read)}
        nearest = _Nearest(item, mapping, places)
        for own, node in read.items():
            node.parent = nearest.above(mapping[own].get("parent"))
        try:
            turns, active = build(
                list(read.values()), self._budget, nearest.above(source.get("current_node"))
            )
        except NotATree as error:
            raise item.refuse(str(error)) from error
        return NewConversation(
            _title(source),
            turns,
            item.text(BETWEEN.join(prompts), "system prompt", MAX_SYSTEM_PROMPT),
            active=active,
            created_at=milliseconds(source.get("create_time"), 1000),
            updated_at=milliseconds(source.get("update_time"), 1000),
            archived=source.get("is_archived") is True,
        )

    def _chain(
        self,
        item: Item,
        source: Mapping[str, Any],
        turns: Sequence[Mapping[str, Any]],
        role_name: str,
        text_name: str,
    ) -> NewConversation:
        prompts: list[str] = []
        if own := item.text(source.get("system"), "system", MAX_SYSTEM_PROMPT):
            prompts.append(own)
        said: list[tuple[Role, str]] = []
        for number, turn in enumerate(turns, start=1):
            role = turn.get(role_name)
            text = item.text(_plain(item, number, turn.get(text_name)), text_name, MAX_CONTENT, number)
            if isinstance(role, str) and role in _SPEAKERS:
                if text or _SPEAKERS[role] == "user":
                    said.append((_SPEAKERS[role], text))
                else:
                    self.skipped += 1
            elif role in _SYSTEM and not said:
                prompts.append(text)
            elif role in _SYSTEM or role in _NOT_SHOWN:
                self.skipped += 1
            else:
                raise item.refuse(f"“{role_name}” must be one of {', '.join(_SPEAKERS)}, system", number)
        try:
            messages, _ = build(chain(said), self._budget)
        except NotATree as error:
            raise item.refuse(str(error)) from error
        prompt = item.text(BETWEEN.join(filter(None, prompts)), "system prompt", MAX_SYSTEM_PROMPT)
        return NewConversation(_title(source), messages, prompt)

    def _chatgpt_node(self, item: Item, number: int, message: Any, prompts: list[str]) -> Node | None:
        """The message of a node; None when there is none to show."""
        if message is None:
            return None
        if not isinstance(message, dict):
            raise item.refuse("“message” must be an object", number)
        author, content = message.get("author"), message.get("content")
        role = author.get("role") if isinstance(author, dict) else None
        if not isinstance(content, dict) or not isinstance(role, str):
            raise item.refuse("“author” and “content” must be objects", number)
        kind = content.get("content_type")
        text = item.text(_plain(item, number, content.get("parts")), "parts", MAX_CONTENT, number).strip()
        hidden = message.get("recipient") not in ("all", None) or kind not in ("text", "multimodal_text")
        if role in _SYSTEM:
            if text:
                prompts.append(text)
            return None
        if role not in _SPEAKERS or hidden or not text:
            self.skipped += 1
            return None
        return Node(_SPEAKERS[role], text, None, created_at=milliseconds(message.get("create_time"), 1000))


class _Nearest:
    """For any node of ChatGPT's tree the nearest one above it, itself included, that is taken in."""

    def __init__(self, item: Item, mapping: Mapping[str, Any], places: Mapping[str, int]) -> None:
        self._item = item
        self._mapping = mapping
        self._places = places
        self._known: dict[str, int | None] = {}

    def above(self, own: Any) -> int | None:
        passed: list[str] = []
        found: int | None = None
        while own is not None:
            if not isinstance(own, str) or own not in self._mapping:
                raise self._item.refuse("“parent” and “current_node” must name entries of “mapping”")
            if own in self._places or own in self._known:
                found = self._places[own] if own in self._places else self._known[own]
                break
            if len(passed) > len(self._mapping):
                raise self._item.refuse("its messages refer to each other in a circle")
            passed.append(own)
            own = self._mapping[own].get("parent")
        self._known.update(dict.fromkeys(passed, found))
        return found


def _title(source: Mapping[str, Any]) -> str:
    title = source.get("title")
    return title[:MAX_TITLE] if isinstance(title, str) else ""


def _plain(item: Item, number: int, content: Any) -> Any:
    """The text of a content, which may be in parts; parts that are no text are left out."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            text = part.get("text")
            if isinstance(text, str):
                texts.append(text)
        else:
            raise item.refuse("a part of the content must be text or an object", number)
    return "\n".join(texts)
