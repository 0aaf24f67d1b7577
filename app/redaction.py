"""Takes secrets out of text that is about to be kept or shown."""

from __future__ import annotations

import re

_PATTERNS = (
    re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{6,}"),
    re.compile(
        r"(?i)((?:api[_-]?key|token|secret|password|authorization|cache_salt)['\"]?\s*[=:]\s*['\"]?)(?!None\b)[^\s'\",)}\]]{6,}"
    ),
    re.compile(r"()\b(?:hf_|sk-|tc-)[A-Za-z0-9_-]{8,}"),
    re.compile(r"(://[^/\s:@]+:)[^@\s/]+(?=@)"),
)


def redact(text: str) -> str:
    """`text` with keys, tokens, passwords and URL credentials replaced by [redacted]."""
    for pattern in _PATTERNS:
        text = pattern.sub(r"\1[redacted]", text)
    return text
