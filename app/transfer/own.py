"""Our own JSON, as `tangram-chat/1` files hold it: all branches, ratings and settings."""

from collections.abc import Mapping
from typing import Any

from app.errors import BadRequest
from app.generation import MAX_CONTENT
from app.sampling import checked
from app.transfer.reading import Item, milliseconds
from app.transfer.tree import Budget, Node, NotATree, build
from db.transfer import NewConversation
from db.values import MAX_TITLE
from db.views import FINAL_STATUSES

MAX_SYSTEM_PROMPT = 100_000


def read(item: Item, source: Mapping[str, Any], budget: Budget) -> NewConversation:
    """A conversation of our own. Raises BadImport."""
    messages = item.list_of_objects(source.get("messages"), "messages")
    places: dict[str, int] = {}
    nodes: list[Node] = []
    for number, message in enumerate(messages, start=1):
        own, parent, role = message.get("id"), message.get("parent_id"), message.get("role")
        if not isinstance(own, str) or own in places:
            raise item.refuse("“id” must be text, and no other message's", number)
        if parent is not None and (not isinstance(parent, str) or parent not in places):
            raise item.refuse("“parent_id” must be null or the id of an earlier message", number)
        if role not in ("user", "assistant"):
            raise item.refuse("“role” must be “user” or “assistant”", number)
        rating, status = message.get("rating"), message.get("status", "complete")
        nodes.append(
            Node(
                role,
                item.text(message.get("content"), "content", MAX_CONTENT, number),
                None if parent is None else places[parent],
                # What was being written when it was exported has no more to come.
                status if status in FINAL_STATUSES else "interrupted",
                item.text(message.get("model"), "model", 1000, number) or None,
                rating if rating in (1, -1) and role == "assistant" else None,
                milliseconds(message.get("created_at"), 1),
            )
        )
        places[own] = number - 1
    leaf = source.get("active_leaf_id")
    settings = source.get("settings", {})
    if not isinstance(settings, dict):
        raise item.refuse("“settings” must be a JSON object")
    try:
        checked(settings)
        turns, active = build(nodes, budget, places.get(leaf) if isinstance(leaf, str) else None)
    except (BadRequest, NotATree) as error:
        raise item.refuse(str(error).rstrip(".")) from error
    return NewConversation(
        item.text(source.get("title"), "title", MAX_TITLE),
        turns,
        item.text(source.get("system_prompt"), "system_prompt", MAX_SYSTEM_PROMPT),
        settings,
        active,
        milliseconds(source.get("created_at"), 1),
        milliseconds(source.get("updated_at"), 1),
        bool(source.get("archived_at")),
    )
