"""What a calibration has found so far, kept in a file, so that it can be stopped and go on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Table = list[list[float]]


@dataclass
class State:
    """Needs by sample, each written as soon as it is known: one JSON line each, behind one that says what
    they depend on.

    Attributes:
        settings: all that a sample's needs depend on, beside the sample.
        found: by :attr:`tangram.calibration.samples.Sample.key`, [layers][kv_heads].
    """

    path: Path
    settings: dict[str, Any]
    found: dict[str, Table] = field(default_factory=dict)

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

    def add(self, key: str, needs: Table) -> None:
        """Remember a sample's needs, on disk too."""
        self.found[key] = needs
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(key, needs))
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


def _line(key: str, needs: Table) -> str:
    return json.dumps({"sample": key, "needs": needs}) + "\n"


def _entries(lines: list[str]) -> dict[str, Table]:
    """Samples up to the first line that is not whole: the process may have been killed as it wrote."""
    found: dict[str, Table] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            break
        found[entry["sample"]] = entry["needs"]
    return found
