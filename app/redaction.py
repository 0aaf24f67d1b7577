"""Takes secrets out of text that is about to be kept or shown, and tells those that are none."""

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


_PLACEHOLDER = re.compile(
    r"""(?ix)
    .*(change[\s_-]*(me|this|it)|replace[\s_-]*(me|this|with)|place[\s_-]?holder).*
    | (.*[\s_-])?(example|insert|todo|your|fixme)([\s_-].*)?
    | (a|an|my|some|the)[\s_-]+.*(key|secret|token|password)
    | (default|dummy|test|admin|root|password|passw0rd|secret|key|token|none|null|empty|abc|qwerty|letmein)
      [\s_-]*(key|secret|token|password)?\d*
    | [<\[{$%].*[>\]}%]?
    | (?P<same>.)(?P=same)*
    | (0?123)\d*
    """
)


def is_placeholder(secret: str) -> bool:
    """Whether a secret is what templates and examples put in its place, such as "changeme"."""
    return bool(secret) and _PLACEHOLDER.fullmatch(secret) is not None
