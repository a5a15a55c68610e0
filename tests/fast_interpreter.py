"""Make Triton's interpreter faster: it spends most of its time on preparations and on checks that check nothing."""

import dataclasses


def install() -> None:
    """Replace the search for operators by a list of names, and do once per kernel what is done at each call.

    TRITON_INTERPRET must be set before: Triton reads it when it is imported.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_patch_builtin"):  # or another version, as below
        list_operators(tl, interpreter)
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_patch_lang"):
        patch_once_per_kernel(tl, interpreter)
    if hasattr(interpreter, "_get_np_dtype"):
        remember_dtypes(tl, interpreter)
    options = getattr(interpreter.interpreter_builder, "options", None)
    if not getattr(options, "debug", True) and hasattr(options, "sanitize_overflow"):
        # Every sum and product of integers is computed again in int64, to be compared in an assertion that is made in
        # debug mode only.
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def list_operators(tl, interpreter) -> None:
    """Find the operators of the language once."""
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


def patch_once_per_kernel(tl, interpreter) -> None:
    """Replace the operators once per launch and module that a function reads them from, not at each call of one."""
    patch_lang, run_grid = interpreter._patch_lang, interpreter.GridExecutor.__call__
    names = {}  # {function: the modules of the language that it sees}
    running = []  # of the launch that runs: (the modules that are patched, the scope that restores them)

    def patch(fn):
        if fn not in names:
            values = list(fn.__globals__.values())
            names[fn] = tuple(any(value is module for value in values) for module in (tl, tl.core))
        if not running:
            return patch_lang(fn)
        done, scopes = running[-1]
        if names[fn] in done:
            return interpreter._LangPatchScope()  # nothing to restore
        done.add(names[fn])
        scope = patch_lang(fn)
        if scopes:  # a function that the kernel calls: what it needs is restored after the kernel
            scopes[0]._changes += scope._changes
            return interpreter._LangPatchScope()
        scopes.append(scope)
        return scope

    def run(self, *args, **kwargs):
        running.append((set(), []))
        try:
            return run_grid(self, *args, **kwargs)
        finally:
            running.pop()

    interpreter._patch_lang = patch
    interpreter.GridExecutor.__call__ = run


def remember_dtypes(tl, interpreter) -> None:
    """Look the dtypes of NumPy up by name, and not in a table that is made at each call."""
    look_up, known = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype):
        element = dtype.scalar
        if element.is_ptr():
            return look_up(dtype)
        if element.name not in known:
            known[element.name] = look_up(dtype)
        return known[element.name]

    interpreter._get_np_dtype = get_np_dtype
