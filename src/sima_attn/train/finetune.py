"""Fine-tuning: a trained model and images of other classes -> a classifier of these classes. `sima finetune` calls it.

The model is built from its settings with a new classifier, and takes over all other weights. The result are the weights
with the best val accuracy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from timm.optim import param_groups_layer_decay
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sima_attn._settings import check, from_dict, with_overrides
from sima_attn.conversion.api import SIMA_FORMS
from sima_attn.conversion.modules import looks_like_attention
from sima_attn.data.settings import Data
from sima_attn.data.sources import Source, has_val_images, open_split
from sima_attn.models.building import Exchanges, build_exchanged_model, token_refs_of, without_sources
from sima_attn.models.huggingface import TimmInterface
from sima_attn.models.loading import LoadedModel, load_model
from sima_attn.models.settings import ModelSettings
from sima_attn.nn import Attention, attention_class
from sima_attn.nn.token_ref import sima_modules, tokens_at
from sima_attn.train.best import Best
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.classify import Classification
from sima_attn.train.finetune_recipe import (
    BACKBONE,
    DEFAULT_VAL,
    Finetune,
    FinetuneRecipe,
    default_augment,
    default_batch,
    default_epochs,
    default_schedule,
    possible_batch,
)
from sima_attn.train.recipes import Optim, Run
from sima_attn.train.run import RunFolder
from sima_attn.train.start import train_task

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from sima_attn.report.progress import RunProgress
    from sima_attn.train.engine import RunSummary


class Finetuned(NamedTuple):
    """The model with the best val accuracy in eval mode, its metrics, the epoch that they are of, and the run."""

    model: nn.Module
    metrics: dict[str, float]
    epoch: float
    summary: RunSummary


@dataclass(frozen=True)
class Start:
    """Where a new run starts.

    Attributes:
        model: The trained model, at the image size of the run.
        name: What to call it.
        classes: Names of its classes, None where they are not known.
        changed: Whether its attentions are exchanged, so that their weights need not fit.
        notes: Lines to print.
    """

    model: nn.Module
    name: str
    classes: list[str] | None
    changed: bool
    notes: Sequence[str]


class Finetuning(Classification):
    """A trained model learns the classes of the data.

    Args:
        start: The trained model; None in a resumed run, whose checkpoint has the weights.
        exchanges: How the model differs from the one of its settings.
    """

    def __init__(
        self,
        recipe: FinetuneRecipe,
        fabric: Fabric,
        progress: RunProgress,
        *,
        start: Start | None,
        exchanges: Exchanges,
    ) -> None:
        self.start, self.exchanges, self.progress = start, exchanges, progress
        super().__init__(recipe, fabric, progress)
        self.title = f"{recipe.finetune.start}, fine-tuned on {len(self.classes)} classes"
        freeze(self.model, recipe.finetune.freeze)
        self.best = Best(self.model)
        self.completed = 0

    def build_model(self) -> nn.Module:
        """The model with a classifier for the classes of the data, and the other weights of the trained model."""
        model = build_exchanged_model(self.recipe.model, len(self.classes), self.exchanges)
        if self.start is not None:
            same = self.start.classes == self.classes
            take_weights(model, self.start, keep_head=same)
            for note in self.start.notes:
                self.progress.say(note)
            head = "the classes are those of the model, whose classifier is kept" if same else "the classifier is new"
            run, epochs = self.recipe.run, self.recipe.schedule.epochs
            self.progress.say(
                f"{len(self.source)} train and {len(self.val)} val images, {len(self.classes)} classes: {head}"
            )
            self.progress.say(
                f"{epochs} epochs of {self.steps_per_epoch} steps, batch {run.batch}, {self.recipe.data.size} px"
            )
            self.start = None  # its weights are not needed any more
        return model

    def parameter_groups(self, weight_decay: float) -> Any:
        """Groups per layer, with smaller learning rates in earlier layers; frozen weights are in none."""
        decay = self.recipe.finetune.layer_decay
        if decay == 1:
            return super().parameter_groups(weight_decay)
        excluded: Any = getattr(self.model, "no_weight_decay", tuple)
        return param_groups_layer_decay(
            self.model, weight_decay, no_weight_decay_list=tuple(excluded()), layer_decay=decay
        )

    def before_step(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Frozen batch norms keep their statistics too."""
        if self.recipe.finetune.freeze is not None:
            for module in self.model.modules():
                if isinstance(module, _BatchNorm) and not any(p.requires_grad for p in module.parameters()):
                    module.eval()

    def after_step(self, step: int) -> None:
        """Remember the step for the evaluation after it."""
        self.completed = step
        super().after_step(step)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """As of any classifier; the best weights are kept."""
        metrics = super().evaluate(model)
        # Of the same accuracy, the lower loss is better.
        self.best.offer(model, metrics, (metrics["top1"], -metrics["loss"]), self.completed)
        if self.is_finished():
            self.progress.say(
                f"stopped early: {self.best.waited} evaluations in a row were not better than the one after "
                f"epoch {self.best_epoch:g} (finetune.patience)"
            )
        return metrics

    @property
    def best_epoch(self) -> float:
        """The epoch after which the best weights were found."""
        return self.best.step / self.steps_per_epoch

    def is_finished(self) -> bool:
        """After `patience` evaluations without a better one."""
        patience = self.recipe.finetune.patience
        return bool(patience) and self.best.waited >= patience

    def state(self) -> dict[str, nn.Module]:
        """The best weights."""
        return {"best": self.best}

    def about(self, recipe: FinetuneRecipe) -> dict[str, Any]:
        """As of any classifier, and what else is needed to build the model."""
        return {"task": "finetune", **super().about(recipe), **self.exchanges.to_dict()}

    def result(self) -> nn.Module:
        """The weights with the best val accuracy."""
        return self.best.network


def take_weights(model: nn.Module, start: Start, *, keep_head: bool) -> None:
    """Copy the weights of the trained model; those of the classifier only where it is kept.

    Parameters that only the new attentions have keep their initial values.
    """
    given, wanted = start.model.state_dict(), model.state_dict()
    heads = tuple(f"{path}." for path in head_paths(model))
    new = tuple(f"{path}." for path in attention_paths(model)) if start.changed else ()
    fitting = {name for name in given.keys() & wanted.keys() if given[name].shape == wanted[name].shape}
    free = new if keep_head else (*heads, *new)
    foreign = sorted(name for name in (given.keys() | wanted.keys()) - fitting if not name.startswith(free))
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise ValueError(
            f"the weights of {start.name} do not fit the model to fine-tune: {', '.join(foreign[:5])}{more} differ; "
            "choose the attention and the size that the weights were trained with, or other weights"
        )
    taken = {name for name in fitting if keep_head or not name.startswith(heads)}
    model.load_state_dict({name: given[name] for name in taken}, strict=False)


def head_paths(model: Any) -> list[str]:
    """Paths of the classifiers of a timm model; a distilled DeiT has two."""
    heads = model.get_classifier()
    heads = heads if isinstance(heads, tuple) else (heads,)
    return [path for path, module in model.named_modules() if any(module is head for head in heads)]


def attention_paths(model: nn.Module) -> list[str]:
    """Paths of the attentions of a model."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, (Attention, *SIMA_FORMS))
        or type(module).__name__ == "XCA"
        or looks_like_attention(module)
    ]


def freeze(model: nn.Module, what: str | None) -> None:
    """Freeze all weights but those of the classifier and, unless the whole backbone is frozen, of the attentions."""
    if what is None:
        return
    paths = head_paths(model)
    if what != BACKBONE:
        attentions = attention_paths(model)
        if not attentions:
            raise ValueError(f"{type(model).__name__} has no attention to train: use --freeze {BACKBONE}, or omit it")
        paths += attentions
    learning = tuple(f"{path}." for path in paths)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(learning))


def finetune(
    model: str | Path | None = None,
    data: str | Path | None = None,
    out: str | Path = "runs/finetune",
    *,
    attention: str | None = None,
    weights: str | Path | None = None,
    pretrained: bool | None = None,
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
    best val accuracy; `sima_attn.load(out)` and all commands take it.

    Args:
        model: What `load_model` takes: the name of a timm model, a run folder, a file of weights, a folder of
            `sima_attn.save`. None is the model in the package.
        data: A folder of images: `CLASS/*.jpg`, or a format of `sima train`.
        out: The run folder.
        attention: Name of another attention to build the model with; the other weights are kept.
        weights, pretrained: For a name, see `load_model`.
        epochs, batch: By default they follow from the number of images, and are printed.
        size: Side of the images in pixels; by default that of the model. Position embeddings are resampled.
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
        if model is not None or weights is not None or pretrained is not None:
            raise ValueError("a resumed run has its model in its checkpoints: omit the model and its weights")
        recipe = with_overrides(RunFolder(Path(out)).read_recipe(FinetuneRecipe), [*overrides, *options])
        return train_finetuning(recipe, out, start=None, device=device, quiet=quiet)
    if data is None:
        raise ValueError("fine-tuning needs images: give a folder with --data, or resume a run with --resume")
    loaded = _trained_model(model, weights, pretrained)
    recipe, notes = _recipe(loaded, "" if model is None else str(model), given, [*overrides, *options])
    check(recipe)
    recipe, start, exchanges = _prepare(loaded, recipe, notes)
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
    if start is None:
        saved = load_newest(RunFolder(Path(out)).checkpoints)
        if saved is None:
            raise ValueError(f"the run in {out} has no checkpoint to resume from; start a new one with another --out")
        exchanges = Exchanges.from_about(saved["about"])
        del saved
    task: Finetuning | None = None

    def build(recipe: FinetuneRecipe, fabric: Fabric, progress: RunProgress) -> Finetuning:
        nonlocal task
        task = Finetuning(recipe, fabric, progress, start=start, exchanges=exchanges or Exchanges())
        return task

    resume = start is None
    summary = train_task(recipe, out, build=build, command="finetune", resume=resume, device=device, quiet=quiet)
    assert task is not None
    return Finetuned(load_model(out).model, task.best.metrics, task.best_epoch, summary)


def _trained_model(model: str | Path | None, weights: str | Path | None, pretrained: bool | None) -> LoadedModel:
    loaded = load_model(model, weights=weights, pretrained=pretrained, features=None)
    if isinstance(loaded.model, TimmInterface):
        raise ValueError(
            f"{model} is a model of transformers, and `sima finetune` takes models of timm; train it with the Trainer "
            "of transformers, which trains and saves converted attentions too"
        )
    if not loaded.trained:
        raise ValueError(
            f"{model} has random weights, so there is nothing to fine-tune; give trained ones with --weights FILE or "
            "--pretrained, or the folder of a run (`sima train` trains from random weights)"
        )
    return loaded


def _recipe(
    loaded: LoadedModel, given_name: str, given: dict[str, Any], overrides: list[str]
) -> tuple[FinetuneRecipe, list[str]]:
    """The recipe of a new run, with its overrides, and what to print about its defaults."""
    notes: list[str] = []
    path = str(given["data.path"])
    data = Data(path, workers=0 if path == "digits" else 4, **vars(loaded.preprocessing))
    data = with_overrides(_Wrapped(data), [o for o in overrides if o.startswith("data.")]).data
    if data.val is None and not has_val_images(path):
        data = replace(data, val=DEFAULT_VAL)
        notes.append(f"{path} has no val images: {DEFAULT_VAL:.0%} of each class are held out (--val)")
    source = open_split(data, "train")
    _check_classes(source, path)
    count = len(source)
    epochs = given["schedule.epochs"] or default_epochs(count)
    changed = given["model.attention"] not in (None, _settings_of(loaded).attention)
    recipe = FinetuneRecipe(
        name="finetune",
        model=replace(_settings_of(loaded), drop_path=0.0),
        data=data,
        augment=default_augment(path),
        # A new attention changes what every layer gets, so that early layers have to learn as well.
        finetune=Finetune(given_name or loaded.name, layer_decay=1.0 if changed else 0.75),
        optim=Optim(lr=2e-3 if given["finetune.freeze"] == BACKBONE else 5e-4, lr_batch=0, clip=1.0),
        schedule=default_schedule(epochs),
        run=Run(batch=default_batch(count), log_steps=10),
    )
    recipe = with_overrides(recipe, overrides)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    batch = possible_batch(recipe.run.batch, count, processes)
    if batch != recipe.run.batch:
        notes.append(f"there are {count} train images, so the batch is {batch} instead of {recipe.run.batch}")
    return replace(recipe, run=replace(recipe.run, batch=batch)), notes


@dataclass(frozen=True)
class _Wrapped:
    """The group `data` alone, so that its overrides can be applied before the images are counted."""

    data: Data


def _check_classes(source: Source, path: str) -> None:
    if len(source.classes) < 2:
        raise ValueError(
            f"{path} has one class ({source.classes[0]}), and a classifier needs at least two: put the images of each "
            "class into a folder of its own"
        )


def _settings_of(loaded: LoadedModel) -> ModelSettings:
    """The settings of the model: of its run, or its name alone."""
    recipe = loaded.about.get("recipe")
    settings = from_dict(ModelSettings, recipe["model"]) if recipe else ModelSettings(loaded.name)
    return replace(without_sources(settings), num_classes=None)


def _prepare(loaded: LoadedModel, recipe: FinetuneRecipe, notes: list[str]) -> tuple[FinetuneRecipe, Start, Exchanges]:
    """The recipe with the arguments of the model, the trained model at the new size, and how the new one differs."""
    own = _settings_of(loaded)
    exchanges = Exchanges.from_about(loaded.about)
    changed = recipe.model.attention != own.attention
    if changed:
        attention_class(str(recipe.model.attention))  # an unknown name is an error
        if exchanges.kept or exchanges.converted or loaded.about.get("task") == "linearize":
            raise ValueError(
                f"the attentions of {loaded.name} were exchanged before, and it is fine-tuned as it is: omit "
                f"--attention, got {recipe.model.attention!r}"
            )
    model: Any = loaded.model
    trained, size = loaded.preprocessing.size, recipe.data.size
    token_refs = token_refs_of(model)
    without = [module for module in sima_modules(model) if module.token_ref is None]
    if size != trained and not changed and without:
        paths = {module: path for path, module in model.named_modules()}
        counts = tokens_at(model, without, trained)
        token_refs |= {paths[module]: tokens for module, tokens in zip(without, counts, strict=True)}
        notes.append(f"SimA gets other numbers of tokens than at {trained} px: token_ref keeps the scale of its output")
    kwargs = dict(recipe.model.kwargs)
    if size != trained and hasattr(model, "set_input_size"):
        model.set_input_size(img_size=(size, size))  # timm resamples the position embeddings
        kwargs["img_size"] = size
    recipe = replace(recipe, model=replace(recipe.model, kwargs=kwargs))
    exchanges = replace(exchanges, token_refs={} if changed else token_refs)
    return recipe, Start(model, loaded.name, loaded.classes, changed, notes), exchanges
