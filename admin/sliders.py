"""A slider beside a number field: drag it, or type a value that it does not reach.

Gradio's own slider answers a value beyond its ends with words of its own and replaces it; here the field
keeps what was typed, and the server says what is wrong with it.
"""

from __future__ import annotations

import gradio as gr

_JS = """
const slider = element.querySelector('input');
const field = () => document.querySelector(`#${slider.dataset.of} input[type=number]`);
const write = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set;
slider.addEventListener('input', () => {
  const target = field();
  if (!target) return;
  write.call(target, slider.value);
  target.dispatchEvent(new Event('input', { bubbles: true }));
  target.dispatchEvent(new Event('change', { bubbles: true }));
});
// The field's value is also set by the page itself, of which no event tells.
setInterval(() => {
  const value = field()?.value;
  if (value && document.activeElement !== slider && slider.value !== value) slider.value = value;
}, 300);
"""


def slider(name: str, label: str, low: float, high: float, step: float) -> gr.HTML:
    """A slider over the number field with the element id ``name``."""
    return gr.HTML(
        value="",
        html_template=(
            f'<input class="slider" type="range" min="{low}" max="{high}" step="{step}" data-of="{name}" '
            f'aria-label="{label}">'
        ),
        js_on_load=_JS,
        apply_default_css=False,
        elem_id=f"{name}-slider",
    )
