"""From the messages of another program to a tree as it is kept here: users' messages and replies in turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from db.transfer import NewTurn
from db.views import Role

BETWEEN = "\n\n"
MAX_CHARACTERS = 64_000_000


@dataclass(slots=True)
class Node:
    """A message as it was read. `parent`: place in the list of the message before it, in any order."""

    role: Role
    text: str
    parent: int | None
    status: str = "complete"
    model: str | None = None
    rating: int | None = None
    created_at: int | None = None


class NotATree(ValueError):
    """What the messages make together cannot be taken in."""


def chain(messages: Sequence[tuple[Role, str]]) -> list[Node]:
    """Messages that follow each other."""
    return [Node(role, text, place - 1 if place else None) for place, (role, text) in enumerate(messages)]


def build(nodes: Sequence[Node], active: int | None = None) -> tuple[tuple[NewTurn, ...], int | None]:
    """(messages, parents first; the place of `active` among them).

    Messages of one role that follow each other become one; where such a run branches, its branches share the
    beginning. A reply that nothing comes before gets an empty message to answer, and a message that nothing
    follows an empty reply, to be made or to be passed over. Raises NotATree.
    """
    children: list[list[int]] = [[] for _ in nodes]
    roots: list[int] = []
    for place, node in enumerate(nodes):
        (roots if node.parent is None else children[node.parent]).append(place)

    out: list[NewTurn] = []
    where: dict[int, int] = {}
    seen = characters = 0
    # (node, text of the run before it, place of the message that the run follows), in order
    waiting: list[tuple[int, str, int | None]] = [(root, "", None) for root in reversed(roots)]
    while waiting:
        place, before, follows = waiting.pop()
        seen += 1
        node = nodes[place]
        text = f"{before}{BETWEEN}{node.text}" if before and node.text else before or node.text
        below = children[place]
        if not below or any(nodes[child].role != node.role for child in below):
            if node.role == "assistant" and follows is None:
                out.append(NewTurn("user", "", None, created_at=node.created_at))
                follows = len(out) - 1
            out.append(
                NewTurn(node.role, text, follows, node.status, node.model, node.rating, node.created_at)
            )
            where[place] = len(out) - 1
            characters += len(text)
            if characters > MAX_CHARACTERS:
                raise NotATree(f"it would be longer than {MAX_CHARACTERS} characters")
        if node.role == "user" and not below:
            # Without a reply there would be nothing to answer: one that was stopped before its first word.
            out.append(NewTurn("assistant", "", len(out) - 1, "stopped", created_at=node.created_at))
        for child in reversed(below):
            goes_on = nodes[child].role == node.role
            waiting.append((child, text, follows) if goes_on else (child, "", where[place]))
    if seen < len(nodes):
        raise NotATree("its messages refer to each other in a circle")
    while active is not None and active not in where:  # it went into a message below it
        active = children[active][-1]
    return tuple(out), None if active is None else where[active]
