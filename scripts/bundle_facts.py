"""Says what a bundle of wheels is for: Python's version and the platform.

Fails for a build of torch that needs more than the lock has.

    python scripts/bundle_facts.py WHEELS LOCK
"""

import re
import sys
import sysconfig
import zipfile
from pathlib import Path


def missing(wheels: Path) -> list[str]:
    """CUDA libraries that torch requires and that are not there: requirements.lock is for its CPU build."""
    found: set[str] = set()
    for torch in wheels.glob("torch-*.whl"):
        with zipfile.ZipFile(torch) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            metadata = archive.read(name).decode()
        found |= set(re.findall(r"^Requires-Dist: (nvidia-[\w-]+)", metadata, flags=re.M))
    there = {path.name.split("-")[0].replace("_", "-") for path in wheels.glob("*.whl")}
    return sorted(found - there)


def main(wheels: Path, lock: Path) -> int:
    """Print the facts; returns the exit status."""
    if lacking := missing(wheels):
        print(
            f"error: this build of torch needs {lacking[0]}, which {lock} does not have: name PyTorch's CPU "
            "index in TORCH_INDEX",
            file=sys.stderr,
        )
        return 1
    print(f"{sys.version_info[0]}.{sys.version_info[1]} {sysconfig.get_platform()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
