"""Where a result comes from: hashes of its inputs, the git state, the versions of what produced it.

Nothing here holds a host name or an absolute path, so that result files are the same wherever they are made.
"""

import ast
import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from kda_lib.lab.device import current_device


def _lab(*names: str) -> tuple[str, ...]:
    return tuple(f"kda_lib/lab/{name}.py" for name in names)


PRESENTATION = _lab("__main__", "nbtools", "progress", "report", "runner")
"""Files that present or start results and do not make them; a change to one does not make a result stale."""

ELSEWHERE = (
    "kda_lib/lab/audit/",
    "kda_lib/lab/ptx/",
    *_lab("emulation", "fma_edges", "formal", "formal_stream", "golden", "prover", "sweep"),
)
"""What commands use, whose results name it as their own library; it makes no other result stale, but see `USERS`."""

USERS = {"03_numerical_validation": ("kda_lib/lab/ptx/",), "07_unseen_architectures": ELSEWHERE}
"""Notebooks that use some of `ELSEWHERE` themselves."""

SHOWN = {"06_memory_limit": ("docs/stream_tuning.json",)}
"""Files that a notebook shows; they count as its own."""


class Script(NamedTuple):
    """What decides a result that a command makes, without a notebook.

    `files` stand in the notebook's place; one may be a pattern. `library` is what it uses of kda_lib, files and
    folders. `locked`: it runs in the environment of the lock.
    """

    files: tuple[str, ...]
    library: tuple[str, ...]
    locked: bool = True

    def own_files(self, root: Path) -> list[str]:
        """`files` with those that fit a pattern in its place; the others whether they are there or not."""
        return [name for file in self.files for name in (matching(root, file) if "*" in file else [file])]


def matching(root: Path, pattern: str) -> list[str]:
    """Files under `root` that fit a pattern, relative to it, in order."""
    return sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))


GPU_TESTS = "tests/test_*_gpu.py"
"""The files of tests that need a GPU."""

COMPILED = ("kda_lib/arch.py", "kda_lib/compile.py", "kda_lib/diagnosis.py", "kda_lib/kernels/", "kda_lib/shapes.py")

SCRIPTS = {
    "compile_matrix": Script(_lab("matrix", "sass", "scripted", "tools", "workers"), COMPILED),
    "device_tests": Script(
        (
            *_lab("device_tests", "golden", "sanitized"),
            "tests/conftest.py",
            "tests/gpu_tools.py",
            "tests/kernel_threads.py",
            GPU_TESTS,
        ),
        ("kda_lib/",),
    ),
    "dsl_matrix": Script(
        _lab("dsl_matrix", "dsl_worker", "scripted", "data/repro_fma"),
        ("kda_lib/arch.py", "kda_lib/diagnosis.py", "kda_lib/kernels/probe.py", "kda_lib/kernels/ptx.py"),
        locked=False,
    ),
    "emulation": Script(
        _lab("emulation", "fma_edges", "golden", "scripted", "workers"),
        (*COMPILED, "kda_lib/lab/ptx/", "kda_lib/reference.py"),
    ),
    "formal": Script(
        (
            *_lab("formal", "formal_stream", "golden", "prover", "ptx/mutations", "scripted", "workers"),
            "kda_lib/lab/profiles/h200.yaml",
        ),
        COMPILED,
    ),
    "golden": Script(
        _lab("golden", "scripted"),
        (*COMPILED, "kda_lib/cache.py", "kda_lib/launch.py", "kda_lib/reference.py", "kda_lib/runtime.py"),
    ),
    "skinny_sweep": Script(_lab("sweep"), ("kda_lib/",)),
    "public_ptx_audit": Script(
        (
            *_lab("audit/assembler", "audit/check", "audit/probes", "audit/probing", "audit/public"),
            *_lab("audit/reader", "audit/sources", "audit/table", "scripted", "tools"),
            "kda_lib/lab/data/ptx_table.json",
            "kda_lib/lab/data/triton_kernels.py",
        ),
        ("kda_lib/arch.py",),
        locked=False,
    ),
}

STORED_OUTPUT_TAG = "nbval-check-output"
"""The only tag of a cell that decides nothing: papermill and nbclient act on others."""

LOCKS = ("requirements/lock-cpu.txt", "requirements/lock-cuda.txt")

PACKAGES = {
    "torch": ("torch",),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "nvidia-cutlass-dsl": ("nvidia-cutlass-dsl",),
    "flashinfer": ("flashinfer-python",),
}
"""Key of `environment()` -> distributions that may provide it, the first one installed counts."""


class GitState(TypedDict):
    """`commit` is the full hash of HEAD; both are None outside a git checkout or before its first commit."""

    commit: str | None
    dirty: bool | None


def repo_root() -> Path:
    """The repository root: the folder with pyproject.toml and notebooks/ above this package, else at or above the cwd.

    Raises:
        FileNotFoundError: neither place is inside the repository.
    """
    places = [*Path(__file__).resolve().parents, Path.cwd(), *Path.cwd().parents]
    for folder in places:
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    raise FileNotFoundError("no folder with pyproject.toml and notebooks/ found; run from inside the repository")


def inputs_sha256(notebook: Path, profile: str, root: Path | None = None) -> dict[str, str]:
    """Hashes of everything that decides a notebook's result, by kind: notebook, kda_lib, profile, lock.

    Python counts by its syntax: comments, docstrings and layout do not matter. A notebook counts by its code cells and
    their tags. Other files count by their content. A name in `SCRIPTS` has no notebook file.

    Raises:
        FileNotFoundError: one of the inputs does not exist.
    """
    root = root or repo_root()
    sources = sorted(path.relative_to(root).as_posix() for path in (root / "kda_lib").rglob("*.py"))
    script = SCRIPTS.get(notebook.stem)
    library = script.library if script else ("kda_lib/",)
    own = tuple(name for name in (*library, *USERS.get(notebook.stem, ())) if name.startswith(ELSEWHERE))
    common = [name for name in sources if name.startswith(library) and not name.startswith(ELSEWHERE)]
    sources = sorted([*common, *(name for name in sources if own and name.startswith(own))])
    return {
        "notebook": _files_sha256(root, script.own_files(root)) if script else _notebook_sha256(notebook, root),
        "kda_lib": _files_sha256(root, (name for name in sources if name not in PRESENTATION)),
        "profile": _files_sha256(root, [f"kda_lib/lab/profiles/{profile}.yaml"]),
        "lock": _lock_sha256(root) if script is None or script.locked else _files_sha256(root, ()),
    }


def git_state(root: Path | None = None) -> GitState:
    """Commit and dirty flag of the repository; changes under reports/ do not count as dirty, since results go there."""
    root = root or repo_root()
    commit = _git(root, "rev-parse", "HEAD")
    top = _git(root, "rev-parse", "--show-toplevel")
    if commit is None or top is None or Path(top.strip()).resolve() != root.resolve():
        return {"commit": None, "dirty": None}
    changes = _git(root, "status", "--porcelain", "--", ".", ":(exclude)reports")
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes.strip())}


def environment() -> dict[str, str | None]:
    """Versions of python, torch, the CUDA runtime, driver, DSL and FlashInfer (None where absent), and the lock's hash.

    Versions are read from package metadata; nothing heavy is imported.
    """
    device = current_device()
    return {
        "python": platform.python_version(),
        **{key: _first_version(names) for key, names in PACKAGES.items()},
        "driver": device.driver if device else None,
        "lock": _lock_sha256(repo_root()),
    }


def _notebook_sha256(notebook: Path, root: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    tags = [sorted({*cell["metadata"].get("tags", ())} - {STORED_OUTPUT_TAG}) for cell in code]
    # nbformat allows a source as one string or as a list of lines; both must hash alike.
    sources = [_code("".join(cell["source"]).encode()).decode() for cell in code]
    # One that was deleted is left out, which is another hash.
    shown = [_files_sha256(root, [name]) for file in SHOWN.get(notebook.stem, ()) for name in matching(root, file)]
    content = [*zip(tags, sources, strict=True), *shown]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _files_sha256(root: Path, names: Iterable[str]) -> str:
    """One hash over names and contents, each length-prefixed so that no two sets of files can collide."""
    digest = hashlib.sha256()
    for name in names:
        content = (root / name).read_bytes()
        if name.endswith(".py"):
            content = _code(content)
        digest.update(f"{len(name)}:{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


@cache
def _code(source: bytes) -> bytes:
    """What Python makes of a source: the same for the same code under every Python from 3.11 on.

    What is no Python stands for itself.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    return json.dumps(_syntax(tree)).encode()


def _syntax(node: Any) -> Any:
    """A syntax tree as JSON, without positions and without strings that are statements, such as docstrings.

    `ast.dump` would differ between versions: fields were added, and 3.12 ends a nested format specification with an
    empty string.
    """
    if isinstance(node, ast.JoinedStr):
        node = ast.JoinedStr([part for part in node.values if not _is_text(part, "")])
    if isinstance(node, ast.AST):
        given = {name: _syntax(value) for name, value in ast.iter_fields(node) if value is not None and value != []}
        return [type(node).__name__, given]
    if isinstance(node, list):
        return [_syntax(item) for item in node if not (isinstance(item, ast.Expr) and _is_text(item.value))]
    return ascii(node)  # repr() depends on the version's Unicode tables


def _is_text(node: ast.expr, text: str | None = None) -> bool:
    """Whether it is a plain string: any, or this one."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and text in (None, node.value)


def _lock_sha256(root: Path) -> str:
    return _files_sha256(root, LOCKS)


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def _first_version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
