"""The console's page. Only what the tab that is shown needs is sent to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from admin import audit_tab, engine_tab, health_tab, memory_tab, profiles_tab, top, tune_tab, users_tab
from admin.console import Console
from admin.guarded import guarded
from admin.sampler import INTERVAL_SECONDS
from app.ui.steady_queue import make_steady

SLOW_SECONDS = 10.0
MEMORY = "memory"
AT_ONCE = 40


@dataclass(frozen=True)
class Part:
    """A tab's outputs and their values. ``each_sample``: whether they change with every sample."""

    outputs: list[Any]
    values: Callable[..., Awaitable[list[Any]]]
    each_sample: bool = True


def build_admin(console: Console) -> gr.Blocks:
    """The page as Gradio Blocks; every handler checks the caller again."""
    with gr.Blocks(title="Tangram Chat · Admin", analytics_enabled=False, fill_width=True) as page:
        head = top.build(console)
        tabs: dict[str, gr.Tab] = {}

        def tab(name: str, label: str) -> gr.Tab:
            tabs[name] = gr.Tab(label, id=name, elem_id=f"tab-{name}")
            return tabs[name]

        with gr.Tabs():
            with tab(MEMORY, "Memory"):
                memory = memory_tab.build(console)
            with tab("engine", "Engine"):
                engine = engine_tab.build(console)
            with tab("tune", "Tune"):
                tune = tune_tab.build(console)
            with tab("profiles", "Profiles"):
                profiles = profiles_tab.build(console)
            with tab("users", "Users"):
                users = users_tab.build(console)
            with tab("audit", "Audit"):
                audit = audit_tab.build(console)
            with tab("health", "Health"):
                health = health_tab.build(console)
        shown, seen = gr.State(MEMORY), gr.State(-1)

        async def of_memory(view: str, sequence: str, tier: int, _: str) -> list[Any]:
            return memory.values(view, sequence, tier)

        async def of_engine(*_: Any) -> list[Any]:
            return engine.values()

        async def of_tune(*_: Any) -> list[Any]:
            return tune.live()

        async def of_profiles(*_: Any) -> list[Any]:
            return await profiles.live()

        async def of_users(*_: Any) -> list[Any]:
            return await users.values()

        async def of_audit(view: str, sequence: str, tier: int, words: str) -> list[Any]:
            return await audit.values(words)

        async def of_health(*_: Any) -> list[Any]:
            return await health.values()

        parts = {
            MEMORY: Part(memory.outputs, of_memory),
            "engine": Part(engine.outputs, of_engine),
            "tune": Part(tune.live_outputs, of_tune),
            "profiles": Part(profiles.live_outputs, of_profiles),
            "users": Part(users.outputs, of_users, each_sample=False),
            "audit": Part(audit.outputs, of_audit, each_sample=False),
            "health": Part(health.outputs, of_health, each_sample=False),
        }
        choices = [*memory.choices, *audit.choices]
        everything = [output for part in parts.values() for output in part.outputs]

        async def refresh(number: int, tab_shown: str, *chosen: Any) -> list[Any]:
            console.sampler.look(chosen[1] if tab_shown == MEMORY else "")
            now = console.renderer.number
            values: list[Any] = [now, *head.values()]
            for name, part in parts.items():
                # Jobs go on between samples; what no sample changes is looked at when the tab is opened.
                due = name == tab_shown and (
                    number == -1 or (part.each_sample and (now != number or name in ("tune", "profiles")))
                )
                values += await part.values(*chosen) if due else [gr.skip() for _ in part.outputs]
            return values

        async def refresh_slowly(tab_shown: str) -> Any:
            return console.renderer.pool_over_time() if tab_shown == MEMORY else gr.skip()

        async def refresh_all(tab_shown: str, *chosen: Any) -> list[Any]:
            return [*await refresh(-1, tab_shown, *chosen), await refresh_slowly(tab_shown)]

        def opener(name: str) -> Callable[..., Awaitable[list[Any]]]:
            async def opened(*chosen: Any) -> list[Any]:
                return [name, *await refresh(-1, name, *chosen)]

            return opened

        hidden = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
        check, outputs = console.access, [seen, *head.outputs, *everything]
        gr.Timer(INTERVAL_SECONDS).tick(
            guarded(check, refresh), [seen, shown, *choices], outputs, trigger_mode="once", **hidden
        )
        gr.Timer(SLOW_SECONDS).tick(
            guarded(check, refresh_slowly), [shown], [memory.over_time], trigger_mode="once", **hidden
        )
        for name, of in tabs.items():
            of.select(guarded(check, opener(name)), choices, [shown, *outputs], **hidden)
        page.load(guarded(check, refresh_all), [shown, *choices], [*outputs, memory.over_time], **hidden)
        page.load(guarded(check, tune.first_values), None, tune.form, **hidden)
        page.load(guarded(check, engine.first_values), None, engine.form, **hidden)
    page.queue(max_size=200, default_concurrency_limit=8)
    make_steady(page, at_once=AT_ONCE)
    return page
