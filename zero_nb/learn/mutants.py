"""Nine faulty trainers: each is the real trainer with a few lines of one function replaced.

[Note: a fault in the real trainer]
A faulty trainer that is written as a copy drifts away from the real one. So a `Mutant` has no
trainer of its own. It names one function of the library, the lines in it that are right, and the
lines that stand there instead. Inside ``with mutant.applied():`` the function made from the changed
source takes the place of the real one; afterwards the real one is back. If the library changes so
that the right lines are not found any more, that is an error and not a fault that has silently
become none.

Every fault here was met, in some form, in public systems: see the codes of ``tests/README.md``.
"""

import difflib
import inspect
import sys
import textwrap
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import numpy as np

from zero_nb.cluster.world import Transfer
from zero_nb.config import UsageError
from zero_nb.core.flat import FlatLayout
from zero_nb.learn.diff import as_html
from zero_nb.train import given
from zero_nb.train.engine import Engine
from zero_nb.train.optim import GroupedRule
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.scaling import clip_factor
from zero_nb.train.stages import ZeROStage2

__all__ = ["MUTANTS", "Mutant", "PieceDiff"]


@final
@dataclass(frozen=True, repr=False)
class PieceDiff:
    """What a mutant changes, beside the real source.

    Attributes
    ----------
    title : str
        Which function of which file.
    lines : tuple of str
        Code with ``+``, ``-`` or a blank in front; then the functions that the changed lines call.
    """

    title: str
    lines: tuple

    @property
    def changed(self):
        """The lines that were added or removed only (tuple of str)."""
        return tuple(line for line in self.lines if line[0] in "+-")

    def __repr__(self):
        """Return the diff as text: this is what a notebook shows."""
        return "\n".join((self.title, *self.lines))

    def _repr_html_(self):
        """The same, with the changed lines marked for eyes and for screen readers."""
        return as_html(self.title, self.lines)


@final
@dataclass(frozen=True, kw_only=True)
class Mutant:
    """The real trainer with some lines of one function replaced.

    Parameters
    ----------
    name : str
    piece : callable
        The function of the library, such as ``GroupedRule.begin_step``.
    line : str
        One or more whole lines of it, in a row; how far they are indented does not matter.
    faulty : str
        What stands there instead.
    tools : tuple of callable
        Functions that the faulty lines call and that the module of the piece does not know.
    caught_by : str
        The invariant made for this fault, a key of `zero_nb.learn.invariants.INVARIANTS`.

    Raises
    ------
    UsageError
        If the piece is no function of the library, if the lines are not in it exactly once, or if
        what comes out is not Python.
    """

    name: str
    piece: Callable
    line: str
    faulty: str
    tools: tuple = ()
    caught_by: str = ""

    def __post_init__(self):
        """Refuse what could not be applied."""
        if not inspect.isfunction(self.piece) or not self.piece.__module__.startswith("zero_nb."):
            raise UsageError(
                f"the piece must be a function of the library, such as GroupedRule.begin_step; "
                f"got {getattr(self.piece, '__qualname__', type(self.piece).__name__)}"
            )
        self.compiled()

    def source(self):
        """Return the real source of the piece (str)."""
        return textwrap.dedent(inspect.getsource(self.piece))

    def faulty_source(self):
        """Return the source with the faulty lines in it (str)."""
        lines = self.source().split("\n")
        wanted = [line.strip() for line in self.line.strip().split("\n")]
        found = [
            at
            for at in range(len(lines) - len(wanted) + 1)
            if [line.strip() for line in lines[at : at + len(wanted)]] == wanted
        ]
        if len(found) != 1 or not any(wanted):
            raise UsageError(
                f"{self.piece.__qualname__} must have these lines exactly once, and has them "
                f"{len(found)} times: {self.line.strip()!r}; give whole lines as they are in "
                f"the source"
            )
        at = found[0]
        given = textwrap.dedent(self.line).strip("\n").rstrip()
        deeper = (len(lines[at]) - len(lines[at].lstrip())) - (len(given) - len(given.lstrip()))
        instead = textwrap.indent(textwrap.dedent(self.faulty).strip("\n").rstrip(), " " * deeper)
        return "\n".join([*lines[:at], *instead.split("\n"), *lines[at + len(wanted) :]])

    def compiled(self):
        """Return the faulty function."""
        source = self.faulty_source()
        names = self.piece.__globals__ | {tool.__name__: tool for tool in self.tools}
        try:
            exec(compile(source, f"<mutant {self.name}>", "exec"), names)
        except SyntaxError as error:
            raise UsageError(
                f"with these lines {self.piece.__qualname__} is no Python any more: {error.msg} in "
                f"{(error.text or '').strip()!r}"
            ) from None
        return names[self.piece.__name__]

    def diff(self):
        """Return what is changed, a `PieceDiff`, with two lines around it."""
        old, new = (text.rstrip().split("\n") for text in (self.source(), self.faulty_source()))
        found = difflib.unified_diff(old, new, n=2, lineterm="")
        lines = ["  ..." if line.startswith("@@") else f"{line[:1]} {line[1:]}" for line in found]
        for tool in self.tools:
            lines += ["  ", *(f"+ {line}" for line in _code(tool))]
        file = self.piece.__module__.replace(".", "/") + ".py"
        title = f"{self.piece.__qualname__} in {file} (- the real line, + the fault):"
        return PieceDiff(title, tuple(lines[3:]))

    @contextmanager
    def applied(self):
        """Let the faulty function stand in the place of the real one within the block.

        The trainer has to be made and run inside the block.

        Raises
        ------
        UsageError
            If another mutant of the same piece is applied already.
        """
        owner = sys.modules[self.piece.__module__]
        *path, name = self.piece.__qualname__.split(".")
        for step in path:
            owner = getattr(owner, step)
        if vars(owner)[name] is not self.piece:
            raise UsageError(f"{self.piece.__qualname__} is replaced by another mutant already")
        setattr(owner, name, self.compiled())
        try:
            yield self
        finally:
            setattr(owner, name, self.piece)


def _code(function):
    """The source of a function without its one-line docstring."""
    lines = inspect.getsource(function).rstrip().split("\n")
    return [line for line in lines if not line.strip().startswith('"""')]


# ------------------------------------------------------ what faulty lines call and nobody else has


def scaled_by_own_norm(units, max_norm):
    """Clip each rank's shards by the norm of these shards alone."""
    squares_R = sum((unit.own(unit.grad).astype(np.float64) ** 2).sum(axis=1) for unit in units)
    factor_R = [clip_factor(norm, max_norm) for norm in np.sqrt(squares_R)]
    for unit in units:
        unit.grad *= np.array(factor_R, np.float32)[:, None]


def gather_by_doubling(world, own_RS, out_RF, itemsize, label):
    """Gather in rounds; each doubles the shards that a rank has. Ranks are rows of one array."""
    shard = own_RS.shape[1]
    slices = out_RF.reshape(world.size, world.size, shard)
    have = 1
    while 2 * have <= world.size:
        for rank in range(world.size):
            for owner in (np.arange(rank + have, rank + 2 * have) % world.size).tolist():
                slices[rank, owner] = slices[owner, owner]
        have *= 2
    sent = (have - 1) * shard
    world.log.add(Transfer("all_gather", "param", sent, sent * itemsize, label))


def drawn_by(ranks, values):
    """Return what each rank draws with a seed of its own, (R, *shape): same values, other order."""
    order = [np.random.default_rng(rank).permutation(values.size) for rank in ranks]
    return np.stack([values.reshape(-1)[turn].reshape(values.shape) for turn in order])


# ----------------------------------------------------------------------------------- the nine


_NINE = (
    Mutant(
        name="local clipping",
        piece=ZeROOptimizer._apply,
        line="""
            for unit in units:
                self.stage_of(unit).step(unit, grad_scale)
        """,
        faulty="""
            scaled_by_own_norm(units, self.max_grad_norm)
            for unit in units:
                self.stage_of(unit).step(unit, 1.0)
        """,
        tools=(scaled_by_own_norm,),
        caught_by="clip norm",
    ),
    Mutant(
        name="mean of means",
        piece=Engine._loss,
        line="lambda c: self.model.loss(outputs[c], chunks[c].targets, global_count), len(chunks)",
        faulty="""
            lambda c: self.model.loss(
                outputs[c],
                chunks[c].targets,
                self.world.size * self.model.count(chunks[c].targets[0]),
            ),
            len(chunks),
        """,
        caught_by="one batch",
    ),
    Mutant(
        name="dropped tail",
        piece=FlatLayout.spans,
        line="return self._spans(rank * self.shard_numel, (rank + 1) * self.shard_numel)",
        faulty="""
            whole = self.numel // self.world_size * self.world_size
            return self._spans(rank * self.shard_numel, min((rank + 1) * self.shard_numel, whole))
        """,
        caught_by="shard cover",
    ),
    Mutant(
        name="stale gather",
        piece=ZeROStage2.step,
        line="""
            self.world.all_gather(
                unit.own_param, out=unit.param, fmt=unit.recipe.param, label=unit.name
            )
        """,
        faulty="""
            gather_by_doubling(
                self.world, unit.own_param, unit.param, unit.recipe.param.itemsize, unit.name
            )
        """,
        tools=(gather_by_doubling,),
        caught_by="replica equality",
    ),
    Mutant(
        name="moment reset",
        piece=GroupedRule.update,
        line="{name: moment.reshape(-1) for name, moment in optim.moments.items()},",
        faulty="{name: moment.copy().reshape(-1) for name, moment in optim.moments.items()},",
        caught_by="steps and moments",
    ),
    Mutant(
        name="16-bit master",
        piece=GroupedRule.update,
        line="""
                param_format=None if in_place else unit.recipe.param,
            )
        """,
        faulty="""
                param_format=None if in_place else unit.recipe.param,
            )
            if not in_place:
                bits = unit.recipe.param.round(optim.master)
                unit.recipe.param.widen(bits, out=optim.master)
        """,
        caught_by="param = round(master)",
    ),
    Mutant(
        name="tied weight twice",
        piece=given.check_params,
        line="first = name_of.setdefault(id(array), name)",
        faulty="""
            array = array.copy()
            first = name_of.setdefault(id(array), name)
        """,
        caught_by="tied once",
    ),
    Mutant(
        name="stuck step counter",
        piece=GroupedRule.begin_step,
        line="self.steps[name] += 1",
        faulty="self.steps[name] = 1",
        caught_by="steps and moments",
    ),
    Mutant(
        name="a seed per rank",
        piece=ZeROOptimizer._make_unit,
        line="""
            for parameter in layout.names:
                layout.view(full_RF, parameter)[...] = params[parameter]
            self.world.broadcast(full_RF, purpose="other", label=name)
        """,
        faulty="""
            for parameter in layout.names:
                layout.view(full_RF, parameter)[...] = drawn_by(self.world.ranks, params[parameter])
        """,
        tools=(drawn_by,),
        caught_by="replica equality",
    ),
)

MUTANTS = {mutant.name: mutant for mutant in _NINE}
"""The nine, by name."""
