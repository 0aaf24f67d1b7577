"""Install the libraries of a CUDA build of torch, when that is the build that the package index gave.

`requirements.lock` lists the closure of the CPU build. The CUDA build of that version needs further packages,
without which importing torch fails. Run it with the Python of the virtual environment.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement


def missing() -> list[str]:
    """What the installed torch requires here and is not installed."""
    names = []
    for line in distribution("torch").requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            try:
                distribution(requirement.name)
            except PackageNotFoundError:
                names.append(requirement.name)
    return names


def main() -> int:
    """Install what is missing; return pip's exit status."""
    if not missing():
        return 0
    torch = distribution("torch").version
    print(
        "==> The package index gave the CUDA build of torch: installing its libraries too (gigabytes).\n"
        "==> For the small CPU build start anew with PyTorch's CPU index in TORCH_INDEX.",
        file=sys.stderr,
    )
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    return subprocess.run([*command, f"torch=={torch}"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
