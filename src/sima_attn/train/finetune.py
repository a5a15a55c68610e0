"""Fine-tuning: a trained model and images of other classes -> a classifier of these classes. `sima finetune` calls it.

The model is built from its settings with a new classifier, and takes over all other weights. The result are the weights
with the best val accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from sima_attn._settings import check, from_dict, with_overrides
from sima_attn.conversion.placing import converted_modules
from sima_attn.data.settings import Data
from sima_attn.data.splits import check_classes, open_split, with_val_images
from sima_attn.models.building import Exchanges, set_image_size, token_refs_of, without_sources
from sima_attn.models.huggingface import TRANSFORMERS, TimmInterface, convert_encoder, keep_scale
from sima_attn.models.loading import LoadedModel, load, load_model
from sima_attn.models.saving import copy_of
from sima_attn.models.settings import ModelSettings
from sima_attn.nn import attention_class
from sima_attn.nn.token_ref import sima_modules, tokens_at
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.classify import output_at
from sima_attn.train.finetune_recipe import (
    BACKBONE,
    Finetune,
    FinetuneRecipe,
    default_augment,
    default_batch,
    default_epochs,
    default_schedule,
)
from sima_attn.train.finetune_task import Finetuning, Start
from sima_attn.train.recipes import Optim, Run
from sima_attn.train.run import RunFolder
from sima_attn.train.start import train_task, with_possible_batch

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from sima_attn.report.progress import RunProgress
    from sima_attn.train.task import RunSummary


class Finetuned(NamedTuple):
    """The model with the best val accuracy in eval mode, its metrics, the epoch that they are of, and the run."""

    model: nn.Module
    metrics: dict[str, float]
    epoch: float
    summary: RunSummary


def finetune(
    model: nn.Module | str | Path | None = None,
    data: str | Path | None = None,
    out: str | Path = "runs/finetune",
    *,
    attention: str | None = None,
    weights: str | Path | None = None,
    pretrained: bool | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    size: int | None = None,
    freeze: str | None = None,
    lr: float | None = None,
    val: float | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
) -> Finetuned:
    """Train a trained model further, on images of your own classes.

    The classifier is new unless the classes are those of the model. The run folder `out` holds the weights with the
    best val accuracy; `sima_attn.load(out)` and all commands take it. Of a model of transformers it is a folder of
    `save_pretrained`, too.

    Args:
        model: What `load_model` takes: the name of a timm model, a run folder, a file of weights, a folder of
            `sima_attn.save` or of `save_pretrained`; or a model of timm or transformers, of which a copy is trained.
            None is the model in the package.
        data: A folder of images: `CLASS/*.jpg`, or a format of `sima train`.
        out: The run folder.
        attention: Name of another attention to build the model with; the other weights are kept.
        weights, pretrained: For a name, see `load_model`.
        model_kwargs: For a timm model in memory: the arguments of timm.create_model that it was created with.
        epochs, batch: By default they follow from the number of images, and are printed.
        size: Side of the images in pixels; by default that of the model. Position embeddings are resampled, by
            transformers in each forward.
        freeze: "backbone" trains the classifier alone, "all-but-attention" the attentions too.
        lr: Learning rate of the classifier; earlier layers have smaller ones.
        val: Part of the images of each class to hold out as val images; 0.2 where the data have none.
        overrides: Further settings of the recipe, such as "finetune.patience=5".
        resume: Resume the run in `out`, with its model; options that are given must be as they were.
    """
    given = {
        "model.attention": attention,
        "data.path": data,
        "data.size": size,
        "data.val": val,
        "finetune.freeze": freeze,
        "optim.lr": lr,
        "schedule.epochs": epochs,
        "run.batch": batch,
    }
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    if resume:
        if any(each is not None for each in (model, weights, pretrained, model_kwargs)):
            raise ValueError("a resumed run has its model in its checkpoints: omit the model and its weights")
        recipe = with_overrides(RunFolder(Path(out)).read_recipe(FinetuneRecipe), [*overrides, *options])
        return train_finetuning(recipe, out, start=None, device=device, quiet=quiet)
    if data is None:
        raise ValueError("fine-tuning needs images: give a folder with --data, or resume a run with --resume")
    loaded = _trained_model(model, weights, pretrained, model_kwargs)
    name = loaded.name if model is None or isinstance(model, nn.Module) else str(model)
    recipe, notes = _recipe(loaded, name, given, [*overrides, *options])
    check(recipe)
    of_transformers = isinstance(loaded.model, TimmInterface)
    recipe, start, exchanges = (_prepare_transformers if of_transformers else _prepare)(loaded, recipe, notes)
    return train_finetuning(recipe, out, start=start, exchanges=exchanges, device=device, quiet=quiet)


def train_finetuning(
    recipe: FinetuneRecipe,
    out: str | Path,
    *,
    start: Start | None,
    exchanges: Exchanges | None = None,
    device: str = "auto",
    quiet: bool = False,
) -> Finetuned:
    """Fine-tune by a recipe into a folder, or, without a start, resume the run in it."""
    description = None
    if start is None:
        saved = load_newest(RunFolder(Path(out)).checkpoints)
        if saved is None:
            raise ValueError(f"the run in {out} has no checkpoint to resume from; start a new one with another --out")
        exchanges, description = Exchanges.from_about(saved["about"]), saved["about"].get(TRANSFORMERS)
        del saved
    task: Finetuning | None = None

    def build(recipe: FinetuneRecipe, fabric: Fabric, progress: RunProgress) -> Finetuning:
        nonlocal task
        task = Finetuning(
            recipe, fabric, progress, start=start, exchanges=exchanges or Exchanges(), description=description
        )
        return task

    resume = start is None
    summary = train_task(recipe, out, build=build, resume=resume, device=device, quiet=quiet)
    assert task is not None
    return Finetuned(load(out), task.best.metrics, task.kept_epoch, summary)


def _trained_model(
    model: nn.Module | str | Path | None,
    weights: str | Path | None,
    pretrained: bool | None,
    model_kwargs: Mapping[str, Any] | None,
) -> LoadedModel:
    if isinstance(model, nn.Module):
        if weights is not None or pretrained is not None:
            raise ValueError("weights and pretrained go with the name of a model, and this model has its weights")
        return copy_of(model, model_kwargs)
    if model_kwargs:
        raise ValueError(f"model_kwargs describe a model in memory, got {dict(model_kwargs)} with {model}")
    loaded = load_model(model, weights=weights, pretrained=pretrained, features=None)
    if not loaded.trained:
        raise ValueError(
            f"{model} has random weights, so there is nothing to fine-tune; give trained ones with --weights FILE or "
            "--pretrained, or the folder of a run (`sima train` trains from random weights)"
        )
    return loaded


def _recipe(
    loaded: LoadedModel, start: str, given: dict[str, Any], overrides: list[str]
) -> tuple[FinetuneRecipe, list[str]]:
    """The recipe of a new run, with its overrides, and what to print about its defaults."""
    path = str(given["data.path"])
    data = Data(path, workers=0 if path == "digits" else 4, **vars(loaded.preprocessing))
    data = with_overrides(_Wrapped(data), [o for o in overrides if o.startswith("data.")]).data
    data, notes = with_val_images(data)
    source = open_split(data, "train")
    check_classes(source, path)
    count = len(source)
    epochs = given["schedule.epochs"] or default_epochs(count)
    changed = given["model.attention"] not in (None, _settings_of(loaded).attention)
    recipe = FinetuneRecipe(
        name="finetune",
        model=replace(_settings_of(loaded), drop_path=0.0),
        data=data,
        augment=default_augment(path),
        # A new attention changes what every layer gets, so that early layers have to learn as well.
        finetune=Finetune(start, layer_decay=1.0 if changed else 0.75),
        optim=Optim(lr=2e-3 if given["finetune.freeze"] == BACKBONE else 5e-4, lr_batch=0, clip=1.0),
        schedule=default_schedule(epochs),
        run=Run(batch=default_batch(count), log_steps=10),
    )
    recipe = with_overrides(recipe, overrides)
    recipe, about_batch = with_possible_batch(recipe, count, even=recipe.augment.mixes)
    return recipe, notes + about_batch


@dataclass(frozen=True)
class _Wrapped:
    """The group `data` alone, so that its overrides can be applied before the images are counted."""

    data: Data


def _settings_of(loaded: LoadedModel) -> ModelSettings:
    """The settings of the model: of its run, or its name alone; of a model of transformers its class."""
    if isinstance(loaded.model, TimmInterface):
        return ModelSettings(type(loaded.model.network).__name__)
    recipe = loaded.about.get("recipe")
    settings = from_dict(ModelSettings, recipe["model"]) if recipe else ModelSettings(loaded.name)
    return replace(without_sources(settings), num_classes=None)


def _prepare(loaded: LoadedModel, recipe: FinetuneRecipe, notes: list[str]) -> tuple[FinetuneRecipe, Start, Exchanges]:
    """The recipe with the arguments of the model, the trained model at the new size, and how the new one differs."""
    exchanges = Exchanges.from_about(loaded.about)
    changed = recipe.model.attention != _settings_of(loaded).attention
    if changed:
        exchanged = exchanges.kept or exchanges.converted or loaded.about.get("task") == "linearize"
        _check_attention(recipe, loaded.name, exchanged=bool(exchanged))
    model: Any = loaded.model
    trained, size = loaded.preprocessing.size, recipe.data.size
    token_refs = token_refs_of(model)
    without = [module for module in sima_modules(model) if module.token_ref is None]
    if size != trained and not changed and without:
        paths = {module: path for path, module in model.named_modules()}
        counts = tokens_at(model, without, trained)
        token_refs |= {paths[module]: tokens for module, tokens in zip(without, counts, strict=True)}
        notes.append(_scale_note(trained))
    if size != trained:
        recipe = replace(recipe, model=set_image_size(model, recipe.model, size))
    exchanges = replace(exchanges, token_refs={} if changed else token_refs)
    return recipe, Start(model, loaded.name, loaded.classes, changed, notes), exchanges


def _prepare_transformers(
    loaded: LoadedModel, recipe: FinetuneRecipe, notes: list[str]
) -> tuple[FinetuneRecipe, Start, Exchanges]:
    """The same for a model of transformers, whose configuration says which of its attentions are converted."""
    model: Any = loaded.model.float()  # transformers loads the dtype of the file
    own = _settings_of(loaded)
    if replace(recipe.model, attention=None) != own:
        raise ValueError(
            f"{loaded.name} is a model of transformers, which has settings of its own: of the group `model` only "
            "model.attention can be set"
        )
    trained, size = loaded.preprocessing.size, recipe.data.size
    output_at(model, size, f"choose a size that {loaded.name} takes with --size, or omit it")
    if recipe.model.attention is not None:
        _check_attention(recipe, loaded.name, exchanged=bool(converted_modules(model)))
        convert_encoder(model, recipe.model.attention)
    elif size != trained and keep_scale(model, trained):
        notes.append(_scale_note(trained))
    return recipe, Start(model, loaded.name, loaded.classes, False, notes), Exchanges()


def _check_attention(recipe: FinetuneRecipe, name: str, *, exchanged: bool) -> None:
    """Raise where the attention is unknown, or the attentions of the model were exchanged before."""
    attention_class(str(recipe.model.attention))
    if exchanged:
        raise ValueError(
            f"the attentions of {name} were exchanged before, and it is fine-tuned as it is: omit --attention, got "
            f"{recipe.model.attention!r}"
        )


def _scale_note(trained: int) -> str:
    return f"SimA gets other numbers of tokens than at {trained} px: token_ref keeps the scale of its output"
