"""The console's page: memory, tuning, profiles, engine."""

from __future__ import annotations

import gradio as gr

from admin import engine_tab, memory_tab, profiles_tab, top, tune_tab
from admin.console import Console
from admin.guarded import guarded
from admin.sampler import INTERVAL_SECONDS

SLOW_SECONDS = 10.0


def build_admin(console: Console) -> gr.Blocks:
    """The page as Gradio Blocks; every handler checks the caller again."""
    with gr.Blocks(title="Tangram Chat · Admin", analytics_enabled=False, fill_width=True) as page:
        head = top.build(console)
        with gr.Tabs():
            with gr.Tab("Memory", id="memory"):
                memory = memory_tab.build(console)
            with gr.Tab("Tune", id="tune"):
                tune = tune_tab.build(console)
            with gr.Tab("Profiles", id="profiles"):
                profiles = profiles_tab.build(console)
            with gr.Tab("Engine", id="engine"):
                engine = engine_tab.build(console)
        always = [*head.outputs, *tune.live_outputs, *profiles.live_outputs]
        quick = [*always, *memory.quick_outputs, *engine.live_outputs]
        slow = [memory.over_time]
        seen = gr.State(-1)

        async def refresh(number: int, view: str) -> list[object]:
            now = console.renderer.number
            fresh = [*memory.quick(view), *engine.live()]
            drawn = fresh if now != number else [gr.skip() for _ in fresh]
            return [now, *head.values(), *tune.live(), *await profiles.live(), *drawn]

        async def refresh_slowly() -> str:
            return console.renderer.pool_over_time()

        async def refresh_all(view: str) -> list[object]:
            return [*await refresh(-1, view), await refresh_slowly()]

        hidden = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
        check = console.access
        gr.Timer(INTERVAL_SECONDS).tick(
            guarded(check, refresh), [seen, memory.view], [seen, *quick], trigger_mode="once", **hidden
        )
        gr.Timer(SLOW_SECONDS).tick(guarded(check, refresh_slowly), None, slow, trigger_mode="once", **hidden)
        page.load(guarded(check, refresh_all), [memory.view], [seen, *quick, *slow], **hidden)
        page.load(guarded(check, tune.first_values), None, tune.form, **hidden)
    page.queue(max_size=200, default_concurrency_limit=8)
    return page
