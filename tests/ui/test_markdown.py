"""Untrusted text: what reaches the browser's Markdown renderer, and what comes back from the edit box."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from app.ui.markdown import safe_message, safe_reply, typed_message

COMMONMARK = MarkdownIt("commonmark").enable("table")
IMAGE = "![x](http://evil/x)"
SPACES = [
    "\n",
    "\n\n",
    "\n \n",
    "\r",
    "\r\n",
    "\u2028",
    "\x0c",
    "\x85",
    "\x0b",
    "\t",
    " ",
    "  ",
    "    ",
    "\n  ",
    "\n    ",
]
MARKS = ["`", "``", "```", "~~~", "mermaid", "\\", "- ", "1. ", "> ", "# ", "|", "\n| a | b |\n|---|---|\n"]
LIVE = [IMAGE, "!", "<img src=http://evil>", "<!--", "[a](", "[a][", "[`]: /u\n", ")", "]", "a", "'"]
PIECES = st.lists(st.sampled_from(SPACES + MARKS + LIVE), max_size=14).map("".join)
MARKUP = st.text(alphabet="<>!/[]()`~#\n abcimgmermaid\"='-", max_size=200)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain **bold** text", "plain **bold** text"),
        ("<script>alert(1)</script>", "&lt;script>alert(1)&lt;/script>"),
        ("a <img src=x onerror=alert(1)> b", "a &lt;img src=x onerror=alert(1)> b"),
        ("<!-- hidden -->", "&lt;!-- hidden -->"),
        ("1 < 2 and a <b", "1 < 2 and a &lt;b"),
        ("![pixel](https://example.org/p.png)", "[pixel](https://example.org/p.png)"),
        ("[link](https://example.org)", "[link](https://example.org)"),
        ("use `<b>` and ``a ` <i>``", "use `<b>` and ``a ` <i>``"),
        ("a lone ` tick then <b>", "a lone ` tick then <\u200bb>"),
        ("`not closed\n\n<b> `", "`not closed\n\n&lt;b> `"),
        ("```html\n<b>![x](y)\n```\n<b>", "```html\n<b>![x](y)\n```\n&lt;b>"),
        ("~~~\n<b>\n```\n<i>\n~~~\n<u>", "~~~\n<b>\n```\n<i>\n~~~\n&lt;u>"),
        ("```python\n<b> still writing", "```python\n<b> still writing"),
        ("```mermaid\ngraph TD\n```", "```text\ngraph TD\n```"),
        ("!![x](y)", "[x](y)"),
        ("- a\n  ```\n  <b>\n  ```\n- <b>", "- a\n  ```\n  <b>\n  ```\n- &lt;b>"),
        ("- ```mermaid\n  a\n  ```", "- ```text\n  a\n  ```"),
        ("> ~~~ mermaid\n> a", "> ~~~ text\n> a"),
        ("see [a](http://b/c) and `<b>`", "see [a](http://b/c) and `<b>`"),
        ("``` Mermaid\ngraph TD\n```", "``` text\ngraph TD\n```"),
    ],
)
def test_reply(text: str, shown: str) -> None:
    assert safe_reply(text) == shown


@given(MARKUP)
def test_no_tag_or_image_is_left_outside_code(text: str) -> None:
    without_ticks = text.replace("`", "").replace("~", "")
    shown = safe_reply(without_ticks)
    assert "![" not in shown
    assert not any(shown[i] == "<" and shown[i + 1 : i + 2].isalpha() for i in range(len(shown)))


@given(MARKUP)
def test_a_reply_loses_no_text(text: str) -> None:
    def essence(words: str) -> str:
        return words.replace("!", "").replace("text", "mermaid").replace("\u200b", "")

    assert essence(safe_reply(text).replace("&lt;", "<")) == essence(text)


@pytest.mark.parametrize(
    "text",
    [
        f"\\`{IMAGE}\\`",
        f"`a\n \t\n{IMAGE} `",
        f"`a\nb` {IMAGE} `",
        f"```\n```\u2028{IMAGE}\n",
        f"a\x0c```\n{IMAGE}\n",
        f"a\x85```\n{IMAGE}\n",
        f"- a\n  ```\n{IMAGE}",
        f"- ```\n  a\n  ```\n  {IMAGE}",
        f"a\n    ```\n    {IMAGE}",
        f"[a](`) {IMAGE} `",
        f"| a | b |\n|---|---|\n| `a | {IMAGE}` |",
        f"```mermaid\n\n{IMAGE}\n\n```",
        f"!{IMAGE}",
        "- ```mermaid\n  graph TD",
        "1. > ~~~ mermaid\n",
        "- [ ] ```mermaid",
        "```mer&#109;aid\n```",
        "`a\n<!--\n` -->",
    ],
)
def test_nothing_live_slips_through(text: str) -> None:
    assert live(safe_reply(text)) == []
    assert live(safe_message(text)) == []


@settings(max_examples=500)
@given(PIECES)
def test_nothing_live_is_left_outside_what_markdown_calls_code(text: str) -> None:
    assert live(safe_reply(text)) == []
    assert live(safe_message(text)) == []
    assert typed_message(safe_message(text)) == text


def live(shown: str) -> list[str]:
    """What a CommonMark parser would make live: images, HTML, diagrams."""
    found = []
    for block in COMMONMARK.parse(shown):
        if block.type == "fence" and "mermaid" in block.info.lower():
            found.append(block.info)
        for token in [block, *(block.children or [])]:
            if token.type in ("image", "html_block", "html_inline"):
                found.append(token.type)
    return found


@given(MARKUP)
def test_an_edited_message_comes_back_as_typed(text: str) -> None:
    assert typed_message(safe_message(text)) == text


@pytest.mark.parametrize("text", ["<b>x</b>", "![a](b)", "# not a heading", "```mermaid\ngraph TD\n```"])
def test_a_message_shows_as_typed(text: str) -> None:
    assert safe_message(text) != text
    assert typed_message(safe_message(text)) == text
