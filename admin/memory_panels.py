"""HTML of the tab "Memory": pure functions from data to markup. All text is escaped."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from admin.figures import pool_uses
from admin.live_html import button
from admin.panels import table
from admin.snapshot import MemorySnapshot, Pool, SequenceRow
from admin.text import bytes_text, count_text, duration_text, percent_text, short_id

SHOWN_SEQUENCES = 25
SHOWN_HEADS = 96


def map_title(snapshot: MemorySnapshot | None, sequence: str = "", owner: str = "") -> str:
    """Heading of the heat map, which also says why it has one colour when all heads are alike.

    ``sequence``: the one conversation that it shows, "" for all; ``snapshot`` is then ``None`` if it is gone.
    """
    if sequence:
        whose = f" of {escape(owner)}" if owner else ""
        title = f"<h2>One conversation{whose} <code>{escape(short_id(sequence))}</code></h2>"
        back = button("whole", "", "Show all conversations")
        if snapshot is None or not snapshot.sequences:
            return f'{title}<p class="hint">It is not in memory, or is being read.</p>{back}'
        row = snapshot.sequences[0]
        text = (
            f"{count_text(row.tokens)} tokens in {count_text(row.pages)} pages, "
            f"{bytes_text(snapshot.used_bytes)}; a full cache would need "
            f"{bytes_text(snapshot.full_cache_bytes)}. {row.sealed_chunks} chunks are sealed."
        )
        return f'{title}<p class="hint">{text}</p>{back}'
    hint = (
        "A cell is one attention head: a column for each layer, a row for each KV head. Click for its tier."
    )
    title = f'<h2>Memory by attention head</h2><p class="hint">{hint}</p>'
    if snapshot is None or len({budget for row in snapshot.heads.budget for budget in row}) != 1:
        return title
    why = ": no calibrated profile is active" if snapshot.config.get("profile") is None else ""
    return f'{title}<p class="hint">All heads keep the same share{why}.</p>'


def tier_panel(snapshot: MemorySnapshot | None, tier: int) -> str:
    """What a tier is and which heads are in it; empty for none."""
    if snapshot is None or not 0 <= tier < len(snapshot.tier_keep):
        return ""
    members = [
        (layer, head)
        for layer, row in enumerate(snapshot.heads.tier)
        for head, of in enumerate(row)
        if of == tier
    ]
    keep = snapshot.tier_keep[tier]
    budgets = [snapshot.heads.budget[layer][head] for layer, head in members]
    pages = snapshot.heads.pages[members[0][0]][members[0][1]] if members else 0
    waste = sum(snapshot.heads.waste[layer][head] for layer, head in members)
    spread = f"{percent_text(min(budgets))} to {percent_text(max(budgets))}" if budgets else "–"
    facts = (
        f"Its {len(members)} heads share pages of {snapshot.page_tokens} tokens and keep {keep} of "
        f"{snapshot.chunk} tokens of a chunk ({percent_text(keep / max(1, snapshot.chunk))}); their own "
        f"budgets are {spread}. Now {count_text(pages)} pages, "
        f"{bytes_text(pages * snapshot.pool.page_bytes)}; "
        f"{count_text(waste)} token slots beyond the budgets."
    )
    shown = " ".join(f"<code>L{layer}·H{head}</code>" for layer, head in members[:SHOWN_HEADS])
    more = f" and {len(members) - SHOWN_HEADS} more" if len(members) > SHOWN_HEADS else ""
    return (
        f'<div class="tier"><b>Tier {tier}</b>{button("untier", "", "Close")}<p class="hint">{facts}</p>'
        f'<p class="heads">{shown}{more}</p></div>'
    )


def pool_table(pool: Pool) -> str:
    """Pages and bytes of the pool by what holds them; the dots are the colours of the bar."""
    body = "".join(
        f'<tr><td><i class="dot" style="background:{colour}"></i>{name}</td>'
        f'<td class="num">{count_text(pages)} pages</td>'
        f'<td class="num">{bytes_text(pages * pool.page_bytes)}</td>'
        f'<td class="num">{percent_text(pages / pool.total) if pool.total else "–"}</td></tr>'
        for name, pages, colour in pool_uses(pool)
    )
    return table("pool", "", body)


def saving_line(snapshot: MemorySnapshot) -> str:
    """What a full cache would need beside what is used."""
    if not snapshot.sequences:
        return '<p class="saving">No conversation holds memory now. Send a message to see it here.</p>'
    less = snapshot.less_than_full
    return (
        f'<p class="saving">A full cache would need <b>{bytes_text(snapshot.full_cache_bytes)}</b>; '
        f"used <b>{bytes_text(snapshot.used_bytes)}</b>{f' ({less})' if less else ''}.</p>"
    )


def sequences_table(
    snapshot: MemorySnapshot, owner: Callable[[str], str] = lambda _: "", limit: int = SHOWN_SEQUENCES
) -> str:
    """Sequences by memory, largest first; at most ``limit`` rows, the others summed in one line."""
    rows = sorted(snapshot.sequences, key=lambda row: (-row.pages, row.id))
    if not rows:
        return '<p class="empty">No conversation is in memory.</p>'
    page_bytes = snapshot.pool.page_bytes
    several = snapshot.engines > 1
    body = "".join(_sequence_row(row, page_bytes, owner(row.id), several) for row in rows[:limit])
    rest = rows[limit:]
    more = ""
    if rest:
        pages = sum(row.pages for row in rest)
        more = (
            f'<tr class="rest" data-key="rest"><td>and {count_text(len(rest))} more</td><td></td>'
            f'<td class="num">{count_text(sum(row.tokens for row in rest))}</td>'
            f'<td class="num">{count_text(pages)}</td>'
            f'<td class="num">{bytes_text(pages * page_bytes)}</td><td></td><td></td></tr>'
        )
    head = "<th>Owner</th><th>State</th>" + "".join(
        f'<th class="num">{name}</th>' for name in ("Tokens", "Pages", "Memory", "Idle")
    )
    return table("sequences", f"{head}<th></th>", body + more)


def _sequence_row(row: SequenceRow, page_bytes: int, owner: str, several: bool) -> str:
    tone = "good" if row.state == "running" else "calm"
    name = escape(row.id)
    who = escape(owner) if owner else f"<code>{escape(short_id(row.id))}</code>"
    pinned = ' <span class="tag used">pinned</span>' if row.pinned else ""
    where = f' <span class="tag">engine {row.engine}</span>' if several else ""
    acts = ""
    if row.state != "prefix":
        acts += button("map", name, "Map", title="The map of this conversation alone")
        pin = ("unpin", "Unpin") if row.pinned else ("pin", "Pin")
        acts += button(pin[0], name, pin[1], title="Pinned ones stay when room is made for others")
    if row.state != "running":
        acts += button("evict", name, "Evict", title="Give its pages back; its next turn reads it again")
    return (
        f'<tr data-key="{name}|{escape(row.state)}|{row.engine}"><td title="{name}">{who}</td>'
        f'<td><span class="tag {tone}">{escape(row.state)}</span>{pinned}{where}</td>'
        f'<td class="num">{count_text(row.tokens)}</td><td class="num">{count_text(row.pages)}</td>'
        f'<td class="num">{bytes_text(row.pages * page_bytes)}</td>'
        f'<td class="num">{duration_text(row.idle_seconds)}</td><td class="acts">{acts}</td></tr>'
    )
