"""convert: exchanges the attentions of a model in place, on this instance alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sima_attn.conversion.huggingface import convert_pretrained, is_pretrained_model
from sima_attn.conversion.modules import SAME_FUNCTION, Exchange, Refused, exchange, looks_like_attention
from sima_attn.conversion.report import SAME_NOTE, ConversionReport, Converted, Skipped
from sima_attn.nn import Attention, attention_class

Where = Callable[[str, nn.Module], bool]
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
        example_inputs: For transformers' models: keyword inputs of one forward, by which the conversion is
            proven. By default an image of the configured size.
        options: Options of the attention, e.g. token_ref=197.

    Raises:
        ValueError: Nothing could be converted, the reasons are listed; or the options do not suit the attention.
        TypeError: `model` is no module, or `where` no function.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model (torch.nn.Module) is needed, got {model!r}; timm.create_model(NAME) makes one")
    if where is not None and not callable(where):
        raise TypeError(f"where must be a function of path and module that returns True or False, got {where!r}")
    wanted = attention_class(attention)
    report = ConversionReport(type(model).__name__, attention)
    if is_pretrained_model(model):
        pretrained: Any = model
        convert_pretrained(
            pretrained, attention, where=where, example_inputs=example_inputs, options=options, report=report
        )
    else:
        if example_inputs is not None:
            raise ValueError("example_inputs is for transformers' models; other models are converted module by module")
        try:
            _convert_modules(model, attention, where, options, report)
        except BaseException as error:
            report.undo()  # all of it or nothing
            if isinstance(error, TypeError) and options:
                raise ValueError(f"{attention!r} cannot be built with the options {options}: {error}") from error
            raise
    if not report.converted:
        if not report.skipped and any(isinstance(module, wanted) for module in model.modules()):
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
        try:
            swap = swaps.get(module) or exchange(module, attention, options)
        except Refused as refused:
            report.skipped.append(Skipped(path, kind, str(refused)))
            continue
        if swap is None:
            if looks_like_attention(module) and not isinstance(module, Attention):
                report.skipped.append(Skipped(path, kind, "this class is not known to the converter"))
            continue
        if where is not None and not where(path, module):
            report.skipped.append(Skipped(path, kind, "`where` left it out"))
            continue
        if not path:
            raise ValueError(f"the model itself is a {kind}: wrap it in a module, which can hold the converted one")
        swaps[module] = swap
        swap.module.train(module.training)
        for name in HOOKS:  # the same tables, so that a hook's handle removes it from both
            setattr(swap.module, name, getattr(module, name))
        model.set_submodule(path, swap.module)
        report._undo.append(lambda path=path, old=module: model.set_submodule(path, old))  # type: ignore[misc]
        report.converted.append(Converted(path, kind, type(swap.module).__name__, swap.kept, swap.dropped))
    _switch_nested_tensors_off(model, report)


def _switch_nested_tensors_off(model: nn.Module, report: ConversionReport) -> None:
    """torch's encoder hands nested tensors to its own fused softmax layers; ours take padded ones."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            module.use_nested_tensor = False
            report._undo.append(lambda module=module: setattr(module, "use_nested_tensor", True))  # type: ignore[misc]
