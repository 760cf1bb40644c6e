"""The book: the solved notebooks, the pages of docs/ and the reference, as static HTML.

`tools/booktools.py` lays the sources out and calls Sphinx with this file; ``make book`` calls it.
Nothing in a page may need another host: no fonts, no scripts, no pictures from elsewhere.
"""

import ast
import functools
import importlib.metadata
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.domains.python import PyObject

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]  # the package of this tree, whatever is installed

import booktools  # noqa: E402

project = "zero_nb"
author = "the authors of zero_nb"
copyright = "the authors of zero_nb, MIT licence"  # the name is Sphinx's
try:
    release = importlib.metadata.version("zero-nb")
except importlib.metadata.PackageNotFoundError:  # a tree that is not installed
    release = "0"
version = release
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]

# --------------------------------------------------------------------------------- the notebooks

exclude_patterns = ["notebooks/learner/**"]  # to be downloaded, not to be read
nb_execution_mode = "off"  # the outputs are in the files, and the tests hold them to what is true
nb_merge_streams = True
nb_ipywidgets_js = {}  # the only scripts that would come from another host; no widget needs them
nb_code_prompt_show = "Show the answer"
nb_code_prompt_hide = "Hide the answer"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

# ---------------------------------------------------------------------------------- the reference

default_role = "py:obj"  # `name` in a docstring
add_module_names = False
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
viewcode_line_numbers = True

# --------------------------------------------------------------------------------------- the pages

# MathJax lies in the static folder that tools/booktools.py fills; pages without formulas load none.
mathjax_path = "mathjax/tex-svg-full.js"
html_theme = "sphinx_book_theme"
html_title = "zero_nb"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_favicon = "_static/icon.svg"
html_domain_indices = False  # the reference lists the modules, by room
html_show_sphinx = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "collapse_navigation": True,  # the branch one is in: half the time that a build takes
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the search is in the sidebar
    "navigation_with_keys": False,  # the arrow keys belong to the sliders
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "toc_title": "On this page",
    "use_download_button": True,
    "use_fullscreen_button": False,
    "use_source_button": False,
    "use_edit_page_button": False,
    "use_issues_button": False,
    "use_repository_button": False,
}

_ANCHOR = re.compile(r'<(?:dt|a|span|div|p|h\d)\b[^>]*\bid="([^"]+)"')


def anchors_of_outputs(app, env):
    """Tell MyST of the anchors that outputs bring along, so that links to them are checked too."""
    for docname in sorted(env.found_docs):
        if docname.startswith("notebooks/"):
            slugs = env.metadata[docname].setdefault("myst_slugs", {})
            for raw in env.get_doctree(docname).findall(nodes.raw):
                for anchor in _ANCHOR.findall(raw.astext()):
                    slugs.setdefault(anchor, (0, anchor, anchor))


def names_as_python_reads_them(app, doctree):
    """Look a type up where Python would: in its module, then where that has it from.

    By itself Sphinx takes any object of that name, of which there may be several, and links the
    words of "int, elements" to whatever has a field `elements`.
    """
    for node in doctree.findall(addnodes.pending_xref):
        if node.get("refdomain") == "py" and node.attributes.pop("refspecific", None):
            module = sys.modules.get(node.get("py:module"))
            home = passed_on(module.__file__).get(node["reftarget"]) if module else None
            if home:
                node["reftarget"] = f"{home}.{node['reftarget']}"
    # That a class is an object needs no line.
    for paragraph in [*doctree.findall(nodes.paragraph)]:
        if paragraph.astext() == "Bases: object":
            paragraph.parent.remove(paragraph)


@functools.cache
def passed_on(file):
    """Names that a module has from elsewhere in the package, each with where it is made."""
    return booktools.passed_on(ast.parse(Path(file).read_text(encoding="utf-8")))


def one_sidebar_for_all_sources(app, pagename, templatename, context, doctree):
    """Make the contents beside pages that are not in them once for each depth, not 100 times."""
    make = context.get("toctree")
    if pagename in app.env.found_docs or make is None:
        return
    depth = pagename.count("/")

    def made_before(**options):
        key = (depth, tuple(sorted(options.items())))
        if key not in SIDEBARS:
            SIDEBARS[key] = make(**options)
        return SIDEBARS[key]

    context["toctree"] = made_before


SIDEBARS = {}

# What docstrings call Attributes, the pages should, too.
for field in PyObject.doc_field_types:
    if field.name == "variable":
        field.label = "Attributes"


def setup(app):
    """Connect what Sphinx does not know by itself."""
    app.connect("env-updated", anchors_of_outputs)
    app.connect("doctree-read", names_as_python_reads_them)
    app.connect("html-page-context", one_sidebar_for_all_sources, priority=400)  # then the theme
    return {"parallel_read_safe": True, "parallel_write_safe": True}
