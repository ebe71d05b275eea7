"""pyproject.toml, the locks and environment.yml say the same."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKS = {"cpu": ["lab", "dev", "verify"], "cuda": ["lab", "dev", "verify", "cuda"]}


def read_lock(text: str) -> dict[str, str]:
    """Name -> version; every line must pin exactly."""
    pins = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)", line)
            assert match, f"not an exact pin: {line!r}"
            pins[canonicalize_name(match[1])] = match[2]
    return pins


def disagreements(lock: str, text: str) -> list[str]:
    pins = read_lock(text)
    wanted = [*PROJECT["dependencies"], *(r for extra in LOCKS[lock] for r in EXTRAS[extra])]
    problems = []
    for requirement in map(Requirement, wanted):
        version = pins.get(canonicalize_name(requirement.name))
        if version is None:
            problems.append(f"{requirement.name} is not in lock-{lock}.txt")
        elif version not in requirement.specifier:
            problems.append(f"{requirement} is not met by {version}")
    return problems


def lock_text(lock: str) -> str:
    return (ROOT / "requirements" / f"lock-{lock}.txt").read_text()


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_meets_pyproject(lock):
    assert disagreements(lock, lock_text(lock)) == []


@pytest.mark.parametrize("lock", LOCKS)
def test_a_changed_lock_line_is_noticed(lock):
    text = lock_text(lock)
    changed = text.replace("nvidia-cutlass-dsl==4.8.1", "nvidia-cutlass-dsl==4.8.0")
    assert changed != text
    assert disagreements(lock, changed)
    assert disagreements(lock, "\n".join(line for line in text.splitlines() if not line.startswith("pydantic==")))


def test_locks_agree_with_each_other():
    cpu, cuda = read_lock(lock_text("cpu")), read_lock(lock_text("cuda"))
    assert {name: (version, cuda.get(name)) for name, version in cpu.items() if cuda.get(name) != version} == {}


def test_the_installed_environment_is_the_lock():
    """What runs these tests is what the lock names, so a changed line fails here too."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name, pinned in read_lock(lock_text("cpu")).items():
        try:
            installed = version(name).split("+")[0]
        except PackageNotFoundError:
            installed = "absent"
        if installed != pinned:
            found[name] = (pinned, installed)
    assert found == {}


def test_environment_yml_installs_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    assert pip == ["--requirement requirements/lock-cpu.txt", "--no-deps --editable ."]
    assert {re.split("[=<>]", d)[0] for d in conda} == {"python", "pip", "make"}
    python = next(d.split("=")[1] for d in conda if d.startswith("python"))
    assert python in Requirement("python" + PROJECT["requires-python"]).specifier


def test_no_lock_names_a_host():
    for lock in LOCKS:
        assert "://" not in lock_text(lock)
