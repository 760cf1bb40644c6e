"""The book as a reader meets it: made once, served from here, every other host out of reach."""

import functools
import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import booktools

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = {"laptop": (1366, 768), "phone": (390, 844)}
# Beside all notebooks and all pages at the top.
OF_EACH_KIND = (
    "notebooks/teacher.html",
    "docs/architecture.html",
    "docs/planner.html",
    "api/index.html",
    "api/room_zero_nb.train.html",
    "api/zero_nb.core.flat.html",
    "api/zero_nb.train.stages.html",
    "_modules/zero_nb/train/stages.html",
)

# What sticks out to the right of the page, other than what scrolls by itself or slides in.
STICKS_OUT = """() => {
  const width = document.documentElement.clientWidth;
  const kept = element => {
    for (let e = element.parentElement; e; e = e.parentElement)
      if (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(e).overflowX)) return true;
    return false;
  };
  const out = [...document.querySelectorAll('.bd-article *')].filter(element => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.right > width + 1 && !kept(element);
  }).map(element => `${element.tagName} ${element.textContent.slice(0, 40)}`);
  const page = document.documentElement.scrollWidth;
  return page > width ? [`the page is ${page} wide`, ...out] : out;
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The book, made once for all processes that test."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    out = shared / "the_book"
    try:
        out.mkdir()
    except FileExistsError:  # another process is at it
        end = time.monotonic() + 300
        while not (out / "said").exists() and time.monotonic() < end:
            time.sleep(0.5)
    else:
        kept = ROOT / "build" / "book" / "mathjax" / booktools.MATHJAX_FILE
        known = {"MATHJAX": str(kept)} if kept.is_file() else {}  # else npm is asked
        done = subprocess.run(
            [sys.executable, "tools/booktools.py", "build", "--out", str(out)],
            cwd=ROOT,
            env=known | os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            check=False,
        )
        said = out / "said.new"
        said.write_text(f"{done.returncode}\n{done.stdout}", encoding="utf-8")
        said.rename(out / "said")
    status, _, said = (out / "said").read_text(encoding="utf-8").partition("\n")
    if status != "0":
        pytest.fail(f"make book failed: {said[-3000:]}")
    return out / "html"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server that does not write down what it is asked."""

    def log_message(self, *args):
        """Say nothing."""


@pytest.fixture(scope="module")
def home(folder):
    """Serve the book; its address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class Reader:
    """A page, what it asked of other hosts, and what went wrong in it."""

    def __init__(self, context, home):
        self.home, self.elsewhere, self.errors = home, [], []
        context.route("**/*", self._only_here)
        self.page = context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "response",
            lambda answer: (
                answer.status >= 400 and self.errors.append(f"{answer.status} {answer.url}")
            ),
        )

    def _only_here(self, route):
        """Let pass what goes to the book's own host."""
        if route.request.url.startswith((self.home, "data:", "blob:")):
            route.continue_()
        else:
            self.elsewhere.append(route.request.url)
            route.abort()

    def open(self, name):
        """Open a page of the book."""
        self.page.goto(self.home + name)
        return self.page

    @property
    def name(self):
        """The page that is open."""
        return self.page.url.removeprefix(self.home)


@pytest.fixture(params=[("laptop", "light"), ("phone", "dark")], ids="-".join)
def reader(request, browser, home):
    """A reader at a laptop by day, and one at a phone by night."""
    width, scheme = request.param
    (across, down) = WIDTHS[width]
    context = browser.new_context(viewport={"width": across, "height": down}, color_scheme=scheme)
    reader = Reader(context, home)
    yield reader
    context.close()
    assert reader.elsewhere == []
    assert reader.errors == []


@pytest.fixture
def laptop(browser, home):
    """A reader at a laptop."""
    context = browser.new_context(viewport={"width": 1366, "height": 768})
    reader = Reader(context, home)
    yield reader
    context.close()
    assert reader.elsewhere == []
    assert reader.errors == []


def test_no_page_asks_another_host_sticks_out_or_has_a_picture_without_words(reader, folder):
    names = {path.relative_to(folder).as_posix() for path in folder.glob("*.html")}
    names |= {path.relative_to(folder).as_posix() for path in folder.glob("notebooks/*.html")}
    for name in sorted(names | set(OF_EACH_KIND)):
        page = reader.open(name)
        assert page.evaluate(STICKS_OUT) == [], name
        for alt in page.evaluate("[...document.querySelectorAll('article img')].map(i => i.alt)"):
            assert len(alt) >= 20, name
    assert reader.elsewhere == []


def test_a_request_to_another_host_would_be_seen(browser, home):
    context = browser.new_context()
    reader = Reader(context, home)
    reader.open("index.html")
    reader.page.evaluate("fetch('https://example.org/x').catch(() => 0)")
    context.close()
    assert reader.elsewhere == ["https://example.org/x"]


def test_next_and_previous_lead_through_the_course(laptop, folder):
    course = [
        "index.html",
        "notebooks/index.html",
        *sorted(f"notebooks/{path.name}" for path in folder.glob("notebooks/[0-9]*.html")),
        *sorted(f"notebooks/{path.name}" for path in folder.glob("notebooks/[AB]_*.html")),
    ]
    laptop.open(course[0])
    for name in course[1:]:
        laptop.page.locator(".prev-next-footer a.right-next").click()
        laptop.page.wait_for_url(f"**/{name}")
    laptop.page.locator(".prev-next-footer a.left-prev").click()
    laptop.page.wait_for_url(f"**/{course[-2]}")


def test_the_sidebar_and_the_links_of_a_notebook_lead_on(laptop):
    page = laptop.open("index.html")
    page.locator(".bd-sidebar-primary nav a", has_text="04 · Stage 1").click()
    page.wait_for_url("**/04_stage_1_shard_the_optimizer.html")
    # A word of the glossary, found in the output of another notebook.
    page.locator("article a[href='B_glossary.html#padding']").first.click()
    page.wait_for_url("**/B_glossary.html#padding")
    assert page.locator("dt#padding").is_visible()


def test_an_answer_is_folded_until_it_is_asked_for(laptop):
    page = laptop.open("notebooks/04_stage_1_shard_the_optimizer.html")
    answer = page.locator("details.hide, details.admonition").first
    code = answer.locator("pre").first
    assert not code.is_visible()
    answer.locator("summary").first.press("Enter")
    assert code.is_visible()
    assert "guess" in code.inner_text()
    assert "BEGIN SOLUTION" not in page.content()


def test_the_keyboard_moves_a_slider_and_the_picture(laptop, folder):
    with_slider = [
        path for path in sorted(folder.glob("notebooks/*.html"))
        if "data-zero-nb-slider" in path.read_text(encoding="utf-8")
    ]  # fmt: skip
    assert with_slider
    for path in with_slider:
        page = laptop.open(f"notebooks/{path.name}")
        box = page.locator("[data-zero-nb-slider]").first
        slider = box.locator("input[type=range]")
        slider.focus()
        seen, told = [], []
        page.keyboard.press("Home")
        for _ in range(int(slider.get_attribute("max")) + 1):
            shown = box.locator("img:visible")
            assert shown.count() == 1
            seen.append(shown.get_attribute("src"))
            told.append(slider.get_attribute("aria-valuetext"))
            assert box.locator("output").inner_text() in told
            page.keyboard.press("ArrowRight")
        assert len(set(seen)) == len(seen) == len(set(told)) > 1
        # The arrow keys have not left the page.
        assert laptop.name == f"notebooks/{path.name}"


def test_formulas_are_set(laptop):
    page = laptop.open("docs/architecture.html")
    page.wait_for_selector("mjx-container svg")
    formulas = page.locator("article .math")
    assert formulas.count() >= 5
    assert page.locator("article mjx-container > svg").count() == formulas.count()
    assert page.locator("article mjx-container mjx-assistive-mml").count() == formulas.count()
    assert page.locator("mjx-merror, [data-mml-node=merror]").count() == 0
    assert "\\frac" not in page.locator("article").inner_text()


def test_the_reference_describes_and_shows_the_source(laptop):
    page = laptop.open("api/zero_nb.train.stages.html")
    assert page.locator("dt#zero_nb\\.train\\.stages\\.ZeROStage3").is_visible()
    page.locator("a[href$='_modules/zero_nb/train/stages.html#ZeROStage3']").first.click()
    page.wait_for_url("**/_modules/zero_nb/train/stages.html**")
    assert "class" in page.locator("#ZeROStage3").inner_text()


def test_a_learners_notebook_can_be_fetched(laptop):
    page = laptop.open("notebooks/index.html")
    with page.expect_download() as download:
        page.locator("a.download", has_text="download").first.click()
    content = Path(download.value.path()).read_bytes()
    assert content == (ROOT / "notebooks/learner/00_see_the_saving_first.ipynb").read_bytes()


def test_the_search_finds_a_word_without_a_server(laptop):
    page = laptop.open("search.html?q=reduce_scatter")
    page.wait_for_selector("#search-results li a")
    assert page.locator("#search-results li a").count() > 3
