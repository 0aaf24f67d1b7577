"""Files in and out, without a server: every format, and everything that is wrong with one."""

# ruff: noqa: E501 - a table of mistakes, one a line
from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.transfer import reading, tree
from app.transfer.importing import understand
from app.transfer.names import disposition, file_name
from app.transfer.reading import BadImport
from app.transfer.tree import Budget, Node, build, chain
from db.transfer import NewConversation, _check


def read(content: Any) -> list[NewConversation]:
    return list(understand(json.dumps(content).encode()).conversations)


def lines(conversation: NewConversation) -> list[tuple[str, str, int | None]]:
    return [(turn.role[0], turn.content, turn.parent) for turn in conversation.messages]


HELLO = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def test_sharegpt() -> None:
    turns = [{"from": "system", "value": "Be kind."}, *HELLO, {"from": "human", "value": "Bye"}]
    (made,) = read([{"id": "1", "title": "T", "conversations": turns}])
    assert (made.title, made.system_prompt) == ("T", "Be kind.")
    assert lines(made) == [("u", "Hi", None), ("a", "Hello", 0), ("u", "Bye", 1), ("a", "", 2)]
    assert made.messages[-1].status == "stopped"  # waits for its reply
    assert read({"conversations": HELLO})[0].messages == read([{"conversations": HELLO}])[0].messages
    text = "\n".join(json.dumps({"conversations": HELLO, "system": "S"}) for _ in range(3)) + "\n"
    assert [made.system_prompt for made in understand(text.encode()).conversations] == ["S"] * 3


def test_openai_messages() -> None:
    source = {
        "messages": [
            {"role": "developer", "content": "One."},
            {"role": "system", "content": "Two."},
            {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image_url"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "It is 42."},
        ]
    }
    understood = understand(json.dumps(source).encode())
    assert understood.conversations[0].system_prompt == "One.\n\nTwo."
    assert lines(understood.conversations[0]) == [("u", "Look", None), ("a", "It is 42.", 0)]
    assert understood.skipped == 2


def chatgpt_node(role: str, text: str, parent: str | None, **more: Any) -> dict[str, Any]:
    content = {"content_type": "text", "parts": [text]}
    message = {"author": {"role": role}, "content": content, "recipient": "all", "create_time": 12.5}
    return {"message": message | more, "parent": parent}


def test_chatgpt_with_branches_tools_and_hidden_messages() -> None:
    mapping = {
        "a1": chatgpt_node("assistant", "First", "u1"),  # before its parent
        "root": {"message": None, "parent": None},
        "sys": chatgpt_node("system", "", "root"),
        "u1": chatgpt_node("user", "Hi", "sys"),
        "call": chatgpt_node("assistant", "search()", "u1", recipient="browser"),
        "tool": chatgpt_node("tool", "result", "call"),
        "a2": chatgpt_node("assistant", "Second", "tool"),
        "u2": chatgpt_node("user", "Thanks", "a2"),
    }
    source = {
        "title": "Talk",
        "mapping": mapping,
        "current_node": "a1",
        "create_time": 1.0,
        "is_archived": True,
    }
    understood = understand(json.dumps([source]).encode())
    (made,) = understood.conversations
    assert (made.title, made.archived, made.created_at) == ("Talk", True, 1000)
    assert lines(made) == [
        ("u", "Hi", None),
        ("a", "First", 0),
        ("a", "Second", 0),
        ("u", "Thanks", 2),
        ("a", "", 3),
    ]
    assert made.active is not None
    assert made.messages[made.active].content == "First"
    assert made.messages[0].created_at == 12_500
    assert understood.skipped == 2


def own(**changes: Any) -> dict[str, Any]:
    message = {"id": "1", "parent_id": None, "role": "user", "content": "Hi", "status": "complete"}
    reply = {
        "id": "2",
        "parent_id": "1",
        "role": "assistant",
        "content": "Hm",
        "status": "streaming",
        "rating": -1,
    }
    return {
        "format": "tangram-chat/1",
        "conversations": [{"title": "T", "messages": [message, reply], **changes}],
    }


def test_our_own() -> None:
    (made,) = read(own(settings={"top_p": 0.5}, active_leaf_id="2", archived_at=5))
    assert lines(made) == [("u", "Hi", None), ("a", "Hm", 0)]
    assert (made.messages[1].status, made.messages[1].rating) == ("interrupted", -1)
    assert (made.settings, made.active, made.archived) == ({"top_p": 0.5}, 1, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\xff\xfe", "UTF-8"),
        (b"{", "not JSON"),
        (b'{"messages": []}\n{"messages": ', "Line 2"),
        (b"[" * 100_000, "too deeply"),
        (b"7", "must hold"),
        (b"[]", "no conversations"),
        (b"[7]", "Conversation 1: must be a JSON object"),
        (b"{}", "is not one of"),
        ({"format": "other/2", "conversations": []}, "other/2"),
        ({"conversations": 3}, "“conversations” must be a list"),
        ([{"conversations": HELLO}, {"title": "B", "conversations": [{"from": "Bob", "value": "x"}]}], "Conversation 2 “B”, message 1: “from” must be one of"),
        ([{"conversations": [{"from": "gpt", "value": {"a": 1}}]}], "Conversation 1, message 1: “value” must be text"),
        ([{"messages": [{"role": "user", "content": [3]}]}], "message 1: a part of the content"),
        ([{"messages": [{"role": "user", "content": "x" * 400_001}]}], "longer than 400000"),
        ([{"messages": ["x"]}], "message 1: must be a JSON object"),
        ([{"messages": [{}] * 20_001}], "more than 20000"),
        ([{"mapping": []}], "“mapping” must be"),
        ([{"mapping": {"a": chatgpt_node("user", "x", "gone")}}], "“parent” and “current_node”"),
        ([{"mapping": {"a": chatgpt_node("user", "x", "b"), "b": chatgpt_node("assistant", "x", "a")}}], "circle"),
        ([{"mapping": {"a": {"message": None, "parent": "a"}, "b": chatgpt_node("user", "x", "a")}}], "circle"),
        ([{"mapping": {"a": {"message": {"author": 1, "content": 2}}}}], "“author” and “content”"),
        (own(messages=[{"id": "1", "role": "user", "parent_id": "2"}]), "“parent_id”"),
        (own(messages=[{"id": "1", "role": "user"}, {"id": "1", "role": "user"}]), "message 2: “id”"),
        (own(messages=[{"id": "1", "role": "root"}]), "“role”"),
        (own(settings={"temperature": 99}), "temperature must be a number from 0 to 2"),
        (own(settings=[]), "“settings” must be"),
        (own(title="x" * 201), "“title” is longer"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(content: Any, words: str) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(BadImport) as refused:
        understand(data)
    assert words in str(refused.value)
    assert str(refused.value).endswith("Nothing was imported.")


def test_too_many_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.transfer.importing.MAX_CONVERSATIONS", 2)
    with pytest.raises(BadImport, match="more than 2 conversations"):
        read([{"conversations": HELLO}] * 3)


def test_times_that_are_none() -> None:
    for value in (None, True, "x", float("nan"), float("inf"), -1, 1e300):
        assert reading.milliseconds(value, 1000) is None
    assert reading.milliseconds(1.5, 1000) == 1500


def test_runs_of_one_role_become_one_message() -> None:
    nodes = chain(
        [("assistant", "Welcome"), ("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")]
    )
    made, _ = build(nodes, Budget(0))
    assert [(turn.role[0], turn.content) for turn in made] == [
        ("u", ""), ("a", "Welcome"), ("u", "a\n\nb"), ("a", "c\n\nd"),
    ]  # fmt: skip


def test_a_run_that_branches_keeps_both_branches() -> None:
    nodes = [Node("user", "a", None), Node("user", "b", 0), Node("assistant", "r", 0), Node("user", "c", 1)]
    made, active = build(nodes, Budget(0), active=1)
    assert [(turn.content, turn.parent) for turn in made] == [
        ("a", None),
        ("a\n\nb\n\nc", None),
        ("", 1),
        ("r", 0),
    ]
    assert active is not None
    assert made[active].content == "a\n\nb\n\nc"


def own_tree(title: str, *messages: tuple[str, str | None, str, str]) -> dict[str, Any]:
    names = ("id", "parent_id", "role", "content")
    return {"title": title, "messages": [dict(zip(names, each, strict=True)) for each in messages]}


def test_a_file_cannot_blow_up() -> None:
    """A long message that 150 others of its side follow would be stored 150 times."""
    fans = [
        own_tree(
            f"fan {number}",
            ("r", None, "user", "x" * 10_000),
            *((f"{place}", "r", "user", "y") for place in range(count)),
        )
        for number, count in enumerate((30, 30, 150), start=1)
    ]
    file = {"format": "tangram-chat/1", "conversations": fans}
    with pytest.raises(BadImport, match=r"^Conversation 3 “fan 3”: messages .* grow to more"):
        read(file)  # the bound is that of the whole file
    assert len(read(file | {"conversations": fans[:2]})) == 2


def test_a_file_cannot_hold_any_number_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_MESSAGES_IN_ALL", 5)
    assert len(read([{"conversations": HELLO}] * 2)) == 2
    with pytest.raises(BadImport, match="Conversation 3: with it the file has more than 5 messages"):
        read([{"conversations": HELLO}] * 3)


def test_a_run_is_no_longer_than_a_message() -> None:
    turns = [{"from": "human", "value": "x" * 250_000}] * 2
    with pytest.raises(BadImport, match="one would be longer than 400000 characters"):
        read([{"conversations": turns}])


def test_a_long_run_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined at each step, these 20 MB would be copied ten thousand times: minutes instead of a moment."""
    monkeypatch.setattr(tree, "MAX_CONTENT", 30_000_000)
    nodes = chain([("user", "x" * 1000)] * 20_000)
    started = time.process_time()
    made, _ = build(nodes, Budget(20_000_000))
    assert len(made[0].content) == 20_000 * 1002 - 2
    assert time.process_time() - started < 5


@st.composite
def forests(draw: st.DrawFn) -> list[Node]:
    count = draw(st.integers(0, 30))
    nodes = []
    for place in range(count):
        parent = draw(st.one_of(st.none(), st.integers(0, place - 1))) if place else None
        nodes.append(Node(draw(st.sampled_from(["user", "assistant"])), f"m{place}", parent))
    return nodes


@given(forests())
def test_what_is_built_is_always_a_conversation_and_loses_nothing(nodes: list[Node]) -> None:
    for active in (None, *range(len(nodes))):
        messages, leaf = build(nodes, Budget(0), active)
        _check(NewConversation("t", messages, active=leaf))
        assert (leaf is None) == (active is None)
    said = {word for turn in messages for word in turn.content.split()}
    assert said == {node.text for node in nodes}


# Names of files.

EVIL = [
    "../../etc/passwd",
    "..\\..\\x",
    "/etc/passwd",
    "C:\\x",
    ".",
    "..",
    "",
    "\0",
    "a\nb",
    "con",
    "x" * 500,
    "….",
    "a/b",
]


@pytest.mark.parametrize("title", EVIL)
def test_a_title_never_leads_out_of_the_folder(title: str) -> None:
    name = file_name(title, "md")
    check_name(name)


@given(st.text(max_size=100))
def test_no_text_leads_out_of_the_folder(title: str) -> None:
    check_name(file_name(title, "md"))
    header = disposition(file_name(title, "md"))
    assert header.isascii()
    assert not set(header) & {"\r", "\n", "\0"}
    assert header.count('"') == 2


def check_name(name: str) -> None:
    stem, dot, ending = name.rpartition(".")
    assert (dot, ending) == (".", "md")
    assert stem
    assert not set(name[: -len(ending) - 1]) & set('/\\.:*?<>|"\0\r\n' + "".join(map(chr, range(32))))
    assert len(name) < 100
    assert stem.lower() not in {"con", "nul", "com1"}


def test_names_are_kept_apart_and_readable() -> None:
    taken: set[str] = set()
    names = [file_name(title, "md", taken) for title in ("Plan", "plan", "Plan?", "北京的天气", "Grüße: C++")]
    assert names == ["Plan.md", "plan (2).md", "Plan (3).md", "北京的天气.md", "Grüße C++.md"]
    assert "filename*=UTF-8''%E5%8C%97" in disposition(names[3])
