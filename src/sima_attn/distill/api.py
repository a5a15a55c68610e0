"""linearize: a pretrained softmax model -> the same model with an exp-free attention that keeps what it knows."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from sima_attn._settings import from_dict, with_overrides
from sima_attn.data.settings import Augment, Data
from sima_attn.distill.networks import classes_of, settings_of
from sima_attn.distill.recipes import DEFAULT_BUDGET, LinearizeRecipe, Stages, Transfer, epochs_for
from sima_attn.distill.result import Linearized
from sima_attn.distill.task import open_images, train_linearization
from sima_attn.models.loading import LoadedModel, load_model
from sima_attn.models.loading import classes_of as class_names_of
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.models.settings import ModelSettings
from sima_attn.train.recipes import Optim, Run
from sima_attn.train.run import RunFolder

DEFAULT_ATTENTION = "sima_local"
DEFAULT_STEPS = 1000


def linearize(
    model: nn.Module | str | Path | None,
    images: str | Path | None = None,
    out: str | Path = "runs/linearize",
    *,
    attention: str = DEFAULT_ATTENTION,
    size: int | None = None,
    steps: int = DEFAULT_STEPS,
    batch: int = 48,
    keep: int | str = 0,
    budget: float | None = None,
    finetune: int = 0,
    weights: str | Path | None = None,
    pretrained: bool | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
) -> Linearized:
    """Replace the softmax attention of a trained model, and teach the new one on images without labels.

    The old model is the teacher. First each new attention learns the teacher's output for the teacher's input, all of
    them in one pass; then the whole network learns the teacher's final tokens and logits. The run folder `out` holds
    the weights with the best final tokens on held-out images; `load_model(out)` and all commands take it.

    Args:
        model: A timm model with its weights, the name of one, or a run folder or file of `sima train`. None resumes.
        images: A folder of images; those in train/ and val/, or part of them is held out. "digits" needs no files.
        out: The run folder.
        attention: Name of the new attention.
        size: Side of the images in pixels; by default the size that the model was trained with.
        steps: Training steps: half of them block by block, a quarter for the attentions in the network, and a quarter
            for all weights.
        batch: Images per step; at most the number of images.
        keep: Number of attentions that stay those of the teacher, chosen by measurement; "auto" finds the smallest one
            that reaches the budget.
        budget: For keep="auto": cosine of the final tokens or, with labels, accuracy relative to the teacher's, after
            the first stage.
        finetune: Epochs of supervised fine-tuning at the end, where the images have labels of the teacher's classes.
        weights, pretrained: For a name, see `load_model`.
        model_kwargs: For a model: the arguments of timm.create_model that it was created with, such as img_size.
        overrides: Further settings of the recipe, such as "optim.lr=1e-3".
        resume: Resume the run in `out`.
    """
    if resume:
        recipe = with_overrides(RunFolder(Path(out)).read_recipe(LinearizeRecipe), overrides)
        return train_linearization(recipe, out, resume=True, device=device, quiet=quiet)
    if model is None or images is None:
        raise ValueError("a linearization needs a model and images; only resume=True takes them from the run")
    loaded = _teacher(model, weights, pretrained)
    recipe = _recipe(loaded, str(images), attention, size, steps, batch, model_kwargs)
    recipe = with_overrides(_with_choices(recipe, keep, budget, finetune), overrides)
    options: dict[str, Any] = {"teacher": loaded.model, "classes": _class_names(loaded)}
    return train_linearization(recipe, out, device=device, quiet=quiet, **options)


def _teacher(model: nn.Module | str | Path, weights: str | Path | None, pretrained: bool | None) -> LoadedModel:
    if isinstance(model, nn.Module):
        if weights is not None or pretrained is not None:
            raise ValueError(
                "weights and pretrained go with the name of a model, not with a model that has its weights"
            )
        preprocessing: Any = Preprocessing.of_model(model)
        copied = copy.deepcopy(model)  # it will be frozen, and moved to the device
        return LoadedModel(settings_of(model).name, copied, preprocessing, *class_names_of(model))
    loaded = load_model(model, weights=weights, pretrained=pretrained)
    if not loaded.trained:
        raise ValueError(
            f"{model} has random weights, from which there is nothing to learn; give trained ones with --pretrained or "
            "--weights, or the folder of a run"
        )
    return loaded


def _recipe(
    loaded: LoadedModel,
    images: str,
    attention: str,
    size: int | None,
    steps: int,
    batch: int,
    model_kwargs: Mapping[str, Any] | None,
) -> LinearizeRecipe:
    saved = loaded.about.get("recipe")
    settings = from_dict(ModelSettings, saved["model"]) if saved else settings_of(loaded.model, model_kwargs)
    preprocessing = loaded.preprocessing if size is None else replace(loaded.preprocessing, size=size)
    transfer = Transfer(teacher_attention=settings.attention)
    count = len(open_images(images, transfer.held_out, seed=0)[0])
    batch = min(batch, count)
    stages = Stages(
        block_epochs=epochs_for(steps // 2, count, batch),
        attention_epochs=epochs_for(steps // 4, count, batch),
        network_epochs=epochs_for(steps // 4, count, batch),
    )
    return LinearizeRecipe(
        name="linearize",
        model=replace(settings, attention=attention, drop_path=0.0),
        data=Data(images, workers=0 if images == "digits" else 4, **vars(preprocessing)),
        # The student must follow the teacher on images as they are, so the crops are large.
        augment=Augment(crop="none", flip=0.0) if images == "digits" else Augment(scale=(0.35, 1.0)),
        transfer=transfer,
        optim=Optim(lr=2e-3, lr_batch=0, weight_decay=0.0, clip=1.0),
        schedule=stages,
        run=Run(batch=batch, log_steps=10, eval_epochs=max(1, stages.all_epochs // 10)),
    )


def _with_choices(recipe: LinearizeRecipe, keep: int | str, budget: float | None, finetune: int) -> LinearizeRecipe:
    """The recipe with the number of kept attentions and the epochs of fine-tuning."""
    if keep != "auto" and not (type(keep) is int and keep >= 0):
        raise ValueError(f"keep must be a number of attentions from 0 on or 'auto', got {keep!r}")
    kept = None if keep == "auto" else int(keep)
    if kept is None and budget is None:
        budget = DEFAULT_BUDGET
    return replace(
        recipe,
        transfer=replace(recipe.transfer, keep=kept, budget=budget),
        schedule=replace(recipe.schedule, finetune_epochs=finetune),
        augment=replace(recipe.augment, smoothing=0.1 if finetune else 0.0),
    )


def _class_names(loaded: LoadedModel) -> list[str]:
    return loaded.classes or [loaded.class_name(k) for k in range(classes_of(loaded.model))]
