"""From the messages of another program to a tree as it is kept here: users' messages and replies in turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.generation import MAX_CONTENT
from db.transfer import NewTurn
from db.views import Role

BETWEEN = "\n\n"
_GROWTH = 2
_FREE_BYTES = 1_000_000
MAX_MESSAGES_IN_ALL = 100_000


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


class Budget:
    """What a whole file may amount to once its messages are merged: a branching run repeats its beginning.

    file_bytes: the file's size. Its text may grow to twice that and one million bytes (UTF-8).
    """

    def __init__(self, file_bytes: int) -> None:
        self._most = _GROWTH * file_bytes + _FREE_BYTES
        self._bytes = self._messages = 0

    def take(self, size: int) -> None:
        """Count a message of `size` bytes. Raises NotATree when that is too much."""
        self._bytes += size
        self._messages += 1
        if self._bytes > self._most:
            raise NotATree(
                "messages of one side that follow each other are merged, each branch with the text before "
                f"it, and with that the file would grow to more than {self._most} bytes"
            )
        if self._messages > MAX_MESSAGES_IN_ALL:
            raise NotATree(f"with it the file has more than {MAX_MESSAGES_IN_ALL} messages")


@dataclass(frozen=True, slots=True)
class _Run:
    """The end of a run of messages of one role: the text of one message, and the run before it."""

    text: str
    before: "_Run | None"
    size: int

    def whole(self) -> str:
        """The run's text, joined where a message is made of it: a long run is not copied at each step."""
        texts: list[str] = []
        run: _Run | None = self
        while run is not None:
            texts.append(run.text)
            run = run.before
        return BETWEEN.join(reversed(texts))


def _longer(run: _Run | None, text: str) -> _Run | None:
    """The run with one more message; an empty one adds nothing."""
    if not text:
        return run
    size = len(text.encode("utf-8", "surrogatepass"))
    return _Run(text, run, size if run is None else run.size + len(BETWEEN) + size)


def chain(messages: Sequence[tuple[Role, str]]) -> list[Node]:
    """Messages that follow each other."""
    return [Node(role, text, place - 1 if place else None) for place, (role, text) in enumerate(messages)]


def build(
    nodes: Sequence[Node], budget: Budget, active: int | None = None
) -> tuple[tuple[NewTurn, ...], int | None]:
    """(messages, parents first; the place of `active` among them).

    Messages of one role that follow each other become one; where such a run branches, its branches share the
    beginning. A reply that nothing comes before gets an empty message to answer, and a message that nothing
    follows an empty reply, to be made or to be passed over. Raises NotATree, also when `budget` is used up.
    """
    children: list[list[int]] = [[] for _ in nodes]
    roots: list[int] = []
    for place, node in enumerate(nodes):
        (roots if node.parent is None else children[node.parent]).append(place)

    out: list[NewTurn] = []
    where: dict[int, int] = {}
    seen = 0
    # (node, the run before it, place of the message that the run follows), in order
    waiting: list[tuple[int, _Run | None, int | None]] = [(root, None, None) for root in reversed(roots)]
    while waiting:
        place, before, follows = waiting.pop()
        seen += 1
        node = nodes[place]
        run = _longer(before, node.text)
        below = children[place]
        if not below or any(nodes[child].role != node.role for child in below):
            budget.take(run.size if run else 0)
            if node.role == "assistant" and follows is None:
                budget.take(0)
                out.append(NewTurn("user", "", None, created_at=node.created_at))
                follows = len(out) - 1
            text = run.whole() if run else ""
            if len(text) > MAX_CONTENT:
                raise NotATree(
                    "messages of one side that follow each other are merged, and one would be longer than "
                    f"{MAX_CONTENT} characters"
                )
            out.append(
                NewTurn(node.role, text, follows, node.status, node.model, node.rating, node.created_at)
            )
            where[place] = len(out) - 1
        if node.role == "user" and not below:
            budget.take(0)
            # Without a reply there would be nothing to answer: one that was stopped before its first word.
            out.append(NewTurn("assistant", "", len(out) - 1, "stopped", created_at=node.created_at))
        for child in reversed(below):
            goes_on = nodes[child].role == node.role
            waiting.append((child, run, follows) if goes_on else (child, None, where[place]))
    if seen < len(nodes):
        raise NotATree("its messages refer to each other in a circle")
    while active is not None and active not in where:  # it went into a message below it
        active = children[active][-1]
    return tuple(out), None if active is None else where[active]
