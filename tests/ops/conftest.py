"""Make Triton's interpreter faster: it spends half of its time in `inspect.getmembers`."""

import functools
import os

try:
    import triton.language as tl
    from triton.runtime import interpreter
except ImportError:
    interpreter = None


@functools.cache
def builtin_names(pkg) -> list[str]:
    """The names of the operators in a module or class of `triton.language`."""
    return [name for name in dir(pkg) if tl.core.is_builtin(getattr(pkg, name, None))]


def patch_builtin(pkg, *args) -> None:
    """As `interpreter._patch_builtin`, which searches all members at each call of a device function."""
    for name in builtin_names(pkg):
        member = getattr(pkg, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(pkg, name, member, *args)


if os.environ.get("TRITON_INTERPRET") == "1" and hasattr(interpreter, "_patch_builtin"):
    for pkg in (tl, tl.core, tl.math, tl.tensor):  # before the first kernel runs: a patched operator is no builtin
        builtin_names(pkg)
    interpreter._patch_builtin = patch_builtin
