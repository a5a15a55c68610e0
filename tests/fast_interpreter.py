"""Make Triton's interpreter faster: it spends half of its time in `inspect.getmembers`."""


def install() -> None:
    """Replace the search for operators by a list of names.

    TRITON_INTERPRET must be set before: Triton reads it when it is imported.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_patch_builtin"):
        return  # another version

    is_builtin = tl.core.is_builtin
    # Before the first kernel runs: an operator that is patched is no builtin.
    known = {pkg: [name for name in dir(pkg) if is_builtin(getattr(pkg, name, None))] for pkg in patched(tl)}
    search = interpreter._patch_builtin

    def patch_builtin(pkg, *args) -> None:
        """As `_patch_builtin`, which searches all members at each call of a device function."""
        if pkg not in known:
            search(pkg, *args)
            return
        for name in known[pkg]:
            member = getattr(pkg, name)
            if is_builtin(member):
                interpreter._patch_attr(pkg, name, member, *args)

    interpreter._patch_builtin = patch_builtin


def patched(tl) -> list:
    """The modules and classes whose operators the interpreter replaces."""
    found = [tl, tl.core, tl.math, tl.tensor, getattr(tl.core, "tensor_descriptor_base", None)]
    return [pkg for pkg in found if pkg is not None]
