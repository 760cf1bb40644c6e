"""Read the YAML files beside this module: every word in them means what it says."""

from functools import cache
from importlib.resources import files
from typing import ClassVar

__all__ = ["read_yaml"]


def read_yaml(prefix):
    """Read all files whose names begin with a prefix, in alphabetical order.

    Parameters
    ----------
    prefix : str
        Such as ``"quiz"`` for ``quiz.yaml`` and ``quiz_01.yaml``.

    Returns
    -------
    list
        Their entries, one after another.
    """
    import yaml

    folder = files("zero_nb.learn")
    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.name.startswith(prefix) and path.name.endswith(".yaml")
    )
    found = []
    for name in names:
        text = folder.joinpath(name).read_text(encoding="utf-8")
        found += yaml.load(text, Loader=_loader())
    return found


@cache
def _loader():
    """A safe loader in which off, on, yes and no are words; only true and false are booleans."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar = {
            first: [
                (tag, pattern)
                for tag, pattern in resolvers
                if tag != "tag:yaml.org,2002:bool" or first in "tTfF"
            ]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    return Loader
