"""What `make book` is made of, and the check that no link of it leads nowhere. No page is made."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import booktools

ROOT = Path(__file__).resolve().parent.parent
SOLVED = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def laid_out():
    """Every file of the book's source tree, by name."""
    return {
        name: content.read_bytes() if isinstance(content, Path) else content
        for name, content in booktools.sources()
    }


def cells(text):
    """The cells of a notebook in a file."""
    return json.loads(text)["cells"]


def source(cell):
    """The text of a cell, whether it is kept in lines or not."""
    return "".join(cell["source"])


# ------------------------------------------------------------------------------ what is laid out


def test_everything_has_its_page(laid_out):
    for path in [
        *SOLVED,
        *(ROOT / "docs").iterdir(),
        *(ROOT / "notebooks/learner").glob("*.ipynb"),
    ]:
        assert path.relative_to(ROOT).as_posix() in laid_out
    for path in (ROOT / "zero_nb").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        public = not any(part.startswith("_") for part in module.split("."))
        assert (f"api/{module}.rst" in laid_out) is public, module


def test_every_module_is_in_the_contents_of_its_room(laid_out):
    pages = {name for name in laid_out if re.fullmatch(r"api/zero_nb.*\.rst", name)}
    linked = set()
    for room in booktools.ROOMS:
        text = laid_out[f"api/room_{room}.rst"].decode()
        linked |= {f"api/{name}.rst" for name in re.findall(r"^   \S+ <(\S+)>$", text, re.M)}
        assert f"room_{room}>" in laid_out["api/index.rst"].decode()
    assert linked == pages


def test_a_new_room_has_to_be_given_a_heading(tmp_path):
    module = tmp_path / "zero_nb" / "cellar" / "wine.py"
    module.parent.mkdir(parents=True)
    module.write_text('"""Bottles."""\n', encoding="utf-8")
    with pytest.raises(booktools.BookError, match=r"zero_nb\.cellar has no heading"):
        list(booktools.reference(tmp_path))


def test_what_a_module_passes_on_is_described_where_it_is_made(laid_out):
    names = laid_out["api/zero_nb.rst"].decode()
    assert ":no-members:" in names
    assert "~zero_nb.train.stages.ZeROStage3`" in names
    assert "zero_nb.config.UsageError" in names


def test_laying_out_again_changes_nothing_and_drops_what_is_gone(tmp_path, laid_out, monkeypatch):
    monkeypatch.setattr(booktools, "sources", lambda root: laid_out.items())
    assert booktools.lay_out(tmp_path) > 100
    (tmp_path / "notebooks" / "gone.ipynb").write_text("{}", encoding="utf-8")
    assert booktools.lay_out(tmp_path) == 1
    assert not (tmp_path / "notebooks" / "gone.ipynb").exists()
    assert booktools.lay_out(tmp_path) == 0


# --------------------------------------------------------------------------------- the notebooks


@pytest.mark.parametrize("path", SOLVED, ids=lambda path: path.stem)
def test_a_notebook_is_shown_as_it_is_with_its_answers_folded(path):
    before, after = cells(path.read_text("utf-8")), cells(booktools.notebook(path))
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert new.get("outputs") == old.get("outputs")
        tags = old["metadata"].get("tags", [])
        assert ("hide-input" in new["metadata"].get("tags", [])) is ("exercise" in tags)
        if old["cell_type"] == "code":
            kept = [x for x in source(old).split("\n") if x.strip() not in booktools.MARKERS]
            assert source(new).split("\n") == kept


def test_the_start_page_leads_to_pages_and_offers_the_learners_files():
    text = "\n".join(map(source, cells(booktools.notebook(ROOT / "notebooks" / "index.ipynb"))))
    assert "](learner/" not in text
    downloads = set(re.findall(r"\{download\}`download <learner/([^>]+)>`", text))
    read = set(re.findall(r"\]\(([^)#]+\.ipynb)\)", text))
    assert downloads
    assert downloads < read
    assert "[solved](" not in text
    assert "You are reading the **solved edition**" in text


def test_links_to_source_files_lead_to_the_reference():
    assert booktools._page("[a](../zero_nb/train/stages.py)", "docs/a.md") == (
        "[a](../api/zero_nb.train.stages.rst)"
    )
    assert booktools._page("[a](zero_nb/core/__init__.py)", "a.md") == "[a](api/zero_nb.core.rst)"
    assert booktools._page("[a](tools/x.py) `zero_nb/a.py`", "a.md") == (
        "[a](tools/x.py) `zero_nb/a.py`"
    )


def test_every_figure_is_in_the_gallery_with_its_words_and_numbers(laid_out):
    manifest = json.loads((ROOT / "figures" / "manifest.json").read_text("utf-8"))
    page = laid_out["gallery.md"].decode()
    for figure in manifest.values():
        assert f"![{booktools._escaped(figure['alt'])}](figures/{figure['png']})\n" in page
        assert f"figures/{figure['png']}" in laid_out
        assert f"figures/{figure['svg']}" in laid_out
    assert page.count("<summary>The numbers</summary>") == len(manifest)
    assert booktools._escaped("a [b] c_d") == r"a \[b\] c\_d"
    assert booktools._numbers({"a": {"b": 0.12345}, "c": [1, 2.5]}) == "a\n  b: 0.1235\nc: 1, 2.5"


# -------------------------------------------------------------------------------------- the links


def pages(folder, **files):
    """Write pages; return what is broken in them."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return booktools.broken_links(folder)


@pytest.mark.parametrize(
    ("link", "wrong"),
    [
        ('<a href="c.html">', "c.html (no such file)"),
        ('<a href="b.html#no">', "b.html#no (no such place in it)"),
        ('<a href="#no">', "#no (no such place in it)"),
        ('<a href="../b.html">', "../b.html (leads out of the book)"),
        ('<a href="/b.html">', "/b.html (leads out of the book)"),
        ('<img src="p.png">', "p.png (no such file)"),
        ('<script src="https://example.org/x.js">', "from another host"),
        ('<link rel="stylesheet" href="//example.org/x.css"/>', "from another host"),
    ],
)
def test_a_broken_link_is_found(tmp_path, link, wrong):
    found = pages(tmp_path, a=link, b='<p id="yes">')
    assert len(found) == 1
    assert found[0].startswith("a.html: ")
    assert wrong in found[0]


def test_good_links_are_left_alone(tmp_path):
    fine = (
        '<a id="top" href="#top"><a href="d/b.html?x=1#a%20b"><a href="https://example.org">'
        '<a href="mailto:ada@example.org"><img src="data:image/png;base64,AA">'
        '<link rel="next" href="d/b.html">'
    )
    assert pages(tmp_path, a=fine, d__b='<p id="a b"><a href="../a.html#top">') == []
    assert pages(tmp_path, _static__template='<a href="{{ nowhere }}">') == []


# ---------------------------------------------------------------------------------------- MathJax


def test_without_npm_it_is_said_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("MATHJAX", raising=False)
    monkeypatch.setattr(booktools.shutil, "which", lambda name: None)
    with pytest.raises(
        booktools.BookError, match=r"install Node\.js .* or set MATHJAX to the file"
    ):
        booktools.mathjax(tmp_path)


def test_an_npm_that_cannot_fetch_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("MATHJAX", raising=False)
    monkeypatch.setattr(booktools.shutil, "which", lambda name: "npm")
    failed = booktools.subprocess.CompletedProcess([], 1, stdout="no\nnetwork")
    monkeypatch.setattr(booktools.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(booktools.BookError, match=r"\(no network\); go online once"):
        booktools.mathjax(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_file_is_not_taken_for_mathjax(tmp_path, monkeypatch):
    other = tmp_path / "other.js"
    monkeypatch.setenv("MATHJAX", str(other))
    with pytest.raises(booktools.BookError, match="there is no file"):
        booktools.mathjax(tmp_path)
    other.write_text("alert(1)", encoding="utf-8")
    with pytest.raises(booktools.BookError, match=r"is not tex-svg-full\.js of mathjax@3"):
        booktools.mathjax(tmp_path)
    monkeypatch.delenv("MATHJAX")
    (tmp_path / booktools.MATHJAX_FILE).write_text("alert(1)", encoding="utf-8")
    with pytest.raises(booktools.BookError, match="delete it to fetch it anew"):
        booktools.mathjax(tmp_path)


def test_a_file_that_is_there_is_used(tmp_path, monkeypatch):
    kept = tmp_path / booktools.MATHJAX_FILE
    kept.write_bytes(b"the very file")
    monkeypatch.delenv("MATHJAX", raising=False)
    digest = booktools.hashlib.sha256(b"the very file").hexdigest()
    monkeypatch.setattr(booktools, "MATHJAX_SHA256", digest)
    monkeypatch.setattr(booktools.shutil, "which", lambda name: pytest.fail("asked for npm"))
    assert booktools.mathjax(tmp_path) == kept


def test_the_command_says_in_one_line_why_there_is_no_book(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MATHJAX", str(tmp_path / "nothing.js"))
    assert booktools.main(["build", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: there is no file ")
    assert said.err.count("\n") == 1


# -------------------------------------------------------------------------------------- packaging


def test_what_the_book_needs_is_pinned():
    pins = {
        pin.name.lower(): next(iter(pin.specifier)).version
        for pin in map(Requirement, (ROOT / "constraints.txt").read_text("utf-8").split())
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for requirement in map(Requirement, project["optional-dependencies"]["book"]):
        assert pins[requirement.name.lower()] in requirement.specifier
