"""Notebooks in one normal form and two editions: `run`, `normalise`, `strip`, `check`.

A notebook is kept with its outputs, and is written by one command only, so that a difference in
the file is a difference in what it says. ``run`` executes in a fresh kernel and normalises;
``normalise`` brings one that was saved in JupyterLab into the same form; ``check`` tells what is
wrong with one. The normal form keeps what a reader sees and drops what a machine left behind: the
kernel's exact version, timings, widget models, cell metadata other than tags.

[Note: two editions]
``notebooks/`` is the source: solved, with outputs. What stands between ``### BEGIN SOLUTION`` and
``### END SOLUTION`` is taken out for ``notebooks/learner/``, which is never edited: ``strip``
writes it, and ``run`` does so after executing the solved one. Cells keep their ids and places, so
that an answer can be found in a learner's copy.

    python tools/nbtools.py run notebooks/00_see_the_saving_first.ipynb
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE_INFO = {"name": "python"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
SHORTEST_ALT = 20
CELL_SECONDS = 120

LEARNER = "learner"
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"

_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
# Folders that exist on one machine only; spelled so that this line is no such path itself.
_PATH = re.compile(r"(?<![\w.:/])/(?:home|Users|root|tmp|work|private|mnt)/\w*|\b[A-Z]:\\+\w+")
_LINK = re.compile(r"\]\((?P<target>[^()\s]+)\)")
_EMBEDDED = re.compile(r"data:[\w/+.-]+;base64,[A-Za-z0-9+/=]+")


# ------------------------------------------------------------------------------- the normal form


def normalise(notebook: dict[str, Any]) -> dict[str, Any]:
    """Bring a notebook into normal form.

    Parameters
    ----------
    notebook
        A version 4 notebook as JSON was read; not changed.

    Returns
    -------
    dict
        A new notebook. Normalising it again changes nothing.

    Raises
    ------
    ValueError
        If it is not a version 4 notebook.
    """
    if notebook.get("nbformat") != 4 or not isinstance(notebook.get("cells"), list):
        raise ValueError(
            f"expected a notebook with nbformat 4, got {notebook.get('nbformat')!r}; "
            "open and save it in JupyterLab first"
        )
    taken: set[str] = set()
    return {
        "cells": [_cell(cell, place, taken) for place, cell in enumerate(notebook["cells"])],
        "metadata": {"kernelspec": dict(KERNELSPEC), "language_info": dict(LANGUAGE_INFO)},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def to_text(notebook: dict[str, Any]) -> str:
    """Write a notebook as JupyterLab would: sorted keys, one space of indent, lines apart.

    Parameters
    ----------
    notebook
        As `normalise` returns it.

    Returns
    -------
    str
        JSON with a newline at its end.
    """
    text = json.dumps(
        notebook, indent=1, sort_keys=True, ensure_ascii=False, separators=(",", ": ")
    )
    return text + "\n"


def _cell(cell: dict[str, Any], place: int, taken: set[str]) -> dict[str, Any]:
    """One cell in normal form; its id goes into `taken`."""
    source = _text(cell.get("source", "")).replace("\r\n", "\n")
    kind = cell["cell_type"]
    tags = cell.get("metadata", {}).get("tags")
    out: dict[str, Any] = {
        "cell_type": kind,
        "id": _cell_id(cell.get("id"), place, source, taken),
        "metadata": {"tags": list(tags)} if tags else {},
        "source": _lines(source),
    }
    if kind == "code":
        out["execution_count"] = cell.get("execution_count")
        out["outputs"] = _outputs(cell.get("outputs", []))
    elif cell.get("attachments"):
        out["attachments"] = cell["attachments"]
    return out


def _cell_id(given: Any, place: int, source: str, taken: set[str]) -> str:
    """The cell's own id if it is valid and free, else one made from its place and source."""
    name = given if isinstance(given, str) and _ID.fullmatch(given) else None
    attempt = 0
    while name is None or name in taken:
        seed = f"{place}:{attempt}:{source}"
        name = hashlib.sha256(seed.encode()).hexdigest()[:8]
        attempt += 1
    taken.add(name)
    return name


def _outputs(outputs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outputs in normal form: what was streamed in one go is one output."""
    out: list[dict[str, Any]] = []
    for output in outputs:
        kind = output["output_type"]
        if kind == "stream":
            text = _text(output.get("text", ""))
            if out and out[-1]["output_type"] == "stream" and out[-1]["name"] == output["name"]:
                out[-1]["text"] = _lines(_text(out[-1]["text"]) + text)
            elif text:
                out.append({"name": output["name"], "output_type": kind, "text": _lines(text)})
        elif kind == "error":
            out.append(
                {key: output[key] for key in ("ename", "evalue", "output_type", "traceback")}
            )
        else:
            shown: dict[str, Any] = {
                "data": _bundle(output.get("data", {})),
                "metadata": {},
                "output_type": kind,
            }
            if kind == "execute_result":
                shown["execution_count"] = output.get("execution_count")
            out.append(shown)
    return out


def _bundle(data: dict[str, Any]) -> dict[str, Any]:
    """One output in its several forms, without the widget's view: its model is gone on opening."""
    out = {}
    for kind, content in data.items():
        if kind == WIDGET_VIEW:
            continue
        if kind.endswith("json"):
            out[kind] = content
        elif kind.startswith("text/") or kind in ("image/svg+xml", "application/javascript"):
            out[kind] = _lines(_text(content))
        else:
            out[kind] = _text(content)
    return out


def _text(content: str | Sequence[str]) -> str:
    """A text that JSON may hold as one string or as a list of lines."""
    return content if isinstance(content, str) else "".join(content)


def _lines(text: str) -> list[str]:
    """A text as nbformat stores it: a list of lines that keep their line ends."""
    return text.splitlines(keepends=True)


# ----------------------------------------------------------------------------------- two editions


def has_solutions(notebook: dict[str, Any]) -> bool:
    """Whether a notebook has anything to take out, and so a learner's edition.

    Parameters
    ----------
    notebook
        In normal form or not.
    """
    return any(BEGIN in _text(cell.get("source", "")) for cell in notebook["cells"])


def strip(notebook: dict[str, Any], single: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Make the learner's edition of a solved notebook: see [Note: two editions].

    Parameters
    ----------
    notebook
        The solved one; not changed.
    single
        File names of notebooks that have one edition only: links to them go one folder up.

    Returns
    -------
    dict
        In normal form, without outputs: it has not been run yet.

    Raises
    ------
    ValueError
        If a region has no end, no beginning, or no place to put the three dots.
    """
    stripped = normalise(notebook)
    for place, cell in enumerate(stripped["cells"]):
        source = _text(cell["source"])
        if cell["cell_type"] == "code":
            cell["source"] = _lines(_without_solutions(source, place))
            cell.update(execution_count=None, outputs=[])
        else:
            cell["source"] = _lines(_LINK.sub(lambda hit: _relinked(hit, single), source))
    return stripped


def _without_solutions(source: str, place: int) -> str:
    """A cell's source with three dots in the place of each region between the marks."""
    kept: list[str] = []
    inside = False
    for line in source.split("\n"):
        mark = line.strip()
        if mark in (BEGIN, END):
            if inside == (mark == BEGIN):
                raise ValueError(f"cell {place}: {mark!r} is not expected here")
            inside = not inside
            # `guess = ...` or `{"a": ...}` before the region: the dots are already there.
            if inside and not (kept and "..." in kept[-1]):
                kept.append(line[: len(line) - len(line.lstrip())] + "...")
        elif not inside:
            kept.append(line)
    if inside:
        raise ValueError(f"cell {place}: a region has no {END!r}")
    return "\n".join(kept)


def _relinked(hit: re.Match[str], single: frozenset[str]) -> str:
    """A Markdown link that still leads to its file from one folder deeper."""
    target = hit["target"]
    file = target.partition("#")[0]
    stays = not file or "://" in target or (file.endswith(".ipynb") and file not in single)
    return hit.group() if stays else f"]({'../' + target})"


def learner_path(path: Path) -> Path:
    """Return where the learner's edition of a solved notebook lies."""
    return path.parent / LEARNER / path.name


def solved_notebooks(folder: Path = NOTEBOOKS) -> list[Path]:
    """Return the solved notebooks of a folder, in order."""
    return sorted(folder.glob("*.ipynb"))


def single_editions(folder: Path = NOTEBOOKS) -> frozenset[str]:
    """Return the names of the notebooks of a folder that have no solutions in them."""
    return frozenset(
        path.name
        for path in solved_notebooks(folder)
        if not has_solutions(json.loads(path.read_text(encoding="utf-8")))
    )


# -------------------------------------------------------------------------------------- the guard


def problems(text: str) -> list[str]:
    """Tell all that is wrong with a notebook file.

    The notebook tests compare outputs with what is stored, so a notebook that was never run, or
    run in part, has nothing to compare and would pass. This is the guard against that, and
    against what makes a notebook differ from one machine to the next or unreadable for some.

    Parameters
    ----------
    text
        The file's content.

    Returns
    -------
    list of str
        One sentence for each problem, naming the cell (counted from 0, Markdown cells too) and
        what to do. Empty if all is well.
    """
    import nbformat

    try:
        normal = normalise(json.loads(text))
        nbformat.validate(normal)
    except Exception as error:  # of many types, from the parser to the schema
        return [f"not a valid notebook: {type(error).__name__}: {str(error).splitlines()[0]}"]
    found = []
    if text != to_text(normal):
        found.append("not in normal form; run `python tools/nbtools.py normalise` on it")
    expected = 0
    for place, cell in enumerate(normal["cells"]):
        if cell["cell_type"] != "code":
            continue
        expected += 1
        found += [f"cell {place}: {problem}" for problem in _cell_problems(cell, expected)]
    if not expected:
        found.append("has no code cell")
    return found


def _cell_problems(cell: dict[str, Any], expected: int) -> Iterator[str]:
    """What is wrong with one code cell that should be the `expected`-th to be executed."""
    source = _text(cell["source"])
    if not source.strip():
        yield "empty; remove it"
    if cell["execution_count"] != expected:
        yield (
            f"has execution count {cell['execution_count']}, expected {expected}; run the whole "
            "notebook in a fresh kernel (`make notebooks`)"
        )
    for line in source.splitlines():
        if line.rstrip().endswith(";"):
            yield f"a line ends with ';' ({line.strip()!r}); the notebook tests fail on it"
    for output in cell["outputs"]:
        yield from _output_problems(output, cell["metadata"].get("tags", []))


def _output_problems(output: dict[str, Any], tags: Sequence[str]) -> Iterator[str]:
    """What is wrong with one output of a cell with these tags."""
    kind = output["output_type"]
    if kind == "stream" and output["name"] != "stdout":
        yield f"writes to {output['name']}: {_text(output['text']).strip()[:80]!r}"
    if kind == "error" and "raises-exception" not in tags:
        yield f"ends in {output['ename']}: {output['evalue'][:80]}"
    data = output.get("data", {})
    for picture in data:
        if picture.startswith("image/"):
            yield f"shows a bare {picture}; show a zero_nb.show figure, which says what is in it"
    for alt in _alts(_text(data.get("text/html", ""))):
        if alt is None or len(alt.strip()) < SHORTEST_ALT:
            yield f"shows a picture without a sentence (alt is {alt!r})"
    said = _EMBEDDED.sub("", "\n".join(_strings(output)))
    for pattern, what in ((_ADDRESS, "a memory address"), (_PATH, "a path of one machine")):
        hit = pattern.search(said)
        if hit:
            yield f"shows {what}: {hit.group()!r}"


def _strings(node: Any) -> Iterator[str]:
    """Every text in an output, lists of lines joined."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for item in node.values():
            yield from _strings(item)
    elif isinstance(node, list):
        texts = [item for item in node if isinstance(item, str)]
        yield "".join(texts)
        for item in node:
            if not isinstance(item, str):
                yield from _strings(item)


def _alts(page: str) -> list[str | None]:
    """The alternative text of each picture in an HTML output; None where there is none."""
    found: list[str | None] = []

    class Pictures(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag in ("img", "svg"):
                found.append(dict(attrs).get("alt" if tag == "img" else "aria-label"))

    Pictures().feed(page)
    return found


# ------------------------------------------------------------------------------------ the command


def execute(text: str, folder: Path) -> dict[str, Any]:
    """Run a notebook in a fresh kernel of this Python and bring it into normal form.

    Parameters
    ----------
    text
        The notebook file's content.
    folder
        The kernel's working directory.

    Returns
    -------
    dict
        The notebook with its new outputs.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell raises.
    """
    import nbformat
    from nbclient import NotebookClient

    # Ids first: reading a notebook without them would invent random ones.
    notebook = nbformat.reads(to_text(normalise(json.loads(text))), as_version=4)
    # A kernel of the same name in the home directory must not win over this environment's.
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    os.environ["ZERO_NB_SCORE"] = "off"  # a learner's own record is not made by this
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name=KERNELSPEC["name"],
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return normalise(json.loads(nbformat.writes(notebook)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="nbtools", description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("run", "normalise", "strip", "check"))
    parser.add_argument("notebook", nargs="*", type=Path, help="default: all in notebooks/")
    options = parser.parse_args(arguments)
    # The learner's edition follows the solved one, so only that is named; `check` reads both.
    everything = sorted(NOTEBOOKS.rglob("*.ipynb")) if options.command == "check" else None
    failed = False
    for path in options.notebook or everything or solved_notebooks():
        if ".ipynb_checkpoints" in path.parts:
            continue
        try:
            written = _written(path, options.command)
        except Exception as error:
            # The file stays as it was; the other notebooks still get their turn.
            print(f"{path.name}: {error}", file=sys.stderr)
            failed = True
            continue
        for file in written:
            name = f"{LEARNER}/{file.name}" if file.parent.name == LEARNER else file.name
            found = problems(file.read_text(encoding="utf-8"))
            for problem in found:
                print(f"{name}: {problem}", file=sys.stderr)
            failed = failed or bool(found)
            print(f"{name}: {'see above' if found else 'fine'}")
    return int(failed)


def _written(path: Path, command: str) -> list[Path]:
    """Carry out a command on one notebook; return the files that it is about."""
    text = path.read_text(encoding="utf-8")
    if command == "normalise":
        _write(path, to_text(normalise(json.loads(text))))
    if command == "run":
        _write(path, to_text(execute(text, path.parent)))
    if command in ("check", "normalise") or path.parent.name == LEARNER:
        return [path]
    solved = json.loads(path.read_text(encoding="utf-8"))
    if not has_solutions(solved):
        return [path]
    learner = learner_path(path)
    learner.parent.mkdir(exist_ok=True)
    stripped = to_text(strip(solved, single_editions(path.parent)))
    _write(learner, to_text(execute(stripped, learner.parent)))
    return [path, learner]


def _write(path: Path, text: str) -> None:
    """Put the file in place in one step; an unchanged one keeps its time."""
    content = text.encode("utf-8")
    if path.exists() and path.read_bytes() == content:
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


if __name__ == "__main__":
    sys.exit(main())
