"""convert: exchanges the attentions of a model in place, on this instance alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from sima_attn.conversion.huggingface import convert_pretrained, is_pretrained_model
from sima_attn.conversion.modules import (
    SAME_FUNCTION,
    Exchange,
    Refused,
    exchange,
    is_convertible,
    looks_like_attention,
    restore,
)
from sima_attn.conversion.report import SAME_NOTE, ConversionReport, Converted, Skipped
from sima_attn.conversion.trial import called_modules, example_image
from sima_attn.nn import Attention, SimClassAttention, SimCrossAttention, SimMultiheadAttention, attention_class

Where = Callable[[str, nn.Module], bool]
SIMA_FORMS = (SimClassAttention, SimCrossAttention, SimMultiheadAttention)  # beside the registered ones
# Where torch keeps what a user has hung on a module.
HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)


def convert(
    model: nn.Module, attention: str = "sima", *, where: Where | None = None, example_inputs: Any = None, **options
) -> ConversionReport:
    """Exchange the attentions of a timm, torchvision, transformers or plain torch model, weights carried over.

    The model is changed in place; its classes are not. Its accuracy is lost until it is fine-tuned, unless the
    attention computes the same as before: the report says so, and lists what was converted, what was left alone and
    why.

    Args:
        model: The model, or any module that holds attentions.
        attention: Name of a registered attention. transformers' models and `torch.nn.MultiheadAttention` take
            "sima" only.
        where: `where(path, module)` returns False for attentions to leave alone.
        example_inputs: Inputs of one forward, by which the conversion is proven: a tensor, a tuple, or a dict of
            keyword inputs. By default a black image, where the model says its size.
        options: Options of the attention, e.g. token_ref=197.

    Raises:
        ValueError: Nothing could be converted, the reasons are listed; the options do not suit the attention; an
            attention is compiled, quantized, pruned or wrapped; or one did not run in the forward. The model is left
            as it was.
        TypeError: `model` is no module, or `where` no function.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model (torch.nn.Module) is needed, got {model!r}; timm.create_model(NAME) makes one")
    if where is not None and not callable(where):
        raise TypeError(f"where must be a function of path and module that returns True or False, got {where!r}")
    attention_class(attention)  # an unknown name is an error
    report = ConversionReport(type(model).__name__, attention)
    if is_pretrained_model(model):
        pretrained: Any = model
        convert_pretrained(
            pretrained, attention, where=where, example_inputs=example_inputs, options=options, report=report
        )
    else:
        try:
            _convert_modules(model, attention, where, options, report)
            if report.converted:
                _prove(model, example_image(model) if example_inputs is None else example_inputs, report)
        except BaseException as error:
            report.undo()  # all of it or nothing
            if isinstance(error, TypeError) and options:
                raise ValueError(f"{attention!r} cannot be built with the options {options}: {error}") from error
            raise
    if not report.converted:
        if report.skipped and all(one.reason == _already(attention) for one in report.skipped):
            raise ValueError(f"the attentions of this {type(model).__name__} are {attention!r} already")
        found = "; ".join(f"{one.path} ({one.kind}): {one.reason}" for one in report.skipped) or "it has no attention"
        raise ValueError(f"nothing in this {type(model).__name__} could be converted to {attention!r}: {found}")
    if all(attention in SAME_FUNCTION.get(one.old, ()) for one in report.converted):
        report.note = SAME_NOTE
    return report


def _convert_modules(
    model: nn.Module, attention: str, where: Where | None, options: dict[str, Any], report: ConversionReport
) -> None:
    swaps: dict[nn.Module, Exchange] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):  # a shared attention has several paths
        kind = type(module).__name__
        if not is_convertible(module):
            reason = _why_not_convertible(module, attention)
            if reason is not None:
                report.skipped.append(Skipped(path, kind, reason))
            continue
        if where is not None and not where(path, module):
            report.skipped.append(Skipped(path, kind, "`where` left it out"))
            continue
        try:
            swap = swaps.get(module) or exchange(path, module, attention, options)
        except Refused as refused:
            report.skipped.append(Skipped(path, kind, str(refused)))
            continue
        if not path:
            raise ValueError(f"the model itself is a {kind}: wrap it in a module, which can hold the converted one")
        swaps[module] = swap
        own_parts = set(module.modules())
        for part in swap.module.modules():
            if part not in own_parts:  # what both hold keeps its mode
                part.training = module.training
        for name in HOOKS:  # the same tables, so that a hook's handle removes it from both
            setattr(swap.module, name, getattr(module, name))
        model.set_submodule(path, swap.module)
        report._undo.append(partial(_put_back, model, path, module, swap))
        report.converted.append(Converted(path, kind, type(swap.module).__name__, swap.kept, swap.dropped))
    _switch_nested_tensors_off(model, report)


def _put_back(model: nn.Module, path: str, old: nn.Module, swap: Exchange) -> None:
    try:
        there = model.get_submodule(path)
    except AttributeError:
        there = None
    if there is not swap.module:
        raise ValueError(f"{path} is not the converted attention any more: undo what was done to it or around it first")
    restore(old, swap)
    model.set_submodule(path, old)


def _why_not_convertible(module: nn.Module, attention: str) -> str | None:
    """Why a module that looks like an attention stays as it is; None for any other module."""
    if isinstance(module, (Attention, *SIMA_FORMS)):
        is_wanted = isinstance(module, (attention_class(attention), *(SIMA_FORMS if attention == "sima" else ())))
        own = f"it is a {type(module).__name__} of this package, which is not converted; build the model with "
        return _already(attention) if is_wanted else f"{own}attention={attention!r}"
    return "this class is not known to the converter" if looks_like_attention(module) else None


def _already(attention: str) -> str:
    return f"it is {attention!r} already"


def _prove(model: nn.Module, inputs: Any, report: ConversionReport) -> None:
    """Run the model once; raise where a converted attention is not called, so that something else is."""
    if inputs is None:
        return
    converted = {one.path: model.get_submodule(one.path) for one in report.converted}
    try:
        called = called_modules(model, inputs, converted.values())
    except Exception as error:
        shown = f"an image of {list(inputs.shape)}" if isinstance(inputs, Tensor) else "its example_inputs"
        raise ValueError(
            f"the converted {type(model).__name__} does not run on {shown} ({type(error).__name__}: {error}); pass "
            "example_inputs, inputs that it takes"
        ) from error
    idle = [path for path, module in converted.items() if module not in called]
    if idle:
        raise ValueError(
            f"converted attentions did not run in one forward of the model: {', '.join(idle)}. Either what is around "
            "them still calls the old ones (convert a model before anything else is done to it), or these inputs do "
            "not reach them (pass other example_inputs, or leave them out with `where`)"
        )
    report.proven = True


def _switch_nested_tensors_off(model: nn.Module, report: ConversionReport) -> None:
    """torch's encoder hands nested tensors to its own fused softmax layers; ours take padded ones."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            module.use_nested_tensor = False
            report._undo.append(lambda module=module: setattr(module, "use_nested_tensor", True))  # type: ignore[misc]
