"""Untrusted text: what reaches the browser's Markdown renderer, and what comes back from the edit box."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.ui.markdown import safe_message, safe_reply, typed_message

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
        ("a lone ` tick then <b>", "a lone ` tick then &lt;b>"),
        ("`not closed\n\n<b> `", "`not closed\n\n&lt;b> `"),
        ("```html\n<b>![x](y)\n```\n<b>", "```html\n<b>![x](y)\n```\n&lt;b>"),
        ("~~~\n<b>\n```\n<i>\n~~~\n<u>", "~~~\n<b>\n```\n<i>\n~~~\n&lt;u>"),
        ("```python\n<b> still writing", "```python\n<b> still writing"),
        ("```mermaid\ngraph TD\n```", "```text\ngraph TD\n```"),
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
        return words.replace("!", "").replace("text", "mermaid")

    assert essence(safe_reply(text).replace("&lt;", "<")) == essence(text)


@given(MARKUP)
def test_an_edited_message_comes_back_as_typed(text: str) -> None:
    assert typed_message(safe_message(text)) == text


@pytest.mark.parametrize("text", ["<b>x</b>", "![a](b)", "# not a heading", "```mermaid\ngraph TD\n```"])
def test_a_message_shows_as_typed(text: str) -> None:
    assert safe_message(text) != text
    assert typed_message(safe_message(text)) == text
