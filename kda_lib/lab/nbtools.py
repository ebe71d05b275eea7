"""Source notebooks: the stored form, the structure every one of them has, and the kernel they run in."""

import ast
import io
import itertools
import json
import os
import re
import signal
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager
    from nbformat import NotebookNode

CHECKED_TAG = "nbval-check-output"
"""nbval compares the stored output of a cell with this tag; no other cell stores any."""

MAX_BYTES = 200_000
"""Largest source notebook, in bytes: the design's limit."""

TIME_LIMIT_S = 600.0
"""Seconds a notebook may take from the start of its first cell; the design gives it 60 s without a GPU."""

OWN_PARAMETERS = ("profile", "results_dir")
"""Parameters of every notebook that the runner sets itself."""

NAME = re.compile(r"\d\d_[a-z0-9_]+")
_KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
_EXITS = {"sys.exit", "os._exit", "exit", "quit", "os.abort"}


class UnknownNotebook(ValueError):
    """No notebook fits the number or name asked for; the message lists those that exist."""


class InvalidNotebook(ValueError):
    """A file is not a notebook of a format that nbformat reads."""


class WrongParameter(ValueError):
    """A setting NAME=VALUE that the notebooks asked for cannot take."""


def source_notebooks(folder: Path) -> list[Path]:
    """The notebooks of `folder` in the order of their numbers."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def select(root: Path, only: Sequence[str] = ()) -> list[Path]:
    """The source notebooks of the repository at `root`: all, or those whose number or name is in `only`.

    Raises:
        UnknownNotebook: an item of `only` fits none, or there are no notebooks at all.
    """
    found = {name: path for path in source_notebooks(root / "notebooks") for name in (path.stem, path.stem[:2])}
    if not found:
        raise UnknownNotebook(f"no notebook NN_name.ipynb in {root / 'notebooks'}")
    for wanted in only:
        if wanted not in found:
            names = ", ".join(sorted({path.stem for path in found.values()}))
            raise UnknownNotebook(f"notebook: expected one of {names}; got {wanted!r}")
    return sorted({found[wanted] for wanted in only or found})


def read(path: Path) -> "NotebookNode":
    """The notebook in a file, in the newest format.

    Raises:
        InvalidNotebook: it holds none.
        OSError: it cannot be read.
    """
    import nbformat

    # JSON of another form gives whatever the place in nbformat raises that meets it first; no JSON, no UTF-8 or an
    # unknown format, a ValueError.
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except (ValueError, AttributeError, TypeError, RecursionError, nbformat.ValidationError) as error:
        raise InvalidNotebook(f"not a valid notebook: {error}") from error
    return notebook


def declared_parameters(path: Path) -> dict[str, Any]:
    """Parameters of a notebook, but for `OWN_PARAMETERS`, and their values; of a file that is no notebook, none.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        cells = [cell for cell in read(path).cells if "parameters" in tags(cell)]
    except InvalidNotebook:
        return {}
    # Papermill puts the values after the first such cell.
    values = (_literals(cells[0].source) if cells else None) or {}
    return {name: value for name, value in values.items() if name not in OWN_PARAMETERS}


def read_parameters(settings: Sequence[str], notebooks: Sequence[Path]) -> dict[str, Any]:
    """The values that settings NAME=VALUE (YAML) give to parameters of the notebooks.

    Raises:
        WrongParameter: a setting is not of that form, no notebook has the parameter, or its value there is of another
            type; an int may stand for a float.
    """
    import yaml

    declared = {path.stem: declared_parameters(path) for path in notebooks}
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise WrongParameter(f"expected NAME=VALUE; got {setting[:80]!r}")
        if name in values:
            raise WrongParameter(f"expected one value for {name!r}; got two")
        if name in OWN_PARAMETERS:
            raise WrongParameter(f"this command sets {name!r} itself; choose the profile with --gpu")
        defaults = [parameters[name] for parameters in declared.values() if name in parameters]
        if not defaults:
            listed = "; ".join(f"{stem}: {', '.join(sorted(names)) or 'none'}" for stem, names in declared.items())
            raise WrongParameter(f"no selected notebook has {name!r}, expected one of theirs ({listed})")
        try:
            value = values[name] = yaml.safe_load(text)
            json.dumps(value, allow_nan=False)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):
            raise WrongParameter(f"expected a YAML value for {name!r} that JSON has too; got {text[:80]!r}") from None
        for default in defaults:
            if type(value) is not type(default) and (type(value), type(default)) != (int, float):
                kind = type(default).__name__
                raise WrongParameter(f"expected {kind} for {name!r}, such as {default!r}; got {text[:80]!r}")
    return values


def tags(cell: "NotebookNode") -> list[str]:
    """The tags of a cell."""
    return list(cell.metadata.get("tags", []))


def kernel_manager() -> "AsyncKernelManager":
    """A manager for a kernel in the running interpreter, whatever kernelspecs are installed on the machine."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    # With no folder to search, `python3` can only be the kernel that ipykernel offers for sys.executable.
    specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)


def kill_kernel(manager: "AsyncKernelManager") -> None:
    """End the kernel and every process that it started, at once; nothing happens if all have gone already."""
    from jupyter_client.provisioning.local_provisioner import LocalProvisioner

    provisioner = manager.provisioner
    pid = provisioner.pid if isinstance(provisioner, LocalProvisioner) else None
    if pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # jupyter_client starts a kernel as the leader of its own session
    manager.cleanup_connection_file()


def stored_form(notebook: "NotebookNode") -> "NotebookNode":
    """A copy of `notebook` as it is stored: no counts, no outputs but the plain text of checked cells."""
    from nbformat import from_dict

    stored = from_dict(json.loads(json.dumps(notebook)))
    kept = {key: notebook.metadata[key] for key in ("tags", "title") if key in notebook.metadata}
    stored.metadata = from_dict({"kernelspec": _KERNELSPEC, "language_info": {"name": "python"}, **kept})
    for cell in stored.cells:
        cell.metadata = from_dict({"tags": tags(cell)} if tags(cell) else {})
    for number, cell in enumerate((cell for cell in stored.cells if cell.cell_type == "code"), 1):
        cell.outputs = list(_text_outputs(cell, number)) if CHECKED_TAG in tags(cell) else []
        # nbval takes a cell without a count for one that was never run, so a cell with outputs has its place as count.
        cell.execution_count = number if cell.outputs else None
    return stored


def _text_outputs(cell: "NotebookNode", number: int) -> "Iterator[NotebookNode]":
    for output in cell.outputs:
        if "data" in output:
            output.data = {mime: text for mime, text in output.data.items() if mime == "text/plain"}
            output.metadata = {}
            if not output.data:
                continue
        if "execution_count" in output:
            output.execution_count = number
        if output.output_type != "error":
            yield output


def dumps(notebook: "NotebookNode") -> str:
    """The text of a notebook file: the same notebook always gives the same text."""
    import nbformat

    text: str = nbformat.writes(
        notebook,
        version=nbformat.NO_CONVERT,
        indent=1,
        sort_keys=True,
        ensure_ascii=False,
    )
    return text.rstrip("\n") + "\n"


def strip(path: Path) -> bool:
    """Rewrite the notebook at `path` in its stored form; True if that changed the file."""
    import nbformat

    old = path.read_text(encoding="utf-8")
    new = dumps(stored_form(nbformat.reads(old, as_version=nbformat.NO_CONVERT)))
    if new != old:
        replace_text(path, new)
    return new != old


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader, or a full disk, never meets half of it.

    Raises:
        OSError: the file cannot be written; the old one is left as it was.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def retake(path: Path) -> bool:
    """Run the notebook at `path` and store the outputs of its checked cells; True if the file changed.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the file is left as it was.
        ValueError: a checked cell shows something other than plain text, which nbval cannot compare.
    """
    import nbformat
    from nbclient import NotebookClient

    old = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(old, as_version=nbformat.NO_CONVERT)
    manager = kernel_manager()
    client = NotebookClient(notebook, km=manager, resources={"metadata": {"path": str(path.parent)}})
    client.coalesce_streams = True
    client.extra_arguments = ["--log-level=ERROR"]
    try:
        client.execute(cleanup_kc=True)
    finally:
        kill_kernel(manager)
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", []) if CHECKED_TAG in tags(cell) else []:
            if set(output.get("data", {})) - {"text/plain"}:
                raise ValueError(
                    f"{path.name} cell {number}: a cell tagged {CHECKED_TAG} shows {', '.join(sorted(output.data))}, "
                    "expected plain text only: print it"
                )
    new = dumps(stored_form(notebook))
    if new != old:
        replace_text(path, new)
    return new != old


def check(path: Path) -> list[str]:
    """What is wrong with the structure of the source notebook at `path`: one sentence each, none if all is well."""
    import nbformat

    text = path.read_text(encoding="utf-8")
    try:
        notebook = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
        nbformat.validate(notebook)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        return [f"not a valid notebook: {str(error).splitlines()[0]}"]
    ids = [cell.get("id") for cell in json.loads(text)["cells"]]  # nbformat has mended its copy silently
    if None in ids or len(set(ids)) < len(ids):
        return ["cells without an id or with the same id, expected a different one for each (notebook format 4.5)"]
    return [
        *_check_file(path, text, notebook),
        *_check_cells(notebook),
        *_check_frame(path.stem, notebook),
    ]


def _check_file(path: Path, text: str, notebook: "NotebookNode") -> Iterator[str]:
    if not NAME.fullmatch(path.stem):
        yield f"name {path.name!r}, expected NN_lower_case_name.ipynb"
    size = len(text.encode())
    if size >= MAX_BYTES:
        yield f"{size} bytes, expected under {MAX_BYTES}"
    kernel = notebook.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        yield f"kernelspec {kernel!r}, expected 'python3'"
    stored = stored_form(notebook)
    changed = [n for n, (a, b) in enumerate(zip(notebook.cells, stored.cells, strict=True), 1) if a != b]
    if changed:
        yield f"cells {changed} hold outputs, counts or metadata that are not stored: run `make notebooks`"
    elif dumps(stored) != text:
        yield "the file is not in its stored form: run `make notebooks`"


def _check_cells(notebook: "NotebookNode") -> Iterator[str]:
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        if "raises-exception" in tags(cell):
            yield f"cell {number}: tagged raises-exception, expected to catch what it shows"
        if CHECKED_TAG in tags(cell) and not cell.outputs:
            yield f"cell {number}: tagged {CHECKED_TAG} but stores no output: run `retake`"
        tree = _parse(cell.source)
        if tree is None:
            yield f"cell {number}: not plain Python (no !command, no %magic)"
            continue
        if _ends_in_semicolon(cell.source):
            yield f"cell {number}: a line ends in ';'"
        for call in _calls(tree):
            if call in _EXITS or call.startswith("get_ipython"):
                yield f"cell {number}: calls {call}"


def _check_frame(stem: str, notebook: "NotebookNode") -> Iterator[str]:
    """The three cells that make a notebook a part of the laboratory: parameters, begin, finish."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if len(code) < 3:
        yield f"{len(code)} code cells, expected at least 3: parameters, notebook.begin, .finish()"
        return
    if tags(code[0]) != ["parameters"]:
        yield f"first code cell has tags {tags(code[0])}, expected ['parameters']"
    values = _literals(code[0].source)
    if values is None:
        yield "first code cell holds something other than assignments of literals"
    else:
        for name, default in (("profile", "cpu"), ("results_dir", "")):
            if values.get(name) != default:
                yield f"first code cell: {name} is {values.get(name)!r}, expected {default!r}"
    begun = list(_begin_names(_parse(code[1].source)))
    if begun != [stem]:
        yield f"second code cell begins {begun}, expected one call notebook.begin({stem!r}, ...)"
    last = _parse(code[-1].source)
    if last is None or not any(call.endswith(".finish") for call in _calls(last)):
        yield "last code cell does not call .finish()"


def _parse(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def _ends_in_semicolon(source: str) -> bool:
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type != tokenize.COMMENT]
    ends = (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER)
    return any(a.string == ";" and b.type in ends for a, b in itertools.pairwise(tokens))


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def _begin_names(tree: ast.Module | None) -> Iterator[Any]:
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "begin":
            first = node.args[0] if node.args else None
            yield first.value if isinstance(first, ast.Constant) else None


def _literals(source: str) -> dict[str, Any] | None:
    tree = _parse(source)
    values: dict[str, Any] = {}
    for statement in tree.body if tree else ():
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                try:
                    values[name] = ast.literal_eval(value)
                except (ValueError, TypeError):
                    return None
            case _:
                return None
    return values
