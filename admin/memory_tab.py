"""Tab "Memory": which head holds what, how full the pool is, who holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from admin.access import SignedIn
from admin.console import Console
from admin.figures import MAP_VIEWS, TOKENS
from admin.guarded import guarded
from admin.live_html import live_html
from admin.live_plot import live_plot
from admin.memory_panels import map_title
from admin.panels import notice
from admin.text import bytes_text
from app.errors import AppError
from tangram.errors import TangramError


@dataclass(frozen=True)
class MemoryTab:
    """Components and their values. ``choices``: the map's view, its conversation ("": all), its tier (-1)."""

    console: Console
    choices: list[Any]
    outputs: list[Any]
    over_time: gr.HTML

    def values(self, view: str, sequence: str, tier: int) -> list[Any]:
        """Values for :attr:`outputs`."""
        renderer = self.console.renderer
        return [
            renderer.map_title(sequence),
            renderer.memory_map(view, sequence) or gr.skip(),
            renderer.tier(tier, sequence),
            renderer.pool_bar(),
            renderer.pool_table(),
            renderer.saving(),
            renderer.sequences(),
        ]


def build(console: Console) -> MemoryTab:
    """Create the components; call inside ``gr.Blocks``."""
    with gr.Column(elem_classes=["tc-panel"]):
        title = live_html("map-title")
        view = gr.Radio(
            list(MAP_VIEWS),
            value=TOKENS,
            label="Colour shows",
            show_label=False,
            container=False,
            elem_id="map-view",
            elem_classes=["segments"],
        )
        memory_map = live_plot("memory-map", "Memory by layer and KV head", 210)
        about_tier = live_html("tier")
    with gr.Row(equal_height=True, elem_classes=["two"]):
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>Page pool</h2>", apply_default_css=False)
            bar = live_plot("pool-bar", "Pages of the pool by use", 44)
            table = live_html("pool-table")
            saving = live_html("saving")
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>The last hour</h2>", apply_default_css=False)
            over_time = live_plot("pool-time", "The page pool over the last hour", 240)
    with gr.Column(elem_classes=["tc-panel"]):
        gr.HTML("<h2>Conversations by memory</h2>", apply_default_css=False)
        said = live_html("memory-said")
        sequences = live_html("sequences")
    sequence, tier = gr.State(""), gr.State(-1)
    choices = [view, sequence, tier]
    tab = MemoryTab(
        console, choices, [title, memory_map, about_tier, bar, table, saving, sequences], over_time
    )
    title.value = map_title(None)

    async def show(chosen: str, name: str, _: int) -> Any:
        return console.renderer.memory_map(chosen, name) or gr.skip()

    async def act(user: SignedIn, event: dict[str, Any], chosen: str, name: str, number: int) -> list[Any]:
        what, which = str(event.get("act", "")), str(event.get("name", ""))
        words = ""
        if what == "cell":
            number = clicked_tier(console, which)
        elif what == "untier":
            number = -1
        elif what in ("map", "whole"):
            name = which if what == "map" else ""
            console.sampler.look(name)
        elif what in ("evict", "pin", "unpin"):
            words = await changed(console, user, what, which)
        return [name, number, words, *tab.values(chosen, name, number)]

    options: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
    view.change(guarded(console.access, show), choices, [memory_map], **options)
    for part in (title, memory_map, about_tier, sequences):
        part.act(
            guarded(console.access, act, with_user=True, with_event=True),
            choices,
            [sequence, tier, said, *tab.outputs],
            **options,
        )
    return tab


def clicked_tier(console: Console, cell: str) -> int:
    """The tier of the head in a cell of the map, "LAYER HEAD"; -1 for anything else."""
    snapshot = console.sampler.latest.snapshot
    layer, _, head = cell.partition(" ")
    if snapshot is None or not (layer.isdecimal() and head.isdecimal()):
        return -1
    if int(layer) >= snapshot.layers or int(head) >= snapshot.kv_heads:
        return -1
    return int(snapshot.heads.tier[int(layer)][int(head)])


async def changed(console: Console, user: SignedIn, what: str, sequence: str) -> str:
    """Evict, pin or unpin a conversation; a notice that says what came of it."""
    owner = console.owners.of(sequence)
    whose = f"the conversation of {owner}" if owner else "the conversation"
    try:
        engine = console.engine.watching
        if what == "evict":
            freed = await engine.evict(sequence=sequence)
            snapshot = console.sampler.latest.snapshot
            size = bytes_text(freed["pages"] * snapshot.pool.page_bytes) if snapshot else ""
            gone = (
                f"Evicted {whose}: {freed['pages']:,} pages, {size}, are free. Its next turn is read again."
            )
            words = gone if freed["conversations"] else "It is not idle any more, or gone already."
        else:
            await engine.pin(sequence, what == "pin")
            words = f"{'Pinned' if what == 'pin' else 'Unpinned'} {whose}."
    except (AppError, TangramError) as error:
        return notice(str(error), "bad")
    await console.services.audit.record(user.id, f"memory.{what}", None, {"row": sequence, "owner": owner})
    console.sampler.poke()
    return notice(words, "good")
