"""The book: `build` lays out its sources, calls Sphinx and checks every link of what it made.

    python tools/booktools.py build

Sphinx wants one tree of sources, so ``build/book/source`` gets a copy of what the book is made of:
the solved notebooks, ``docs/``, ``figures/``, and the pages written here: one of the reference
for each module, and the gallery. The result is in ``build/book/html`` and needs no network to read.

Formulas are set by MathJax, one file of its npm package, taken once into ``build/book/mathjax``.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "book"

# The file is compared with the sum, so nothing else can come in its place.
MATHJAX = "mathjax@3.2.2"
MATHJAX_FILE = "tex-svg-full.js"  # holds its fonts: one file, and nothing is fetched later
MATHJAX_SHA256 = "a4354ff94fd868aea0cc6eaaa79a57fda0588646fc46ee3700a349ee0a11cbe6"

PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md", "notebooks/teacher.md")
LEARNER = re.compile(r"\[(?P<text>[^\]]+)\]\(learner/(?P<read>[^)#]+\.ipynb)\)")
SOLVED = re.compile(r"\[solved\]\((?P<file>[^)#]+\.ipynb)\)")
MODULE = re.compile(r"\]\((?:\.\./)*(?P<path>zero_nb/[\w/]+)\.py\)")
RESULT = re.compile(r"\]\(\.\./(benchmarks/[^)#]+\.\w+)\)")
MARKERS = ("### BEGIN SOLUTION", "### END SOLUTION")

IN_A_BOOK = """:::{note}
You are reading the **solved edition** with its outputs; answers are folded away. To do the
exercises, install `zero_nb` and call `make lab`, or download the learner's edition of a notebook in
the last column.
:::
"""

# Rooms in the order of imports, each with what it is.
ROOMS = {
    "zero_nb": "The public names, and the modules that belong to no room",
    "zero_nb.core": "Arrays in one process: kernels, storage formats, layouts, flat_param",
    "zero_nb.cluster": "Ranks that talk: collectives, the log of what was sent",
    "zero_nb.train": "Real training: model, stages, ledger, optimizer, engine",
    "zero_nb.theory": "Formulas: memory, traffic, time, plans",
    "zero_nb.show": "Pictures and tables",
    "zero_nb.learn": "Exercises, questions, words, marks",
}


class BookError(RuntimeError):
    """What stops the book from being made, and what to do about it."""


# --------------------------------------------------------------------------------------- MathJax


def mathjax(folder: Path) -> Path:
    """Return MathJax in one file: the one in `folder`, or fetched with npm, or ``$MATHJAX``.

    Parameters
    ----------
    folder
        Where it is kept.

    Raises
    ------
    BookError
        If there is none and npm is missing or cannot fetch it, or if it is another file.
    """
    kept = folder / MATHJAX_FILE
    given = os.environ.get("MATHJAX")
    if given:
        return _checked(Path(given), "that MATHJAX names")
    if not kept.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            found = _checked(_from_npm(Path(scratch)), f"from {MATHJAX}")
            os.replace(found, kept)
    return _checked(kept, "kept from before; delete it to fetch it anew")


def _from_npm(scratch: Path) -> Path:
    """Let npm fetch the package, and take the one file out of it."""
    npm = shutil.which("npm")
    otherwise = (
        f"or set MATHJAX to the file package/es5/{MATHJAX_FILE} of {MATHJAX} "
        f"(npm pack {MATHJAX} on a machine with a network makes the archive)"
    )
    if npm is None:
        raise BookError(
            f"the book's formulas need MathJax from npm, and npm is not installed; install Node.js "
            f"(which brings npm), {otherwise}"
        )
    done = subprocess.run(
        [npm, "pack", MATHJAX, "--silent", "--pack-destination", str(scratch)],
        cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8",
        errors="replace", check=False, timeout=120,
    )  # fmt: skip
    archives = list(scratch.glob("*.tgz"))
    if done.returncode or not archives:
        said = " ".join(done.stdout.split())[:300]
        raise BookError(f"npm could not fetch {MATHJAX} ({said}); go online once, {otherwise}")
    with tarfile.open(archives[0]) as archive:
        content = archive.extractfile(f"package/es5/{MATHJAX_FILE}")
        (scratch / MATHJAX_FILE).write_bytes(content.read())
    return scratch / MATHJAX_FILE


def _checked(path: Path, where: str) -> Path:
    """Return `path` if it is the very file that is expected."""
    if not path.is_file():
        raise BookError(f"there is no file {path} ({where})")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != MATHJAX_SHA256:
        raise BookError(
            f"{path} ({where}) is not {MATHJAX_FILE} of {MATHJAX}: its sha256 is {found[:12]}..., "
            f"expected {MATHJAX_SHA256[:12]}..."
        )
    return path


# --------------------------------------------------------------------------------- the source tree


def sources(root: Path = ROOT) -> Iterator[tuple[str, bytes | Path]]:
    """Yield every file of the book's source tree: its name, and its content or what to copy."""
    yield "index.md", root / "book" / "index.md"
    for name in PAGES:
        yield name, _page((root / name).read_text(encoding="utf-8"), name).encode()
    for path in sorted((root / "docs").iterdir()):
        name = f"docs/{path.name}"
        if path.suffix == ".md":
            text = _page(path.read_text(encoding="utf-8"), name)
            yield name, text.encode()
            # Results that a page tells of are there to be fetched.
            for linked in sorted(set(RESULT.findall(text))):
                yield linked, root / linked
        elif path.suffix in {".png", ".svg"}:
            yield name, path
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        yield f"notebooks/{path.name}", notebook(path).encode()
    for path in sorted((root / "notebooks" / "learner").glob("*.ipynb")):
        yield f"notebooks/learner/{path.name}", path
    manifest = json.loads((root / "figures" / "manifest.json").read_text(encoding="utf-8"))
    for path in sorted((root / "figures").iterdir()):
        if path.suffix in {".png", ".svg"}:
            yield f"figures/{path.name}", path
    yield "gallery.md", gallery(manifest).encode()
    for name, text in reference(root):
        yield f"api/{name}", text.encode()


def lay_out(folder: Path, root: Path = ROOT) -> int:
    """Make `folder` the source tree; leave alone what is the same, so that Sphinx can, too.

    Returns
    -------
    int
        How many files were written or removed.
    """
    wanted, changed = set(), 0
    for name, content in sources(root):
        path = folder / name
        wanted.add(path)
        if isinstance(content, Path):
            content = content.read_bytes()
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            changed += 1
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in wanted:
            path.unlink()
            changed += 1
    return changed


def _page(text: str, name: str) -> str:
    """A page with links to source files leading to the reference instead."""
    up = "../" * name.count("/")

    def to_reference(hit: re.Match[str]) -> str:
        module = hit["path"].replace("/", ".").removesuffix(".__init__")
        return f"]({up}api/{module}.rst)"

    return MODULE.sub(to_reference, text)


def notebook(path: Path) -> str:
    """Return a solved notebook as the book shows it.

    Answers are folded away, the marks around them are gone, and the start page leads to the pages
    of the book, where the notebook leads to files to work in.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    for cell in content["cells"]:
        lines = "".join(cell["source"]).split("\n")
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] == "code":
            lines = [line for line in lines if line.strip() not in MARKERS]
            if "exercise" in tags:
                cell["metadata"]["tags"] = [*tags, "hide-input"]
        text = "\n".join(lines)
        if cell["cell_type"] == "markdown":
            text = _page(text, f"notebooks/{path.name}")
            if path.name == "index.ipynb":
                text = _read_not_run(text)
        cell["source"] = text
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def _read_not_run(text: str) -> str:
    """Lead from the start page to the pages that are read; the editions to run are downloads."""
    if "](learner/" not in text:
        return text
    text = LEARNER.sub(r"[\g<text>](\g<read>)", text)
    text = SOLVED.sub(r"{download}`download <learner/\g<file>>`", text)
    text = re.sub(r"\| solved *\|", "| to solve |", text)
    head, line, rest = text.partition("\n")
    return f"{head}{line}\n{IN_A_BOOK}{rest}"


# ------------------------------------------------------------------------------ pages written here


def gallery(manifest: Mapping[str, Any]) -> str:
    """Return the page of all figures: each with its sentence, its files and its numbers."""
    parts = [
        "# Figures",
        "Every figure of the project, drawn by `make figures` from a run or a formula. Below each "
        "one: what it shows in words, the picture in lines (SVG) and the numbers behind it.",
    ]
    for name, figure in sorted(manifest.items()):
        words = figure["alt"]
        parts += [
            f"## {name.replace('_', ' ').capitalize()}",
            f"![{_escaped(words)}](figures/{figure['png']})",
            words,
            f"{{download}}`{figure['svg']} <figures/{figure['svg']}>`",
            "<details><summary>The numbers</summary>\n"
            f'<pre class="numbers">{html.escape(_numbers(figure["data"]))}</pre>\n</details>',
        ]
    return "\n\n".join(parts) + "\n"


def _escaped(words: str) -> str:
    """A sentence as the alt text of a picture in Markdown."""
    return re.sub(r"([][\\*_`])", r"\\\1", words)


def _numbers(data: Any, indent: str = "") -> str:
    """Numbers as lines of text: a name, then what it stands for."""
    lines = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}", _numbers(value, f"{indent}  ")]
        elif isinstance(value, list):
            lines.append(f"{indent}{key}: {', '.join(map(_number, value))}")
        else:
            lines.append(f"{indent}{key}: {_number(value)}")
    return "\n".join(lines)


def _number(value: Any) -> str:
    """One number, fractions with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def reference(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield the pages of the reference: all rooms, each room, and each public module."""
    rooms: dict[str, list[_Module]] = {room: [] for room in ROOMS}
    for module in _modules(root):
        room = module.name if module.name in ROOMS else module.name.rpartition(".")[0]
        if room not in ROOMS:
            raise BookError(f"{room} has no heading in the reference; add it to ROOMS")
        rooms[room].append(module)
        yield f"{module.name}.rst", _reference_page(module)
    for room, modules in rooms.items():
        table = [[f":doc:`{module.name}`", module.summary] for module in modules]
        titles = [f"{module.short} <{module.name}>" for module in modules]
        yield f"room_{room}.rst", _contents(room, ROOMS[room] + ".", table, titles)
    yield (
        "index.rst",
        _contents(
            "Reference",
            "Every public module, by room. The order is that of imports: a room knows those above "
            "it, and theory and training never meet. See "
            ":doc:`the architecture </docs/architecture>`.",
            [[f":doc:`{room} <room_{room}>`", f"{about}."] for room, about in ROOMS.items()],
            [f"{room} <room_{room}>" for room in ROOMS],
        ),
    )


def _contents(title: str, about: str, table: list[list[str]], titles: list[str]) -> str:
    """A page that leads on to others: a table to read, and the same for the sidebar."""
    lines = [title, "=" * len(title), "", about, "", ".. list-table::", "   :widths: 30 70", ""]
    for first, second in table:
        lines += [f"   * - {first}", f"     - {second}"]
    lines += ["", ".. toctree::", "   :hidden:", "", *(f"   {title}" for title in titles)]
    return "\n".join(lines) + "\n"


def _reference_page(module: _Module) -> str:
    """The page of one module. What it only passes on is described where it is made."""
    lines = [module.name, "=" * len(module.name), "", f".. automodule:: {module.name}"]
    if module.name == "zero_nb":
        names = [f"* :py:obj:`~{home}.{name}`" for name, home in sorted(module.passed_on.items())]
        lines += ["   :no-members:", "", *names]
    elif module.passed_on:
        lines += [f"   :exclude-members: {', '.join(sorted(module.passed_on))}"]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Module:
    """A public module: its name, its first sentence, and names that it has from where."""

    name: str
    summary: str
    passed_on: dict[str, str]

    @property
    def short(self) -> str:
        """Its name within its room."""
        return self.name.rpartition(".")[2]


def _modules(root: Path) -> Iterator[_Module]:
    """Read every public module, without importing it."""
    for path in sorted((root / "zero_nb").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if any(part.startswith("_") for part in parts):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        first = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
        yield _Module(
            ".".join(parts),
            re.sub(r"(?<![`\w])`([^`]+)`(?!`)", r"``\1``", first),
            passed_on(tree),
        )


def passed_on(tree: ast.Module) -> dict[str, str]:
    """Find the names that a module has from elsewhere in the package.

    Parameters
    ----------
    tree
        The module, parsed.

    Returns
    -------
    dict
        Name to module: imported at any place, or loaded when it is asked for.
    """
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zero_nb"):
            found |= {alias.asname or alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
            homes = ast.literal_eval(node.value)
            found |= {name: home for home, names in homes.items() for name in names}
    return found


# ---------------------------------------------------------------------------------------- the book


def build(out: Path = OUT, *, root: Path = ROOT, keep: bool = False) -> Path:
    """Make the book.

    Parameters
    ----------
    out
        Folder for everything that is made.
    root
        The project.
    keep
        Make only the pages that changed. Faster, but pages and links of before may be left.

    Returns
    -------
    Path
        The first page.

    Raises
    ------
    BookError
        If MathJax is not to be had, Sphinx warns, or a link leads nowhere.
    """
    script = mathjax(out / "mathjax")
    if not keep:
        for name in ("source", "doctrees", "html"):
            shutil.rmtree(out / name, ignore_errors=True)
    lay_out(out / "source", root)
    static = out / "html" / "_static" / "mathjax"
    static.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(script, static / MATHJAX_FILE)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "--builder", "html"),
            *("--fail-on-warning", "--quiet", "--jobs", "auto"),
            *("--conf-dir", str(root / "book"), "--doctree-dir", str(out / "doctrees")),
            *(str(out / "source"), str(out / "html")),
        ],
        cwd=root,
        check=False,
    )
    if done.returncode:
        raise BookError("Sphinx found what is listed above; mend it where it is written")
    found = broken_links(out / "html")
    if found:
        raise BookError("links that lead nowhere:\n" + "\n".join(found))
    return out / "html" / "index.html"


# ---------------------------------------------------------------------------------------- the links

LOADED = {
    ("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"),
    ("video", "src"), ("audio", "src"), ("object", "data"), ("embed", "src"),
}  # fmt: skip


class _Page(HTMLParser):
    """Ids, links and what is loaded, of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if not value:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.ids.add(value)
            elif tag == "a" and name == "href":
                self.links.append(value)
            elif (tag, name) in LOADED and not (tag == "link" and _only_told(attrs)):
                self.loaded.append(value)

    handle_startendtag = handle_starttag


def _only_told(attrs: Iterable[tuple[str, str | None]]) -> bool:
    """Whether a <link> names a page without loading it."""
    rel = dict(attrs).get("rel") or ""
    return bool({"index", "search", "next", "prev", "canonical", "author"} & set(rel.split()))


def broken_links(folder: Path) -> list[str]:
    """Find what leads nowhere in a folder of pages.

    Parameters
    ----------
    folder
        HTML files, and the files that they load.

    Returns
    -------
    list of str
        For each fault the page, the link and what is wrong: no such file, no such place in the
        page, or something that would be loaded from another host.
    """
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        if "_static" in path.relative_to(folder).parts:
            continue  # the theme's templates
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        pages[path] = page
    found = []
    for path, page in pages.items():
        here = path.relative_to(folder).as_posix()
        for link in page.loaded:
            if urlsplit(link).scheme in {"http", "https"} or link.startswith("//"):
                found.append(f"{here}: loads {link} from another host")
        for link in [*page.links, *page.loaded]:
            wrong = _wrong(link, path, folder, pages)
            if wrong:
                found.append(f"{here}: {link} ({wrong})")
    return found


def _wrong(link: str, path: Path, folder: Path, pages: Mapping[Path, _Page]) -> str:
    """What is wrong with a link of a page, or nothing."""
    if urlsplit(link).scheme or link.startswith("//"):
        return ""
    address, anchor = urldefrag(link)
    name = unquote(address.partition("?")[0])
    target = Path(os.path.normpath(path.parent / name)) if name else path
    if name.startswith("/") or not target.is_relative_to(folder):
        return "leads out of the book"
    if not target.is_file():
        return "no such file"
    if anchor and target in pages and unquote(anchor) not in pages[target].ids:
        return "no such place in it"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="make the book, and check its links")
    command.add_argument("--out", type=Path, default=OUT, help="folder (default: build/book)")
    command.add_argument("--keep", action="store_true", help="make only the pages that changed")
    command = commands.add_parser("check", help="check the links of a book that is there")
    command.add_argument("--out", type=Path, default=OUT, help="folder (default: build/book)")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    try:
        if options.command == "build":
            print(f"the book: {build(out, keep=options.keep)}")
            return 0
        found = broken_links(out / "html")
        print("\n".join(found) or "no broken link")
        return bool(found)
    except BookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
