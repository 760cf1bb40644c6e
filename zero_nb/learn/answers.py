"""Take the answers out of a notebook and run them without the rest.

[Note: an answer stands on its own]
The cell with an answer has the tag ``exercise`` and its key. It may use what the notebook imports
and what other such cells define, nothing else, so that it can be run without the minutes that the
rest of a notebook may take. Cells are found by their tags, which an editor keeps, whatever a
learner has added, moved or deleted around them.
"""

import ast
import linecache
import types
from dataclasses import dataclass
from typing import final

from zero_nb.learn.limits import run_limited

__all__ = ["Answers", "read_answers", "run_answers"]


@final
@dataclass(frozen=True)
class Answers:
    """What a notebook has to say about its exercises.

    Attributes
    ----------
    imports : tuple of str
        Every import statement, in order.
    cells : tuple of (str, str)
        Key and source of each answer cell, in order; a cell that was split comes twice.
    checked : dict of str to str
        By key: the expression that the notebook gives to ``check``.
    guessed : dict of str to str
        By key: the expression that the notebook gives to ``compare_guess``.
    """

    imports: tuple
    cells: tuple
    checked: dict
    guessed: dict


def read_answers(notebook):
    """Find the answers in a notebook.

    Parameters
    ----------
    notebook : dict
        A version 4 notebook as JSON was read.

    Returns
    -------
    Answers
        Cells that are no Python are left out.
    """
    imports, cells, checked, guessed = [], [], {}, {}
    for cell in notebook.get("cells", ()):
        if cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        source = _plain(source if isinstance(source, str) else "".join(source))
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            tree = ast.Module([], [])
        imports += [ast.unparse(node) for node in tree.body if _is_import(node)]
        for node in ast.walk(tree):
            for name, found in (("check", checked), ("compare_guess", guessed)):
                if _is_call(node, name) and len(node.args) > 1:
                    key = node.args[0]
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        found[key.value] = ast.unparse(node.args[1])
        tags = cell.get("metadata", {}).get("tags", ())
        if "exercise" in tags:
            cells += [(tag, source) for tag in tags if "-" in tag]
    return Answers(tuple(imports), tuple(cells), checked, guessed)


def run_answers(answers):
    """Run the answer cells of a notebook, and nothing else of it.

    Parameters
    ----------
    answers : Answers
        Each cell has the time that a check has, see `zero_nb.learn.limits`.

    Returns
    -------
    values : dict of str to object
        By key: the answer; ``...`` where there is none.
    errors : dict of str to str
        By key: the error in which its cell ended.
    """
    # A real module, so that classes in it can find themselves.
    module = types.ModuleType("answers")
    values, errors = {}, {}
    for line in answers.imports:
        _run(line, "<import>", module)
    for number, (key, source) in enumerate(answers.cells):
        error = _run(_without_checks(source), f"<answer {key}, {number}>", module)
        if error:
            errors[key] = error
    for key, expression in (answers.checked | answers.guessed).items():
        try:
            values[key] = eval(expression, module.__dict__)
        except BaseException:
            values[key] = ...
    return values, errors


def _run(source, name, module):
    """Run some lines in a module; return the error in which they ended, or an empty text."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        code = compile(source, name, "exec")
        run_limited(lambda: exec(code, module.__dict__))
    except Exception as error:  # the next answer has its turn
        return f"{type(error).__name__}: {error}"
    return ""


def _plain(source):
    """A cell's source without the lines that only a notebook understands."""
    lines = source.split("\n")
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines)


def _without_checks(source):
    """A cell's source without calls of ``check``; as it is if it is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return source
    lines = source.split("\n")
    for node in tree.body:
        if isinstance(node, ast.Expr) and _is_call(node.value, "check"):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(lines)


def _is_import(node):
    """Whether a statement imports something."""
    return isinstance(node, ast.Import | ast.ImportFrom)


def _is_call(node, name):
    """Whether a node calls a function of this name."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
