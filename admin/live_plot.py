"""A plotly chart that updates in place.

Gradio's own ``Plot`` builds a new chart for every value, which flickers every two seconds and forgets what
the viewer hovers over. This component hands the figure's JSON to ``Plotly.react`` on one element that stays.
"""

from __future__ import annotations

import gzip
from functools import lru_cache
from importlib import resources

import gradio as gr
import plotly
from starlette.requests import Request
from starlette.responses import Response

SCRIPT_NAME = f"plotly-{plotly.__version__}.min.js"

_JS = """
const box = element.querySelector('.live-plot');
const scroll = box.parentElement;
const css = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
const library = () => window.tangramPlotly ??= new Promise((resolve, reject) => {
  const script = document.createElement('script');
  script.src = `${window.gradio_config.root}/SCRIPT_NAME`;
  script.onload = () => resolve(window.Plotly);
  script.onerror = () => reject(new Error('the chart library did not load'));
  document.head.appendChild(script);
});
let drawn = false;
// Width of the window where it is too narrow for a chart with its colour bar beside it, or else 0.
let seen = 0;
const seenOf = (layout) => scroll.clientWidth < (layout.meta?.min_width ?? 0) ? scroll.clientWidth : 0;
async function draw() {
  if (!props.value) return;
  const Plotly = await library();
  const { data, layout } = JSON.parse(props.value);
  const { fontFamily } = getComputedStyle(document.body);
  layout.font = { ...layout.font, color: css('--tc-text'), family: fontFamily };
  const line = css('--tc-line');
  for (const axis of ['xaxis', 'yaxis']) {
    layout[axis] = { gridcolor: line, linecolor: line, zerolinecolor: line, ...layout[axis] };
  }
  layout.hoverlabel = { ...layout.hoverlabel, bgcolor: css('--tc-surface'), bordercolor: line };
  layout.hoverlabel.font = { ...layout.hoverlabel.font, color: css('--tc-text') };
  box.style.height = `${layout.height}px`;
  const before = seen;
  seen = seenOf(layout);
  box.style.minWidth = `${(seen ? layout.meta.narrow_width : layout.meta?.min_width) ?? 0}px`;
  if (seen && layout.meta.narrow_colorbar) {
    // The last number is centred on the bar's end.
    const len = seen - layout.margin.l - 24;
    Object.assign(data[0].colorbar, layout.meta.narrow_colorbar, { len });
  }
  // A colour bar that is turned in place keeps the room that it took before: then the chart is made anew.
  const anew = !drawn || seen !== before;
  if (drawn && anew) Plotly.purge(box);
  await Plotly.react(box, data, layout, { displayModeBar: false, responsive: false });
  if (anew) {
    box.on('plotly_click', ({ points }) => {
      const [point] = points;
      trigger('act', { act: 'cell', name: `${point.x} ${point.y}` });
    });
  }
  if (!drawn) {
    drawn = true;
    new ResizeObserver(() => {
      if (!box.offsetWidth) return;
      if (seenOf(box.layout) !== seen) schedule();
      else Plotly.Plots.resize(box);
    }).observe(scroll);
  }
  box.dataset.drawn = String(Number(box.dataset.drawn ?? 0) + 1);
}
let chain = Promise.resolve();
const schedule = () => { chain = chain.then(draw).catch((error) => console.error(error)); };
watch('value', schedule);
const dark = new MutationObserver(schedule);
for (const node of [document.documentElement, document.body]) {
  dark.observe(node, { attributes: true, attributeFilter: ['class'] });
}
schedule();
""".replace("SCRIPT_NAME", SCRIPT_NAME)


def live_plot(name: str, label: str, height: int) -> gr.HTML:
    """A place for figures given as ``figure.to_json()``; ``height`` pixels are reserved before the first. A
    click on a point is its event ``act``, with the point's ``x y`` as ``name``."""
    return gr.HTML(
        value="",
        html_template=(
            f'<div class="live-plot-scroll" tabindex="0" role="group" aria-label="{label}">'
            f'<div class="live-plot" id="{name}-figure" style="height:{height}px"></div></div>'
        ),
        js_on_load=_JS,
        apply_default_css=False,
        elem_id=name,
        elem_classes=["live-plot-block"],
    )


@lru_cache(maxsize=2)
def _script(compressed: bool) -> bytes:
    source = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return gzip.compress(source, 6) if compressed else source


def script_response(request: Request) -> Response:
    """The chart library that the ``plotly`` package brings, cached for good: its name holds the version."""
    compressed = "gzip" in request.headers.get("accept-encoding", "")
    headers = {"Cache-Control": "private, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    if compressed:
        headers["Content-Encoding"] = "gzip"
    return Response(_script(compressed), media_type="text/javascript", headers=headers)
