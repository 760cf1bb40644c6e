"""The building's rules: who may import whom, what import costs, what a tracked file may say."""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import zero_nb

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zero_nb"
MODULES = sorted(
    [zero_nb.__name__]
    + [info.name for info in pkgutil.walk_packages(zero_nb.__path__, f"{zero_nb.__name__}.")]
)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run_python(code, *arguments, cwd=ROOT):
    """Run a program in a fresh interpreter; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, check=False, encoding="utf-8",
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


# -------------------------------------------------------------------------------- who imports whom

LINT = """
import sys
sys.path.insert(0, sys.argv[1])
import zero_nb
assert zero_nb.__file__.startswith(sys.argv[1]), zero_nb.__file__
from importlinter.cli import lint_imports
sys.exit(lint_imports(sys.argv[2], no_cache=True, no_logo=True))
"""


def test_the_import_contracts_are_kept():
    code, said = run_python(LINT, ROOT, ROOT / "pyproject.toml")
    assert code == 0, said
    assert "0 broken" in said


FORBIDDEN = [
    ("core/flat.py", "import zero_nb.cluster.world"),
    ("cluster/world.py", "import zero_nb.train.units"),
    ("train/data.py", "import zero_nb.theory.memory"),
    ("theory/memory.py", "import zero_nb.train.units"),
    ("theory/memory.py", "import zero_nb.core.flat"),
    ("theory/traffic.py", "def f():\n    from zero_nb.cluster import world"),
    ("train/units.py", "import zero_nb.show.style"),
    ("train/units.py", "from zero_nb.core import kernels"),
    ("cluster/world.py", "import zero_nb.core.kernels"),
    ("config.py", "import numpy"),
    ("train/units.py", "def f():\n    import matplotlib"),
    ("core/flat.py", "def f():\n    import ipywidgets"),
    ("cluster/world.py", "def f():\n    import mpi4py"),
    ("a_new_room.py", "x = 1"),
]


@pytest.mark.parametrize(("file", "line"), FORBIDDEN)
def test_the_contracts_see(file, line, tmp_path):
    copy = tmp_path / "zero_nb"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with open(copy / file, "a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    code, said = run_python(LINT, tmp_path, ROOT / "pyproject.toml")
    assert code != 0, said
    assert "BROKEN" in said, said


# ------------------------------------------------------------------------------ what import costs

HEAVY = (
    "numba", "numpy", "scipy", "sklearn", "matplotlib", "IPython", "ipywidgets", "mpi4py",
    "typer", "rich", "tqdm", "psutil", "threadpoolctl",
)  # fmt: skip
LOADED = """
import importlib, json, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded(*modules):
    """The top-level packages that are in memory after importing these modules, and no others."""
    code, said = run_python(LOADED, ",".join(modules))
    assert code == 0, said
    return set(json.loads(said))


def test_importing_the_package_loads_nothing_heavy():
    assert loaded("zero_nb") & set(HEAVY) == set()


def test_config_needs_the_standard_library_only():
    assert loaded("zero_nb.config") - {"zero_nb"} <= loaded("json") | sys.stdlib_module_names


def test_no_module_loads_a_drawing_or_learning_library_until_it_is_used():
    found = loaded(*(name for name in MODULES if not name.endswith("__main__")))
    # (Numba itself loads the root of scipy.)
    assert found & {"matplotlib", "sklearn", "IPython", "ipywidgets", "mpi4py"} == set()


def test_every_public_name_can_be_had_and_is_listed():
    assert len(zero_nb.__all__) == len(set(zero_nb.__all__)) > 10
    for name in zero_nb.__all__:
        assert getattr(zero_nb, name) is not None
    assert set(zero_nb.__all__) <= set(dir(zero_nb))
    with pytest.raises(AttributeError, match="no_such_name"):
        zero_nb.no_such_name  # noqa: B018


# ------------------------------------------------------------------------------------ what is said


def public_objects(module):
    """Name and object of what a module defines for others: functions, classes, their members."""
    for name, thing in vars(module).items():
        if name.startswith("_") or not (inspect.isfunction(thing) or inspect.isclass(thing)):
            continue
        if thing.__module__ != module.__name__:
            continue
        yield name, thing
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (
                    inspect.isfunction(value)
                    or isinstance(value, property | classmethod | staticmethod)
                ):
                    # Through the class, so that an override may rely on what it overrides.
                    yield f"{name}.{member}", inspect.getattr_static(thing, member), thing, member


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_says_what_it_is(name):
    if name.endswith("__main__"):
        return
    module = importlib.import_module(name)
    silent = [] if module.__doc__ else ["the module"]
    for label, thing, *member in public_objects(module):
        doc = inspect.getdoc(getattr(*member)) if member else thing.__doc__
        # A dataclass without a docstring gets its signature as one.
        if not doc or doc.startswith(f"{label}("):
            silent.append(label)
    assert silent == []


def test_ruff_finds_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."],
        cwd=ROOT, capture_output=True, text=True, check=False, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# ----------------------------------------------------------------------------------- the kernels


def decorators(function):
    """The names of a function's decorators, called or not."""
    for node in function.decorator_list:
        target = node.func if isinstance(node, ast.Call) else node
        yield target.attr if isinstance(target, ast.Attribute) else target.id


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_compiled_functions_are_private_and_live_in_one_file(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    compiled = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and {"njit", "jit", "_jit", "vectorize", "guvectorize"} & set(decorators(node))
    ]
    imports = {
        alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        (node.module or "").partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    if path == PACKAGE / "core" / "kernels.py":
        assert compiled
        assert [name for name in compiled if not name.startswith("_")] == []
        assert "fastmath" not in {
            keyword.arg for node in ast.walk(tree) if isinstance(node, ast.Call)
            for keyword in node.keywords
        }  # fmt: skip
    else:
        assert compiled == []
        # Threads may be counted and set elsewhere in core; nothing above it knows of Numba.
        assert "numba" not in imports or path.parent == PACKAGE / "core"


# ------------------------------------------------------------------------------------- packaging


def tracked_files():
    """Every file under version control, or every file of an unpacked source archive."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout.decode()
        names = [name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        hidden = re.compile(r"(^|/)(\.(?!ci/)[^/]*|__pycache__|[^/]*\.egg-info)(/|$)")
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()]
        names = [name for name in names if not hidden.search(name)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


# Spelled so that this file does not contain what it looks for.
ONE_MACHINE = re.compile(r"(?<![\w.:/<~*-])/(?:home|Users|root|work|workspace|mnt|srv)/(?!ada\b)")
REGISTRY = re.compile(
    r"(?:index|find)[-_](?:url|links)\s*[= ]\s*\S+:/"
    r"|pythonhosted\.|/simple/|registry\.npmjs|file:///"
)
EMBEDDED = re.compile(r"data:[\w/+.-]+;base64,[A-Za-z0-9+/=]+")


def complaints(text):
    """The paths of one machine and the package registries that a text names."""
    text = EMBEDDED.sub("", text)
    return [hit.group() for rule in (ONE_MACHINE, REGISTRY) for hit in rule.finditer(text)]


def test_no_tracked_file_names_one_machine_or_a_registry():
    found = {}
    for path in tracked_files():
        if path.suffix in {".png", ".npz", ".npy"} or path == Path(__file__):
            continue
        hits = complaints(path.read_text(encoding="utf-8"))
        if hits:
            found[path.relative_to(ROOT).as_posix()] = hits
    assert found == {}
    assert len(tracked_files()) > 20


@pytest.mark.parametrize(
    "text",
    [
        f"open('/{'root'}/x')",  # filled in: this file is tracked, too
        f"see /{'work'}/notes.md",
        "cd /home/bob/project",
        "--index-url https://example.org/simple",
        f"https://files.{'pythonhosted'}.org/packages/a.whl",
        "pip_find_links = file:///some/where",
    ],
)
def test_such_a_name_would_be_seen(text):
    assert complaints(text) != []


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/home/page",
        f"~/{'work'}/",
        "a/root/b",
        "and/or",
        f"data:image/png;base64,/{'root'}/aa",
    ],
)
def test_what_only_looks_like_one_is_left_alone(text):
    assert complaints(text) == []


def normal(name):
    """A package name as the registry compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned_once_and_without_a_url():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for pin in pins:
        assert pin.url is None
        assert [spec.operator for spec in pin.specifier] == ["=="], str(pin)
    names = [normal(pin.name) for pin in pins if pin.marker is None or pin.marker.evaluate()]
    assert len(names) == len(set(names))
    versions = {normal(pin.name): next(iter(pin.specifier)).version for pin in pins}
    project = PYPROJECT["project"]
    wanted = list(project["dependencies"])
    for extra in ("lab", "dev"):
        wanted += project["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        assert normal(requirement.name) in versions, requirement.name
        assert versions[normal(requirement.name)] in requirement.specifier, str(requirement)


def test_every_import_of_the_package_is_a_declared_dependency():
    declared = {normal(Requirement(text).name) for text in PYPROJECT["project"]["dependencies"]}
    for extra in ("lab", "mpi", "dev"):
        for text in PYPROJECT["project"]["optional-dependencies"][extra]:
            declared.add(normal(Requirement(text).name))
    distribution = {"sklearn": "scikit-learn", "IPython": "ipykernel", "PIL": "matplotlib"}
    distribution |= {"yaml": "pyyaml"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top != "zero_nb":
                    assert normal(distribution.get(top, top)) in declared, f"{path.name}: {name}"


def test_the_version_is_in_one_place():
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", zero_nb.__version__)


def test_ci_runs_the_tests():
    script = ROOT / ".ci" / "run"
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert "\nmake test\n" in text
    if sys.platform != "win32":
        assert script.stat().st_mode & stat.S_IXUSR


def test_notebooks_are_run_by_plain_pytest(pytestconfig):
    option = pytestconfig.option
    assert option.nbval
    assert option.nbval_current_env
    assert option.nbval_sanitize_with == "nbval.cfg"
    assert option.nbval_cell_timeout == 60
    assert pytestconfig.getini("testpaths") == ["tests", "notebooks"]
    assert pytestconfig.getini("filterwarnings") == ["error"]
