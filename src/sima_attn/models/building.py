"""The settings of a model -> the model.

Settings may come from a file that anyone has written. They are checked before any of them reaches timm: nothing in a
file makes timm download weights or open another file, and no file makes it build a model larger than its own weights.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from timm.layers import DropPath
from timm.models import build_model_with_cfg
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from sima_attn._errors import unknown_name
from sima_attn.conversion import convert
from sima_attn.conversion.modules import Refused
from sima_attn.conversion.placing import place
from sima_attn.models.settings import ModelSettings
from sima_attn.models.weight_files import StateDict
from sima_attn.nn import follow_image_grid
from sima_attn.nn.token_ref import set_class_token_ref, set_token_ref

# Arguments of timm that say where weights come from. A user may start a run with them; whoever loads its weights, or
# resumes it, has the weights.
SOURCES = {
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_strict",
    "pretrained_filter_fn",
    "pretrained_model_args",
    "checkpoint_path",
    "cache_dir",
}
# Other arguments of timm's factory, which are not arguments of a model.
FACTORY = {
    *inspect.signature(timm.create_model).parameters,
    *inspect.signature(build_model_with_cfg).parameters,
    *("pruned", "features_only", "out_indices", "feature_cls", "device", "dtype"),
} - {*SOURCES, "kwargs"}
WORD = re.compile(r"[A-Za-z0-9_.+-]{0,100}")  # neither an address nor a path into another folder
MOST = 2**16  # of any number that is an argument of a model
MOST_ITEMS = 100
SETTINGS = "_sima_settings"  # attribute of a model that was built here
AnySettings = TypeVar("AnySettings")


def build_model(settings: ModelSettings, num_classes: int) -> nn.Module:
    """The model of a recipe for that many classes, with its attention and its stochastic depth."""
    model = create_model(settings, num_classes)
    if settings.attention is not None and not _is_ours(settings):
        convert(model, settings.attention)
    if settings.drop_path and settings.constant_drop_path:
        _set_drop_path(model, settings.drop_path)
    return model


def build_mixed_model(settings: ModelSettings, num_classes: int, kept: Mapping[str, str | None]) -> nn.Module:
    """The model of a recipe, in which some attentions are others: `kept` maps their paths to names, None for timm's."""
    model = build_model(settings, num_classes)
    for attention in dict.fromkeys(kept.values()):
        other = build_model(replace(settings, attention=attention), num_classes)
        for path in (path for path, name in kept.items() if name == attention):
            known = [dict(each.named_modules()).get(path) for each in (model, other)]
            if not path or None in known:
                raise ValueError(f"{settings.name} has no attention {path!r} to keep")
            model.set_submodule(path, other.get_submodule(path))
    return model


def set_image_size(model: nn.Module, settings: ModelSettings, size: int) -> ModelSettings:
    """Let a timm model take square images of another size: timm resamples its position embeddings.

    Returns the settings of such a model. Models without position embeddings of a fixed size stay as they are.
    """
    if not hasattr(model, "set_input_size"):
        return settings
    resizable: Any = model
    embedding = getattr(model, "patch_embed", None)
    patch = max(getattr(embedding, "patch_size", (1,)))
    if size % patch and not getattr(embedding, "dynamic_img_pad", False):  # timm would cut the image
        raise ValueError(f"{settings.name} takes images whose side is a multiple of {patch} px, got {size}")
    resizable.set_input_size(img_size=(size, size))
    return replace(settings, kwargs={**settings.kwargs, "img_size": size})


@dataclass(frozen=True)
class Exchanges:
    """How a model differs from the one that its settings describe: in the metadata of its file, beside the recipe.

    Attributes:
        kept: Path -> name of an attention that a linearization has kept, None for timm's.
        converted: Path -> name and options of an attention that was converted one by one.
        token_refs: Path -> `token_ref` of a SimA module.
    """

    kept: Mapping[str, str | None] = field(default_factory=dict)
    converted: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    token_refs: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The entries of the metadata."""
        return {name: entries for name, entries in vars(self).items() if entries}

    @classmethod
    def from_about(cls, about: Mapping[str, Any]) -> "Exchanges":
        """From the metadata of a file, which anyone may have written."""
        kept, converted, token_refs = (about.get(name, {}) for name in ("kept", "converted", "token_refs"))
        if not isinstance(kept, dict) or not all(isinstance(name, str | None) for name in kept.values()):
            raise ValueError(f"`kept` must map attentions to their names, got {str(kept)[:200]}")
        if not isinstance(converted, dict) or not all(map(_is_attention, converted.values())):
            raise ValueError(f"`converted` must map attentions to names and options, got {str(converted)[:200]}")
        if not isinstance(token_refs, dict) or not all(map(_is_token_ref, token_refs.values())):
            raise ValueError(f"`token_refs` must map attentions to numbers above 0, got {str(token_refs)[:200]}")
        return cls(kept, converted, token_refs)


def _is_attention(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("attention"), str) and is_plain(entry)


def _is_token_ref(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def build_exchanged_model(settings: ModelSettings, num_classes: int, exchanges: Exchanges) -> nn.Module:
    """The model of a recipe, with the attentions and the values of `token_ref` that it has instead."""
    model = build_mixed_model(settings, num_classes, exchanges.kept)
    exchanged: dict[nn.Module, Any] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, entry in exchanges.converted.items():
        options = dict(entry)
        try:
            if path not in modules:
                raise Refused("the model has no such module")
            place(model, path, options.pop("attention"), options, exchanged)
        except (Refused, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be converted as it was when it was saved: {error}") from error
    follow_image_grid(model)
    modules = dict(model.named_modules())
    for path, token_ref in exchanges.token_refs.items():
        if not hasattr(modules.get(path), "token_ref"):
            raise ValueError(f"{settings.name} has no SimA attention {path!r} with a token_ref")
        setattr(modules[path], "token_ref", token_ref)  # noqa: B010
    return model


def token_refs_of(model: nn.Module) -> dict[str, float]:
    """Path -> `token_ref` of the SimA modules that have one."""
    found = {path: getattr(module, "token_ref", None) for path, module in model.named_modules()}
    return {path: float(token_ref) for path, token_ref in found.items() if token_ref is not None}


def create_model(settings: ModelSettings, num_classes: int) -> nn.Module:
    """The model as timm creates it; models of other packages still have their own attention."""
    if settings.num_classes not in (None, num_classes):
        raise ValueError(f"the data have {num_classes} classes, model.num_classes is {settings.num_classes}: omit it")
    check_name(settings.name)
    kwargs: dict[str, Any] = {**settings.kwargs, "num_classes": num_classes}
    if settings.drop_path:
        kwargs["drop_path_rate"] = settings.drop_path
    if settings.attention is not None and _is_ours(settings):
        kwargs["attention"] = settings.attention
    try:
        model = timm.create_model(settings.name, **kwargs)
    except TypeError as error:
        raise ValueError(f"{settings.name} cannot be built with {kwargs}: {error}") from error
    except (OSError, RuntimeError) as error:
        if "checkpoint_path" not in kwargs:
            raise
        reason = " ".join(str(error).split("\n\t")[:2]) or "there is no such file"  # timm gives no message for it
        raise ValueError(
            f"checkpoint_path={kwargs['checkpoint_path']} cannot be loaded into {settings.name} with {num_classes} "
            f"classes: {reason}; `sima finetune {settings.name} --weights FILE` starts from weights for other classes"
        ) from error
    vars(model)[SETTINGS] = settings
    return model


def check_name(name: str, kind: str = "model") -> None:
    """Raise unless timm knows the name."""
    if not timm.is_model(name):
        raise unknown_name(kind, name, timm.list_models())


def _is_ours(settings: ModelSettings) -> bool:
    return settings.name.startswith("sima_")


def _set_drop_path(model: nn.Module, rate: float) -> None:
    """The same rate in every block; timm increases it with depth, the authors do not. Class attention has none."""
    for name, block in model.named_modules():
        if "cls_attn" in name:
            continue
        for child in ("drop_path", "drop_path1", "drop_path2", "drop_path3"):
            if isinstance(getattr(block, child, None), DropPath | nn.Identity):
                setattr(block, child, DropPath(rate))


def set_token_refs(model: nn.Module, size: int, distill: Mapping[str, Any]) -> None:
    """What the group `distill` of a DINO recipe changes in the backbone."""
    if distill.get("class_token_ref"):
        set_class_token_ref(model, size)
    if distill.get("token_ref"):
        set_token_ref(model, size)


def without_sources(settings: AnySettings) -> AnySettings:
    """The settings of the same model, for weights that are at hand."""
    given: Any = settings
    changed: dict[str, Any] = {"kwargs": {name: v for name, v in given.kwargs.items() if name not in SOURCES}}
    if hasattr(given, "weights"):
        changed["weights"] = None
    return replace(given, **changed)


def check_arguments(settings: Any) -> None:
    """Raise unless the name and the arguments of a model are words and bounded numbers, `SOURCES` aside."""
    if not WORD.fullmatch(settings.name):
        raise ValueError(f"model.name must be the name of a model, got {settings.name[:200]!r}")
    for name, value in settings.kwargs.items():
        if name in FACTORY:
            raise ValueError(f"model.kwargs.{name} is not an argument of a model; remove it")
        if name not in SOURCES and not is_plain(value):
            raise ValueError(
                f"model.kwargs.{name} must be a number from -{MOST} to {MOST}, true, false, a word without / and :, or "
                f"a list or table of these, got {str(value)[:200]}"
            )


def is_plain(value: Any) -> bool:
    """Whether a value is a word, a bounded number, or a list or table of these."""
    if isinstance(value, list | tuple):
        return len(value) <= MOST_ITEMS and all(map(is_plain, value))
    if isinstance(value, Mapping):
        return len(value) <= MOST_ITEMS and all(map(is_plain, [*value.keys(), *value.values()]))
    if isinstance(value, str):
        return WORD.fullmatch(value) is not None
    return value is None or (isinstance(value, bool | int | float) and -MOST <= value <= MOST)


def check_size(create: Callable[[], nn.Module], weights: StateDict, where: Path) -> None:
    """Raise where a model has far more parameters than there are weights for, without building it.

    It is created on the meta device, and only as far as the limit.
    """
    tensors, numbers = 2 * len(weights) + 100, 2 * sum(tensor.numel() for tensor in weights.values()) + 10**6
    try:
        with torch.device("meta"), _at_most(tensors, numbers):
            create()
    except ValueError as error:
        raise ValueError(f"the model in {where} cannot be built: {error}") from error
    except Exception as error:  # timm's models raise anything on arguments that they do not support
        raise ValueError(f"the model in {where} cannot be built: {type(error).__name__}: {error}") from error


@contextmanager
def _at_most(tensors: int, numbers: int) -> Iterator[None]:
    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal tensors, numbers
        if parameter is not None:
            tensors, numbers = tensors - 1, numbers - parameter.numel()
        if tensors < 0 or numbers < 0:
            raise ValueError("its recipe describes a far larger model than its weights are for")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
