"""convert: exchanges the attentions of a model in place, on this instance alone."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from sima_attn.conversion.huggingface import (
    AttentionCore,
    calls_interface,
    core_of,
    example_pixels,
    is_pretrained_model,
    vision_model_of,
)
from sima_attn.conversion.modules import SAME_FUNCTION, Exchange, Refused, looks_like_attention
from sima_attn.conversion.placing import CONVERTED, can_be_placed, place
from sima_attn.conversion.report import SAME_NOTE, ConversionReport, Skipped, grouped
from sima_attn.conversion.trial import called_modules, example_image, token_layouts
from sima_attn.nn import (
    ATTENTIONS,
    Attention,
    SimClassAttention,
    SimCrossAttention,
    SimMultiheadAttention,
    attention_class,
    follow_image_grid,
)

Where = Callable[[str, nn.Module], bool]
VISION = "vision"  # for `where`
SIMA_FORMS = (SimClassAttention, SimCrossAttention, SimMultiheadAttention)  # beside the registered ones


def convert(
    model: nn.Module,
    attention: str = "sima",
    *,
    where: Where | str | None = None,
    example_inputs: Any = None,
    **options,
) -> ConversionReport:
    """Exchange the attentions of a timm, torchvision, transformers or plain torch model, weights carried over.

    The model is changed in place; its classes are not. Its accuracy is lost until it is fine-tuned, unless the
    attention computes the same as before: the report says so, and lists what was converted, what was left alone and
    why.

    Args:
        model: The model, or any module that holds attentions.
        attention: Name of a registered attention. `torch.nn.MultiheadAttention` takes "sima" only.
        where: `where(path, module)` returns False for attentions to leave alone. "vision" converts the vision model of
            a model of transformers for images and texts, such as CLIP, whose text model is causal.
        example_inputs: Inputs of one forward, by which the conversion is proven: a tensor, a tuple, or a dict of
            keyword inputs. By default a black image, where the model says its size.
        options: Options of the attention, e.g. token_ref=197.

    Raises:
        ValueError: Nothing could be converted, the reasons are listed; the options do not suit the attention; an
            attention is compiled, quantized, pruned or wrapped; or one did not run in the forward. The model is left
            as it was.
        TypeError: `model` is no module, or `where` neither a function nor "vision".
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model (torch.nn.Module) is needed, got {model!r}; timm.create_model(NAME) makes one")
    if where not in (None, VISION) and not callable(where):
        raise TypeError(
            f"where must be a function of path and module that returns True or False, or {VISION!r}, got {where!r}"
        )
    attention_class(attention)  # an unknown name is an error
    trial = Trial(model, example_inputs)
    if where == VISION:
        vision = vision_model_of(model)
        trial = Trial(vision, None) if example_inputs is None else trial
        where = _is_in_vision_model
    report = ConversionReport(type(model).__name__, attention)
    try:
        _convert_modules(model, attention, cast(Where | None, where), options, trial, report)
        if report.converted:
            _prove(model, trial, report)
    except BaseException as error:
        report.undo()  # all of it or nothing
        if isinstance(error, TypeError) and options:
            raise ValueError(f"{attention!r} cannot be built with the options {options}: {error}") from error
        raise
    if not report.converted:
        if report.skipped and all(one.reason == _already(attention) for one in report.skipped):
            raise ValueError(f"the attentions of this {type(model).__name__} are {attention!r} already")
        found = "; ".join(grouped(report.skipped)) or "it has no attention"
        raise ValueError(f"nothing in this {type(model).__name__} could be converted to {attention!r}: {found}")
    if all(attention in SAME_FUNCTION.get(one.old, ()) for one in report.converted):
        report.note = SAME_NOTE
    return report


def _convert_modules(
    model: nn.Module,
    attention: str,
    where: Where | None,
    options: dict[str, Any],
    trial: "Trial",
    report: ConversionReport,
) -> None:
    layouts: dict[nn.Module, dict[str, Any]] = {}
    if attention_class(attention).has_local_branch:
        callers = [module for module in model.modules() if calls_interface(module) and CONVERTED not in vars(module)]
        layouts = token_layouts(trial.model, trial.inputs, callers) if callers else {}
    exchanged: dict[nn.Module, Exchange] = {}
    holds_pretrained = any(is_pretrained_model(module) for module in model.modules())
    if holds_pretrained:
        from sima_attn.conversion.saved import write_marks

        report._undo.append(partial(write_marks, model))  # the first, so that it is done after the others
    for path, module in list(model.named_modules(remove_duplicate=False)):  # a shared attention has several paths
        kind = type(module).__name__
        if CONVERTED in vars(module) or not can_be_placed(module):
            reason = _why_not_convertible(module, attention)
            if reason is not None and not any(path.startswith(f"{one.path}.") for one in report.converted):
                report.skipped.append(Skipped(path, kind, reason))
            continue
        if where is not None and not where(path, module):
            report.skipped.append(Skipped(path, kind, "`where` left it out"))
            continue
        try:
            placement = place(model, path, attention, {**layouts.get(module, {}), **options}, exchanged)
        except Refused as refused:
            report.skipped.append(Skipped(path, kind, str(refused)))
            continue
        report.converted.append(placement.converted)
        report._checks.append(placement.check)
        report._undo.append(placement.undo)
    _switch_nested_tensors_off(model, report)
    report._undo.extend(handle.remove for handle in follow_image_grid(model))
    if holds_pretrained and report.converted:
        write_marks(model)


def _why_not_convertible(module: nn.Module, attention: str) -> str | None:
    """Why a module that looks like an attention stays as it is; None for any other module."""
    if isinstance(module, AttentionCore):
        return None  # the module that holds it is reported
    if CONVERTED in vars(module):
        has = vars(module)[CONVERTED]["attention"]
        return _already(attention) if has == attention else f"it was converted to {has!r} before; undo that first"
    if isinstance(module, (Attention, *SIMA_FORMS)):
        registered = [name for cls in type(module).__mro__ for name, known in ATTENTIONS.items() if cls is known]
        is_wanted = registered[:1] == [attention] or (attention == "sima" and isinstance(module, SIMA_FORMS))
        own = f"it is a {type(module).__name__} of this package, which is not converted; build the model with "
        return _already(attention) if is_wanted else f"{own}attention={attention!r}"
    if not looks_like_attention(module):
        return None
    if type(module).__module__.startswith("transformers."):
        return "it does not call transformers' attention interface"
    return "this class is not known to the converter"


def _already(attention: str) -> str:
    return f"it is {attention!r} already"


class Trial(NamedTuple):
    """One forward of a model, or of the part of it that is converted."""

    model: nn.Module
    example_inputs: Any

    @property
    def inputs(self) -> Any:
        """Those given, a black image, or None where nothing is known."""
        if self.example_inputs is not None:
            return self.example_inputs
        return example_pixels(self.model) if is_pretrained_model(self.model) else example_image(self.model)


def _is_in_vision_model(path: str, module: nn.Module) -> bool:
    return path.startswith("vision_model.")


def _prove(model: nn.Module, trial: Trial, report: ConversionReport) -> None:
    """Run the model once; raise where a converted attention is not called, so that something else is."""
    inputs = trial.inputs
    if inputs is None:
        return
    converted = {one.path: model.get_submodule(one.path) for one in report.converted}
    # A module of transformers that runs, and calls another attention than its core, is idle too.
    converted = {path: core_of(module) or module for path, module in converted.items()}
    try:
        called = called_modules(trial.model, inputs, converted.values())
    except Exception as error:
        shown = f"an image of {list(inputs.shape)}" if isinstance(inputs, Tensor) else "its example_inputs"
        raise ValueError(
            f"the converted {type(model).__name__} does not run on {shown} ({type(error).__name__}: {error}); pass "
            "example_inputs, inputs that it takes, or leave out with `where` what cannot be converted"
        ) from error
    idle = [path for path, one in converted.items() if one not in called]
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
