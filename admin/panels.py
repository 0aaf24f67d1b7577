"""HTML fragments of the console: pure functions from data to markup. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from admin.snapshot import MemorySnapshot
from admin.text import (
    bytes_text,
    count_text,
    duration_text,
    latency_text,
    percent_text,
)
from app.alerts import Alert
from app.supervisor import EngineStatus
from app.ui.brand import logo_svg

CONFIG_LABELS: Mapping[str, str] = {
    "retention": "Retention",
    "chunk": "Chunk",
    "window": "Window",
    "sink": "Sink tokens",
    "page_tokens": "Tokens a page",
    "group_size": "Group size",
    "scope": "Scope",
    "scorer": "Scorer",
    "query_window": "Query window",
    "alpha": "Safety margin",
    "rewind": "Rewind",
    "profile": "Profile",
}
COUNTER_LABELS: Mapping[str, tuple[str, str]] = {
    "takeovers": ("Takeovers", "turns that continued a resident conversation"),
    "evictions": ("Evictions", "resident conversations dropped to make room"),
    "seals": ("Seals", "chunks cut down to what each head keeps"),
    "preemptions": ("Preemptions", "running replies that had to wait for memory"),
}


def notice(text: str, tone: str = "info") -> str:
    """A banner; an empty text gives nothing. ``tone`` is ``info``, ``good``, ``warn`` or ``bad``."""
    if not text:
        return ""
    return f'<div class="notice {escape(tone)}" role="status">{escape(text)}</div>'


def doing_text(status: EngineStatus) -> str:
    """What a change of the engine is at: its phase, or the check before and after."""
    return status.phase or ("checking that it finds details" if status.ready else status.state.value)


def state_pill(state: str) -> str:
    """The engine's state as a coloured label."""
    tone = {"ready": "good", "failed": "bad", "stopped": "bad", "stalled": "bad"}.get(state, "warn")
    return f'<span class="pill {tone}"><i></i>Engine {escape(state)}</span>'


def header(state: str, model: str, uptime: float | None, alerts: Sequence[Alert] = ()) -> str:
    """Title line: product, model, state, how many alerts there are, link back to the chat."""
    up = f'<span class="muted">up {duration_text(uptime)}</span>' if uptime is not None else ""
    name = f'<span class="muted model" title="{escape(model)}">{escape(model)}</span>' if model else ""
    return (
        '<header class="admin-head"><div class="brand">'
        f"{logo_svg(28)}"
        "<h1>Administration</h1></div>"
        f'<div class="head-right">{name}{up}{state_pill(state)}{_alerts_pill(alerts)}'
        '<a class="quiet" href="/">Back to the chat</a></div></header>'
    )


def _alerts_pill(alerts: Sequence[Alert]) -> str:
    count = len(alerts)
    words = "1 alert" if count == 1 else f"{count} alerts" if count else "No alerts"
    tone = "bad" if any(alert.tone == "bad" for alert in alerts) else "warn" if count else "good"
    return f'<span class="pill {tone}"><i></i>{words}</span>'


def cards(snapshot: MemorySnapshot | None, ttft: float | None, itl: float | None) -> str:
    """The numbers that an operator looks at first; dashes while there is no report yet."""
    if snapshot is None:
        return _cards(
            [(label, "–", "") for label in ("Cache in use", "Pool in use", "Conversations", "First token")]
        )
    pool = snapshot.pool
    used_pages = pool.used
    running = sum(1 for row in snapshot.sequences if row.state == "running")
    conversations = sum(1 for row in snapshot.sequences if row.state != "prefix")
    less = snapshot.less_than_full
    return _cards(
        [
            (
                "Cache in use",
                bytes_text(snapshot.used_bytes),
                f"{less} than a full cache" if less else "",
            ),
            (
                "Pool in use",
                percent_text(used_pages / pool.total) if pool.total else "–",
                f"{count_text(used_pages)} of {count_text(pool.total)} pages",
            ),
            ("Conversations", count_text(conversations), f"{running} running"),
            (
                "First token",
                latency_text(ttft),
                f"then {latency_text(itl)} a token" if itl is not None else "",
            ),
        ]
    )


def alerts_panel(alerts: Sequence[Alert]) -> str:
    """What is wrong, and what to do; empty when nothing is."""
    return "".join(
        f'<div class="notice {escape(alert.tone)}" role="alert" data-key="{escape(alert.name)}">'
        f"<b>{escape(alert.text)}</b> {escape(alert.advice)}</div>"
        for alert in alerts
    )


def _cards(items: Iterable[tuple[str, str, str]]) -> str:
    body = "".join(
        f'<div class="card"><span>{escape(label)}</span><b>{escape(value)}</b>'
        f"<small>{escape(note)}</small></div>"
        for label, value, note in items
    )
    return f'<div class="cards">{body}</div>'


def counters_panel(counters: Mapping[str, int]) -> str:
    """What the cache did since the engine started."""
    items = [(label, count_text(counters.get(key, 0)), note) for key, (label, note) in COUNTER_LABELS.items()]
    return _cards(items)


def config_table(snapshot: MemorySnapshot) -> str:
    """The running model and its cache configuration."""
    model, config = snapshot.model, snapshot.config
    shape = f"{model.get('layers')} layers × {model.get('kv_heads')} KV heads × {model.get('head_size')}"
    rows = [("Model", model.get("name")), ("Shape", shape), ("Data type", model.get("dtype"))]
    limit = model.get("max_model_len")
    if isinstance(limit, int):
        rows.append(("Context", f"{limit:,} tokens"))
    for key, label in CONFIG_LABELS.items():
        if key in config:
            rows.append((label, _config_text(key, config[key], snapshot)))
    body = "".join(f"<tr><th>{escape(label)}</th><td>{escape(str(value))}</td></tr>" for label, value in rows)
    return table("facts wide", "", body)


def _config_text(key: str, value: object, snapshot: MemorySnapshot) -> str:
    if key == "group_size" and value is None:
        return f"{snapshot.group_size} (automatic)"
    if key == "scorer" and snapshot.scorer not in ("", value):
        return f"{value} ({snapshot.scorer})"
    if key == "profile" and value is None:
        return "uniform budgets"
    if key == "retention" and isinstance(value, int | float):
        return percent_text(value)
    return str(value)


def text_table(rows: Sequence[Sequence[str]], columns: Sequence[str], name: str) -> str:
    """A small table of text cells; all but the first column are aligned right."""
    head = "".join(_cell("th", index, text) for index, text in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(_cell("td", index, text) for index, text in enumerate(row)) + "</tr>" for row in rows
    )
    return table(name, head, body)


def _cell(tag: str, index: int, text: str) -> str:
    return f"<{tag}{' class=num' if index else ''}>{escape(text)}</{tag}>"


def table(name: str, head: str, body: str) -> str:
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="table-scroll"><table class="{name}">{top}<tbody>{body}</tbody></table></div>'
