"""A name, a run folder or a file -> a model: the only place that does it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import timm
from timm.data import ImageNetInfo
from torch import nn

from sima_attn._errors import check_installed
from sima_attn._settings import check_value, from_dict
from sima_attn.models.building import (
    MOST,
    Exchanges,
    build_exchanged_model,
    check_arguments,
    check_name,
    check_size,
    create_model,
    set_token_refs,
    without_sources,
)
from sima_attn.models.huggingface import TRANSFORMERS, is_folder, load_folder
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.models.pretrained import read_card, shipped_models, weights_file
from sima_attn.models.settings import ModelSettings
from sima_attn.models.weight_files import (
    RECIPE,
    check_fits,
    not_ours,
    read_about,
    read_recipe_values,
    read_state_dict,
    read_weights,
    weights_of_run,
)
from sima_attn.models.weights import load_any

DEFAULT = "sima_xcit_mini_p4_64_relu"  # its weights come with the package


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, and what is known about it.

    Attributes:
        name: What to call it: its name in timm's registry, or that of its folder or file.
        preprocessing: How a photo becomes its input.
        classes: Names of the classes in the data, in the order of the logits; None where they are not known.
        words: Class -> a word for it, where that is not its name.
        trained: False where the weights are random.
        about: The metadata of its run, such as the recipe; empty without one.
        unsure_below: Where the most likely class is less probable, the photo may be of none of the classes; None where
            that was not measured.
    """

    name: str
    model: nn.Module
    preprocessing: Preprocessing
    classes: list[str] | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    trained: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)
    unsure_below: float | None = None

    @property
    def has_classes(self) -> bool:
        """False for a model whose outputs are features."""
        return getattr(self.model, "num_classes", None) != 0

    def check_has_classes(self) -> None:
        """Raise for a model whose outputs are features."""
        if not self.has_classes:
            raise _has_no_classes(self.name)

    def class_name(self, k: int) -> str:
        """What to call a class: its word, its name, ImageNet's name where there are its thousand, or its number."""
        if self.classes is not None:
            return self.words.get(self.classes[k], self.classes[k])
        return _imagenet_names()[k] if getattr(self.model, "num_classes", 0) == 1000 else f"class {k}"

    def class_names(self) -> list[str]:
        """What to call all classes, in the order of the logits."""
        count = int(getattr(self.model, "num_classes", 0)) if self.classes is None else len(self.classes)
        return [self.class_name(k) for k in range(count)]


@cache
def _imagenet_names() -> list[str]:
    info = ImageNetInfo("imagenet-1k")
    return [info.index_to_description(k).split(",")[0] for k in range(1000)]


def load_model(
    what: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    pretrained: bool | None = None,
    branch: str | None = None,
    features: bool | None = False,
    device: str = "cpu",
) -> LoadedModel:
    """A model by what a user calls it.

    Args:
        what: One of

            - None: the model that comes with the package.
            - A name in timm's registry, with the weights that come with the package or else random ones; `NAME=FILE`
              is short for `weights=FILE`.
            - A run folder of `sima train` or `sima dino`: its weights, or its newest checkpoint while it is running.
            - A folder of an image model that `save_pretrained` of transformers has written, converted or not; a run of
              `sima linearize` with such a model is one.
            - A folder of `sima_attn.save`.
            - A checkpoint (.pt) or weights (.safetensors) of such a run.

        weights: A file of weights for a name: .safetensors, or .pth that holds tensors alone.
        pretrained: For a name: True loads the weights that timm knows, downloaded unless they come with the package;
            False leaves random ones.
        branch: Other weights of a run, from its checkpoints: "ema", the average of `sima train`, or "student" of
            `sima dino`.
        features: Remove the classifier. A run of `sima dino`, which has none, is loaded only so. None keeps a
            classifier where there is one.
    """
    text = DEFAULT if what is None else str(what)
    name, _, file = text.partition("=")
    if Path(text).exists():
        if weights is not None or pretrained:
            raise ValueError(f"weights and pretrained go with the name of a model, got {text}")
        if branch is not None and is_folder(Path(text)):
            raise ValueError(
                f"{branch} weights are in the checkpoints of a run of `sima train` or `sima dino`, got {text}"
            )
        loaded = _from_transformers(Path(text)) if is_folder(Path(text)) else _from_run(Path(text), branch, features)
    elif Path(text).suffix in (".pt", ".safetensors") and not file:
        raise FileNotFoundError(f"there is no file {text}")
    elif branch is not None:
        raise ValueError(f"{branch} weights are in the checkpoints of a run; {text} is the name of a model")
    elif sum(map(bool, (file, weights, pretrained))) > 1:
        raise ValueError("NAME=FILE, weights and pretrained exclude each other: give one of them")
    else:
        loaded = _from_name(name, file or weights, pretrained)
    model: Any = loaded.model
    if features and getattr(model, "num_classes", None) != 0:
        model.reset_classifier(0)
    model.to(device).eval()
    return loaded


def is_detector(what: str | Path | None) -> bool:
    """Whether a run's folder or file holds a detector, which the package `detect` loads."""
    path = Path(what or "")
    if not what or not path.exists() or is_folder(path):
        return False
    file = weights_of_run(path) if path.is_dir() else path
    return file.suffix in (".pt", ".safetensors") and "detector" in read_about(file)


def load(what: str | Path, *, features: bool = False) -> nn.Module:
    """The model in a folder of `save`, of a run or of `save_pretrained`, or of a weight file of a run.

    It has the attentions that it was saved with, and is in eval mode. A model of transformers is returned as the class
    that was saved.

    Args:
        what: The folder or file.
        features: Remove the classifier; needed for a run of `sima dino`, which has none.
    """
    if not Path(what).exists():
        raise FileNotFoundError(
            f"there is no folder or file {what}; timm.create_model makes a model from a name, load takes saved ones"
        )
    if not is_folder(Path(what)):
        return load_model(what, features=features).model
    check_installed(f"the model in {what}", "transformers", extra="hf")
    from sima_attn.conversion.saved import load_saved

    model = load_saved(Path(what)).eval()
    return model.base_model if features else model


def _from_transformers(path: Path) -> LoadedModel:
    check_installed(f"the model in {path}", "transformers", extra="hf")
    model = load_folder(path)
    preprocessing: Any = Preprocessing.of_model(model)
    # A run of ours has its recipe beside the model, which says where its images are.
    about = {"recipe": read_recipe_values(path / RECIPE)} if (path / RECIPE).is_file() else {}
    return LoadedModel(path.name, model, preprocessing, model.pretrained_cfg["label_names"] or None, about=about)


def _from_name(name: str, file: str | Path | None, pretrained: bool | None) -> LoadedModel:
    check_name(name, "model, run folder or file")
    if file is not None:
        state = read_state_dict(Path(file))
        heads = [tensor for key, tensor in state.items() if key in ("head.weight", "head.fc.weight")]
        options: dict[str, Any] = {"num_classes": len(heads[0])} if heads else {}
        model: Any = timm.create_model(name, **options)
        report = load_any(model, state, f"{file} does not fit {name}")
        for key, reason in report.dropped.items():
            raise ValueError(f"{file} does not fit {name}. {key}: {reason}")
    else:
        # Without being asked, only the weights that come with the package are loaded: nothing is downloaded.
        pretrained = name in shipped_models() if pretrained is None else pretrained
        try:
            model = timm.create_model(name, pretrained=pretrained)
        except OSError as error:
            raise OSError(
                f"timm cannot download the weights of {name}: connect to the network, or give a file of them with "
                f"--weights FILE ({error})"
            ) from error
    preprocessing: Any = Preprocessing.of_model(model)  # timm has a configuration of every model
    trained = file is not None or bool(pretrained)
    shipped = file is None and pretrained and name in shipped_models()
    unsure_below = read_card(weights_file(name)).unsure_below if shipped else None
    return LoadedModel(name, model, preprocessing, *classes_of(model), trained=trained, unsure_below=unsure_below)


def classes_of(model: nn.Module) -> tuple[list[str] | None, dict[str, str]]:
    """Names of the classes in timm's configuration of a model, None without, and words for them.

    A configuration describes the published weights: a model with another number of classes has no names in it.
    """
    config: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    names = list(config.get("label_names") or ())
    if not names or len(names) != getattr(model, "num_classes", len(names)):
        return None, {}
    return names, dict(config.get("label_descriptions") or {})


def _from_run(path: Path, branch: str | None, features: bool | None) -> LoadedModel:
    file = weights_of_run(path, branch=branch) if path.is_dir() else path
    about, weights = read_weights(file, branch)
    if TRANSFORMERS in about:
        raise ValueError(
            f"{path} is part of a run that is not finished or was copied without its config.json; resume it with "
            f"`sima {about.get('task')} --out FOLDER --resume`, and give the folder"
        )
    if "detector" in about:
        raise ValueError(f"{path} is a detector: use `sima detect predict` or `sima detect eval`")
    is_dino, recipe = about.get("task") == "dino", about.get("recipe")
    if is_dino and features is False:
        raise _has_no_classes(path)
    if not isinstance(recipe, Mapping):
        raise not_ours(file)
    without_names = is_dino or (about.get("task") == "saved" and about.get("classes") is None)
    classes = [] if without_names else class_names_in(about, file)
    try:
        settings = without_sources(from_dict(ModelSettings, recipe.get("model", {})))
        check_value(settings, ModelSettings, "model")
        check_arguments(settings)
        preprocessing = Preprocessing.from_recipe(recipe.get("data", {}))
        exchanges = Exchanges.from_about(about)
        count = _number_of_classes(about) if without_names and not is_dino else len(classes)
    except ValueError as error:
        raise ValueError(f"the recipe in {file} cannot be used: {error}") from error
    check_size(partial(create_model, settings, count), weights, file)
    model: Any = build_exchanged_model(settings, count, exchanges)
    if is_dino:
        set_token_refs(model, preprocessing.size, recipe.get("distill", {}))
    check_fits(weights, model.state_dict(), f"the weights in {file} do not fit the model of its recipe")
    model.load_state_dict(weights)
    # timm's configuration describes published weights; this model has the classes and the preprocessing of its run.
    own = {**preprocessing.to_timm(), "label_names": classes, "label_descriptions": {}}
    model.pretrained_cfg = {**model.pretrained_cfg, **own}
    return LoadedModel(path.name, model, preprocessing, None if without_names else classes, about=about)


def _has_no_classes(name: str | Path) -> ValueError:
    return ValueError(
        f"{name} gives features and has no classes: classify its features with `sima knn` or `sima linear`, or train a "
        "classifier with `sima finetune`"
    )


def _number_of_classes(about: Mapping[str, Any]) -> int:
    """The number of classes of a saved model that has no names for them."""
    count = about.get("num_classes")
    if type(count) is not int or not 0 <= count <= MOST:
        raise ValueError(f"`num_classes` must be a number from 0 to {MOST}, got {str(count)[:200]}")
    return count


def class_names_in(about: Mapping[str, Any], where: Path) -> list[str]:
    """The names of the classes in the metadata of a file."""
    names = about.get("classes")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where} does not list the names of its classes: `classes` must be a list of words")
    return names
