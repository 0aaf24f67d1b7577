"""What a calibration has found so far, kept in a file, so that it can be stopped and go on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Table = list[list[float]]


@dataclass(frozen=True)
class Found:
    """What one sample told.

    Attributes:
        needs: [retentions][layers][kv_heads], by the oracle.
        keys: [layers][kv_heads], by the keys alone (:mod:`tangram.key_needs`).
        queries: [layers][kv_heads][head_size], what was asked on average; None where that is not known.
    """

    needs: list[Table]
    keys: Table
    queries: list[Table] | None = None


@dataclass
class State:
    """What was found by sample, each written as soon as it is known: one JSON line each, behind one that says
    what they depend on.

    Attributes:
        settings: all that a sample's needs depend on, beside the sample.
        found: by :attr:`tangram.calibration.samples.Sample.key`.
    """

    path: Path
    settings: dict[str, Any]
    found: dict[str, Found] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any]) -> tuple[State, str]:
        """The state in a file, or a new one.

        Returns:
            It, and a sentence if what the file held was of no use, else "".
        """
        state, why = cls(path, settings), ""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            before = json.loads(lines[0])
            changed = sorted(
                name for name in before.keys() | settings.keys() if before.get(name) != settings.get(name)
            )
            if changed:
                why = f"{path} was made with other settings ({', '.join(changed)})"
            else:
                state.found = _entries(lines[1:])
        except FileNotFoundError:
            pass
        except (ValueError, IndexError, AttributeError, KeyError, TypeError):
            why = f"{path} is damaged"
        if why:  # hours of work may be in it, and the change a slip
            old = path.replace(path.with_name(path.name + ".old"))
            why += f": starting anew, it is kept as {old}"
        state._rewrite()
        return state, why

    def add(self, key: str, found: Found) -> None:
        """Remember what a sample told, on disk too."""
        self.found[key] = found
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(key, found))
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file: the result is complete."""
        self.path.unlink(missing_ok=True)

    def _rewrite(self) -> None:
        text = json.dumps(self.settings) + "\n" + "".join(_line(*entry) for entry in self.found.items())
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.path)


def _line(key: str, found: Found) -> str:
    return json.dumps({"sample": key} | asdict(found)) + "\n"


def _entries(lines: list[str]) -> dict[str, Found]:
    """Samples up to the first line that is not whole: the process may have been killed as it wrote."""
    found: dict[str, Found] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            break
        found[entry["sample"]] = Found(entry["needs"], entry["keys"], entry["queries"])
    return found
