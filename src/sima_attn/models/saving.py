"""A model in memory -> a folder that `load` gives back: weights, and everything needed to build the model again."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sima_attn._files import atomic_write
from sima_attn._settings import to_dict
from sima_attn.conversion.huggingface import is_pretrained_model
from sima_attn.conversion.placing import converted_modules
from sima_attn.models.building import (
    SETTINGS,
    Exchanges,
    build_exchanged_model,
    check_arguments,
    is_plain,
    token_refs_of,
    without_sources,
)
from sima_attn.models.huggingface import CONFIG, TimmInterface, save_folder, with_timm_interface
from sima_attn.models.image_processor import copy_processor
from sima_attn.models.loading import LoadedModel, classes_of
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.models.settings import ModelSettings
from sima_attn.models.weight_files import ABOUT, RECIPE, SEAL, WEIGHTS, check_fits
from sima_attn.nn.image_channels import image_channels

TOLERANCE = 1e-5  # relative to the largest output: both models run in float32, in the same order


def save(model: nn.Module, folder: str | Path, *, model_kwargs: Mapping[str, Any] | None = None) -> Path:
    """Write a model, converted or not, so that `sima_attn.load(folder)` and all commands give it back.

    A timm model becomes `weights.safetensors`, whose metadata has its name, its arguments and its converted attentions
    with their options. Before anything is written, the model is built again from them, and must give the same outputs.
    A model of transformers is written by its `save_pretrained`, with the image processor that it was loaded with.

    Args:
        model: A model of timm, of this package or of transformers, such as one that `convert` has changed.
        folder: The folder. A model that was saved there before is overwritten; a run is not.
        model_kwargs: The arguments of timm.create_model that a timm model was created with, such as depth. The number
            of classes and the image size are known.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; give a folder to save the model in")
    if is_pretrained_model(model) or isinstance(model, TimmInterface):
        if model_kwargs:
            raise _not_timm(model_kwargs)
        _check_free(path, RECIPE, WEIGHTS)
        _save_pretrained(model, path)
        return path
    _check_free(path, RECIPE, CONFIG)
    about = describe(model, model_kwargs)
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    # Nothing but our own functions, which read the metadata, loads a file with this tensor: a softmax model refuses it.
    seal = {SEAL: torch.ones(1, dtype=torch.uint8)} if "converted" in about else {}
    path.mkdir(parents=True, exist_ok=True)
    from safetensors.torch import save_file

    with atomic_write(path / WEIGHTS) as temporary:
        save_file({**weights, **seal}, temporary, metadata={ABOUT: json.dumps(about)})
    return path


def describe(model: nn.Module, model_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything that is needed to build a timm model again; raises where that gives another model."""
    settings = _settings_of(model, model_kwargs)
    exchanges = Exchanges(converted=_plain_options(model), token_refs=token_refs_of(model))
    size = size_of(model)
    _check_rebuilt(model, settings, exchanges, size)
    classes, _ = classes_of(model)
    return {
        "task": "saved",
        "recipe": {"model": to_dict(settings), "data": {"path": "", **vars(Preprocessing.of_model(model, size))}},
        "classes": classes,
        "num_classes": _num_classes(model),
        **exchanges.to_dict(),
    }


def copy_of(model: nn.Module, model_kwargs: Mapping[str, Any] | None = None) -> LoadedModel:
    """A copy of a model in memory, and what would be known about it if it were saved and loaded."""
    copied: Any = copy.deepcopy(model)
    copied = with_timm_interface(copied).float() if is_pretrained_model(copied) else copied
    if isinstance(copied, TimmInterface):
        if model_kwargs:
            raise _not_timm(model_kwargs)
        name, about = type(copied.network).__name__, {}
    else:
        about = describe(copied, model_kwargs)
        name = about["recipe"]["model"]["name"]
    preprocessing: Any = Preprocessing.of_model(copied, size_of(copied))
    return LoadedModel(name, copied.eval(), preprocessing, *classes_of(copied), about=about)


def _not_timm(kwargs: Mapping[str, Any]) -> ValueError:
    return ValueError(f"model_kwargs are arguments of timm.create_model, got {kwargs} with transformers")


def _check_free(folder: Path, *names: str) -> None:
    for name in names:
        if (folder / name).exists():
            what = "a run" if name == RECIPE else "a model of another library"
            raise ValueError(f"{folder} holds {what} ({name}); choose another folder")


def _save_pretrained(model: Any, folder: Path) -> None:
    if isinstance(model, TimmInterface):
        preprocessing: Any = Preprocessing.of_model(model)
        save_folder(model, folder, preprocessing)
        return
    from sima_attn.conversion.saved import write_marks

    write_marks(model)
    model.save_pretrained(folder)
    copy_processor(model, folder)


def _settings_of(model: Any, kwargs: Mapping[str, Any] | None) -> ModelSettings:
    """The name and the arguments of a model: those that this package built it with, or those that are given."""
    known = vars(model).get(SETTINGS)
    if known is None:
        name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
        if name is None:
            raise ValueError(
                f"this {type(model).__name__} does not say which model of timm it is; save takes models that "
                "timm.create_model or sima_attn.load has made, and models of transformers"
            )
        known = ModelSettings(name)
    settings = replace(without_sources(known), num_classes=None, drop_path=0.0)
    if not settings.name.startswith("sima_"):
        settings = replace(settings, attention=None)  # the converted attentions are listed one by one
    arguments = {**settings.kwargs, **(kwargs or {})}
    arguments.pop("num_classes", None)
    if hasattr(model, "set_input_size") and "img_size" not in arguments:
        arguments["img_size"] = size_of(model)
    settings = replace(settings, kwargs=json.loads(json.dumps(arguments, default=repr)))
    check_arguments(settings)
    return settings


def size_of(model: Any) -> int:
    """The image size: that of the position embeddings where they have one, else the one in timm's configuration."""
    own = getattr(getattr(model, "patch_embed", None), "img_size", None) if hasattr(model, "set_input_size") else None
    if own is not None and own[0] != own[1]:
        raise ValueError(f"the model must take square images, got one for {own[0]} x {own[1]}")
    return int(own[0] if own is not None else model.pretrained_cfg["input_size"][-1])


def _num_classes(model: Any) -> int:
    return int(getattr(model, "num_classes", 0))


def _plain_options(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The converted attentions with their options, which a file can hold."""
    converted = converted_modules(model)
    for path, entry in converted.items():
        for name, value in entry.items():
            if not is_plain(value):
                raise ValueError(f"{path} was converted with {name}={value!r}, which is not a number or word to save")
    return {path: dict(entry) for path, entry in converted.items()}


@torch.no_grad()
def _check_rebuilt(model: nn.Module, settings: ModelSettings, exchanges: Exchanges, size: int) -> None:
    """Raise unless the model that is built from the metadata takes the weights and gives the same outputs."""
    hint = "; pass the arguments of timm.create_model that it was created with as model_kwargs"
    what = f"{settings.name} cannot be built again from its name and {settings.kwargs}"
    try:
        again = build_exchanged_model(settings, _num_classes(model), exchanges)
    except ValueError as error:
        raise ValueError(f"{what}: {error}{hint}") from error
    weights = model.state_dict()
    check_fits(weights, again.state_dict(), what, hint)
    again.load_state_dict(weights)
    images = torch.randn(2, image_channels(model), size, size, generator=torch.Generator().manual_seed(0))
    wanted = copy.deepcopy(model).cpu().float().eval()(images)
    if not (again.eval()(images) - wanted).abs().max() <= TOLERANCE * wanted.abs().max():
        raise ValueError(f"{what}: with the same weights its outputs differ{hint}")
