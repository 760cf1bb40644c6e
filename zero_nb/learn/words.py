"""The words of the course, each with one meaning: from ``glossary.yaml``."""

import html
import re
from dataclasses import dataclass
from functools import cache
from typing import final

from zero_nb.config import UsageError
from zero_nb.learn.files import read_yaml

__all__ = ["Glossary", "Term", "glossary", "glossary_terms", "term", "with_tooltips"]


@final
@dataclass(frozen=True, repr=False)
class Term:
    """A word and what it means here.

    Attributes
    ----------
    name : str
    text : str
        One to three sentences.
    notebook : str
        Where it is explained, such as ``"04"``.
    symbol : str
        The letter for it in formulas and code, or empty.
    also : tuple of str
        Other words for it, here or elsewhere.
    """

    name: str
    text: str
    notebook: str
    symbol: str = ""
    also: tuple[str, ...] = ()

    @property
    def anchor(self):
        """The fragment under which notebook B shows it (str)."""
        return self.name.lower().replace(" ", "-")

    def __repr__(self):
        """Return word and meaning: this is what a notebook shows."""
        return f"{self.name}: {self.text}"

    def _repr_html_(self):
        """The word with its meaning as its tooltip, and again in view."""
        return (
            f'<p><dfn title="{html.escape(self.text)}">{html.escape(self.name)}</dfn>: '
            f"{html.escape(self.text)}</p>"
        )


@cache
def glossary_terms():
    """Return every `Term` by its name (dict), in alphabetical order."""
    terms = [
        Term(
            entry["term"],
            " ".join(entry["text"].split()),
            str(entry["notebook"]),
            str(entry.get("symbol", "")),
            tuple(entry.get("also", ())),
        )
        for entry in read_yaml("glossary")
    ]
    return {entry.name: entry for entry in sorted(terms, key=lambda entry: entry.name.lower())}


def term(name):
    """Return one `Term`.

    Raises
    ------
    UsageError
        If it is not in the glossary.
    """
    found = glossary_terms().get(name)
    if found is None:
        raise UsageError(f"{name!r} is not in the glossary; add it to glossary.yaml")
    return found


@final
@dataclass(frozen=True, repr=False)
class Glossary:
    """A list of words and meanings.

    Attributes
    ----------
    terms : tuple of Term
    """

    terms: tuple[Term, ...]

    def __repr__(self):
        """Return one line a word: what the notebook tests compare."""
        return "\n".join(map(repr, self.terms))

    def _repr_html_(self):
        """A description list."""
        items = "".join(
            f'<dt id="{entry.anchor}"><dfn>{html.escape(entry.name)}</dfn>{_more(entry)}</dt>'
            f"<dd>{html.escape(entry.text)} ({_where(entry)})</dd>"
            for entry in self.terms
        )
        return f"<dl>{items}</dl>"


def _more(entry):
    """Symbol and other words, in brackets."""
    more = [entry.symbol, *entry.also]
    told = ", ".join(html.escape(word) for word in more if word)
    return f" ({told})" if told else ""


def _where(entry):
    """Where it is explained."""
    return f"notebook {html.escape(entry.notebook)}"


def glossary(*names):
    """Show some words and what they mean, or all.

    Parameters
    ----------
    *names : str
        All words if none is given.

    Returns
    -------
    Glossary
    """
    return Glossary(tuple(map(term, names)) if names else tuple(glossary_terms().values()))


def with_tooltips(text):
    """Give the first use of each word of the glossary its meaning as a tooltip.

    Parameters
    ----------
    text : str
        Plain text.

    Returns
    -------
    str
        HTML. Words are found whole, in the singular or with an s; longer ones win.
    """
    known = {name.lower(): entry for name, entry in glossary_terms().items()}
    names = sorted(known, key=len, reverse=True)
    seen = set()

    def marked(hit):
        word = hit.group()
        name = word.lower() if word.lower() in known else word.lower().removesuffix("s")
        if name in seen:
            return word
        seen.add(name)
        return f'<dfn title="{html.escape(known[name].text)}">{word}</dfn>'

    pattern = "|".join(re.escape(html.escape(name)) for name in names)
    return re.sub(rf"(?<![\w-])(?:{pattern})s?(?![\w-])", marked, html.escape(text), flags=re.I)
