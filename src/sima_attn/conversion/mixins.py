"""Classes of other libraries with a mixin of ours before them, whose objects can be copied and pickled."""

from functools import cache
from typing import Any


class Mixin:
    """Base of the mixins for `with_mixin`. Pickle stores the two classes: the mixed one has no importable name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, type(self).__bases__, vars(self)


@cache
def with_mixin(mixin: Any, cls: Any) -> Any:
    """The class with the mixin before it: the same one on every call, under the name of `cls`.

    transformers looks classes up by their name and module, so both stay.
    """
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (mixin, cls), names)


def without_mixin(cls: type) -> type:
    """The class that `with_mixin` was given; any other class is returned as it is."""
    return cls.__bases__[1] if issubclass(cls, Mixin) else cls


def _new(mixin: Any, cls: Any) -> Any:
    mixed = with_mixin(mixin, cls)
    return mixed.__new__(mixed)
