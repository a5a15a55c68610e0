"""One attention of a model -> another in its place, and back. What `convert` does, and loading a converted model."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from sima_attn.conversion.huggingface import calls_interface, core_of, is_pretrained_model, switch, switch_back
from sima_attn.conversion.modules import Exchange, Refused, exchange, is_convertible, restore
from sima_attn.conversion.report import Converted
from sima_attn.nn import attention_class

CONVERTED = "_sima_attn"  # attribute of a converted module: the attention and its options
# Attributes in which torch stores the forward and backward hooks of a module.
HOOKS = tuple(name for name in vars(nn.Module()) if "ward_hook" in name or "ward_pre_hook" in name)


class Placement(NamedTuple):
    """A finished replacement, the check that it can be undone, and how to undo it."""

    converted: Converted
    check: Callable[[], None]
    undo: Callable[[], None]


def can_be_placed(module: nn.Module) -> bool:
    """Whether the converter knows this attention, including those it refuses."""
    return is_convertible(module) or calls_interface(module)


def place(
    model: nn.Module, path: str, attention: str, options: dict[str, Any], exchanged: dict[nn.Module, Exchange]
) -> Placement:
    """Put another attention in the place of one; raises Refused with the reason why it stays.

    `exchanged` remembers the new modules, for an attention that has several paths.
    """
    old = model.get_submodule(path)
    if is_convertible(old):
        return _exchange(model, path, old, attention, options, exchanged)
    if not calls_interface(old):
        raise Refused("it is no attention that the converter knows, and does not call transformers' interface")
    return _switch(path, old, attention, options)


def converted_modules(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The paths of the converted attentions, with the name and the options of each."""
    modules = model.named_modules(remove_duplicate=False)
    return {path: vars(module)[CONVERTED] for path, module in modules if CONVERTED in vars(module)}


def _exchange(
    model: nn.Module,
    path: str,
    old: nn.Module,
    attention: str,
    options: dict[str, Any],
    exchanged: dict[nn.Module, Exchange],
) -> Placement:
    options = _with_prefix_tokens(model, path, attention, options)
    swap = exchanged.get(old) or exchange(path, old, attention, options)
    kind = type(old).__name__
    if not path:
        raise ValueError(f"the model itself is a {kind}: wrap it in a module, which can hold the converted one")
    new = swap.module
    if old not in exchanged:
        exchanged[old] = swap
        own_parts = set(old.modules())
        for part in new.modules():
            if part not in own_parts:  # shared parts keep their mode
                part.training = old.training
        for name in HOOKS:  # the same tables, so that a hook's handle removes it from both
            setattr(new, name, getattr(old, name))
        _tag(new, attention, options)
    model.set_submodule(path, new)
    converted = Converted(path, kind, type(new).__name__, swap.kept, swap.dropped)
    return Placement(
        converted,
        partial(_check, model, path, old, new, _structure(new, old)),
        partial(_put_back, model, path, old, swap),
    )


def _with_prefix_tokens(model: nn.Module, path: str, attention: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with the number of prefix tokens where the attention needs it and a model around it has it.

    Without it, 24 patch tokens of an image that is not square and one class token would be taken for a 5 x 5 grid.
    """
    if not attention_class(attention).has_local_branch or "prefix_tokens" in options:
        return options
    if type(model.get_submodule(path)).__name__ == "XCA":  # in XCiT the class token joins after these blocks
        return {**options, "prefix_tokens": 0}
    names = path.split(".")
    owners = (model.get_submodule(".".join(names[:depth])) for depth in reversed(range(len(names))))
    counts = (getattr(owner, "num_prefix_tokens", None) for owner in owners)
    known = next((count for count in counts if isinstance(count, int)), None)
    return options if known is None else {**options, "prefix_tokens": known}


def _structure(new: nn.Module, old: nn.Module) -> list[Any]:
    """The parts of the new attention that the old one does not share."""
    shared = set(old.modules())
    return [
        (name, type(part), set(part._parameters), set(part._buffers), dict(part._modules), vars(part).get("forward"))
        for name, part in new.named_modules()
        if part not in shared
    ]


def _check(model: nn.Module, path: str, old: nn.Module, new: nn.Module, structure: list[Any]) -> None:
    try:
        there = model.get_submodule(path)
    except AttributeError:
        there = None
    if there is not new:
        raise ValueError(f"{path} is not the converted attention any more: undo what was done to it or around it first")
    if _structure(new, old) != structure:
        raise ValueError(
            f"{path} was changed after its conversion (adapters, pruning, new layers), and the original attention "
            "would lose that: remove it first, or keep the model converted"
        )


def _put_back(model: nn.Module, path: str, old: nn.Module, swap: Exchange) -> None:
    restore(old, swap)
    model.set_submodule(path, old)


def _switch(path: str, module: Any, attention: str, options: dict[str, Any]) -> Placement:
    names = tuple(name for name, _ in module.named_parameters())
    switch(module, attention, options)
    hook = _tag(module, attention, options)

    def undo() -> None:
        hook.remove()
        del vars(module)[CONVERTED]
        switch_back(module)

    new = type(core_of(module)).__name__
    return Placement(Converted(path, type(module).__name__, new, names, ()), lambda: None, undo)


def _tag(module: nn.Module, attention: str, options: dict[str, Any]) -> Any:
    vars(module)[CONVERTED] = {"attention": attention, **options}
    return module.register_state_dict_pre_hook(_refuse_to_be_saved_as_softmax)


def _refuse_to_be_saved_as_softmax(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise where transformers saves a converted attention, and the configuration that it saves does not say so.

    An attention inside a transformers model cannot know that model, and may be put into another one later. The one
    moment in which both are at hand is `save_pretrained`, which asks every module for its state.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "save_pretrained" and is_pretrained_model(frame.f_locals.get("self")):
            from sima_attn.conversion.saved import check_marks

            check_marks(frame.f_locals["self"])
            return
        frame = frame.f_back
