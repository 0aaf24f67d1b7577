"""HTML that changes in place, and that tells the server which of its buttons was pressed.

Gradio's own ``HTML`` replaces everything at each value: a button under the pointer is gone before the click
is over, and the keyboard's place in a table is lost once a second. This component changes what differs.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

_JS = """
const box = element.querySelector('.live-html');
function morph(old, now) {
  for (const { name, value } of [...now.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (!now.hasAttribute(name) && name !== 'open') old.removeAttribute(name);
  }
  children(old, now);
}
function children(old, now) {
  const wanted = [...now.childNodes];
  wanted.forEach((node, place) => {
    const there = old.childNodes[place];
    const key = node.dataset?.key;
    if (key) {
      // A row stays the same element wherever it moves: a click never reaches another one's button.
      const same = [...old.children].find((child) => child.dataset.key === key);
      if (!same) old.insertBefore(node, there ?? null);
      else {
        if (same !== there) old.insertBefore(same, there ?? null);
        morph(same, node);
      }
    } else if (!there) old.append(node);
    else if (there.dataset?.key) there.replaceWith(node);
    else if (there.nodeType !== node.nodeType || there.nodeName !== node.nodeName) there.replaceWith(node);
    else if (node.nodeType === Node.ELEMENT_NODE) morph(there, node);
    else if (there.data !== node.data) there.data = node.data;
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}
function show() {
  const made = document.createElement('template');
  made.innerHTML = props.value ?? '';
  children(box, made.content);
}
watch('value', show);
show();
element.addEventListener('click', (event) => {
  const target = event.target.closest('[data-act]');
  if (target) trigger('act', { act: target.dataset.act, name: target.dataset.name ?? '' });
});
"""


def live_html(name: str, **options: Any) -> gr.HTML:
    """A place for HTML with the element id ``name``. A press of ``<button data-act=.. data-name=..>`` is its
    event ``act``, with ``act`` and ``name`` as the event's data."""
    return gr.HTML(
        value="",
        html_template='<div class="live-html"></div>',
        js_on_load=_JS,
        apply_default_css=False,
        elem_id=name,
        **options,
    )


def button(act: str, name: str, label: str, *, tone: str = "", title: str = "") -> str:
    """A button of such HTML. All arguments must be escaped already."""
    told = f' title="{title}"' if title else ""
    return (
        f'<button type="button" class="act {tone}" data-act="{act}" data-name="{name}"{told}>{label}</button>'
    )
