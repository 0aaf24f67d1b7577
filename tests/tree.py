"""What the tests of the repository itself share: where it is and which files belong to it."""

import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("app", "admin", "db", "tangram", "kernels")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def repository_files() -> list[Path]:
    """Every file that is or would be committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def texts(files: list[Path]) -> Iterator[tuple[Path, str]]:
    """Path and content of those that are text."""
    for path in files:
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
