"""linearize: a pretrained softmax model -> the same model with an exp-free attention that keeps what it knows."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from sima_attn._settings import from_dict, with_overrides
from sima_attn.auditing import audit
from sima_attn.conversion.huggingface import drops_patches, is_pretrained_model
from sima_attn.data.loader import possible_batch
from sima_attn.data.settings import Augment, Data
from sima_attn.distill.images import open_images
from sima_attn.distill.networks import classes_of, settings_of
from sima_attn.distill.recipes import DEFAULT_BUDGET, LinearizeRecipe, Stages, Transfer, epochs_for
from sima_attn.distill.result import Linearized
from sima_attn.distill.task import train_linearization
from sima_attn.models.building import set_image_size
from sima_attn.models.huggingface import TimmInterface, with_timm_interface
from sima_attn.models.loading import LoadedModel, load_model
from sima_attn.models.loading import classes_of as class_names_of
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.models.saving import size_of
from sima_attn.models.settings import ModelSettings
from sima_attn.train.classify import output_at
from sima_attn.train.recipes import Optim, Run
from sima_attn.train.run import RunFolder

DEFAULT_ATTENTION = "sima_local"
DEFAULT_STEPS, DEFAULT_BATCH = 1000, 48
CACHE_BYTES = 2**31  # decoded images of up to this size are kept on the device: decoding takes longer than learning


def linearize(
    model: nn.Module | str | Path | None,
    images: str | Path | None = None,
    out: str | Path = "runs/linearize",
    *,
    attention: str | None = None,
    size: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    keep: int | str | None = None,
    budget: float | None = None,
    finetune: int | None = None,
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
    the weights with the best final tokens on held-out images; `sima_attn.load(out)` and all commands take it.

    Args:
        model: A timm or transformers model with its weights, the name of a timm model, a run folder or file of
            `sima train`, or a folder of `save_pretrained`. Of a CLIP or SigLIP model, the vision model. None resumes.
        images: A folder of images; those in train/ and val/, or part of them is held out. "digits" needs no files.
        out: The run folder.
        attention: Name of the new attention; "sima_local" by default.
        size: Side of the images in pixels; by default the size that the model was trained with. Position embeddings
            are resampled, in teacher and student.
        steps: Training steps, 1000 by default: half of them block by block, a quarter for the attentions in the
            network, and a quarter for all weights.
        batch: Images per step, 48 by default; at most the number of images.
        keep: Number of attentions that stay those of the teacher, chosen by measurement, 0 by default; "auto" finds the
            smallest one that reaches the budget.
        budget: For keep="auto": cosine of the final tokens or, with labels, accuracy relative to the teacher's, after
            the first stage.
        finetune: Epochs of supervised fine-tuning at the end, 0 by default; the images need labels of the teacher's
            classes.
        weights, pretrained: For a name, see `load_model`.
        model_kwargs: For a model: the arguments of timm.create_model that it was created with, such as img_size. Drop
            rates among them are not those of the student, which drops nothing.
        overrides: Further settings of the recipe, such as "optim.lr=1e-3".
        resume: Resume the run in `out`, which needs no other argument; those that are given must be as they were.
    """
    options: dict[str, Any] = {"resume": resume, "device": device, "quiet": quiet}
    if resume and model is None and images is None:
        saved = RunFolder(Path(out)).read_recipe(LinearizeRecipe)
        _check_same(
            out,
            attention=(attention, saved.model.attention),
            size=(size, saved.data.size),
            batch=(batch, saved.run.batch),
            keep=(keep, "auto" if saved.transfer.keep is None else saved.transfer.keep),
            budget=(budget, saved.transfer.budget),
            finetune=(finetune, saved.schedule.finetune_epochs),
        )
        if any(given is not None for given in (steps, weights, pretrained, model_kwargs)):
            raise ValueError(f"the run in {out} has its number of steps and its teacher: omit --steps and the weights")
        return _unwrapped(train_linearization(with_overrides(saved, overrides), out, **options))
    if model is None or images is None:
        raise ValueError(
            "linearization needs a teacher and images: give a model and a folder with --data, or omit both and "
            "continue a run with --resume"
        )
    loaded = _teacher(model, weights, pretrained)
    attention = attention or DEFAULT_ATTENTION
    steps = DEFAULT_STEPS if steps is None else steps
    batch = DEFAULT_BATCH if batch is None else batch
    recipe = _recipe(loaded, str(images), attention, size, steps, batch, model_kwargs)
    recipe = with_overrides(_with_choices(recipe, 0 if keep is None else keep, budget, finetune or 0), overrides)
    if recipe.data.size != loaded.preprocessing.size:
        recipe = replace(recipe, model=set_image_size(loaded.model, recipe.model, recipe.data.size))
    _check_teacher(loaded, recipe.data.size)
    notes = []
    if recipe.run.batch < batch:
        notes.append(f"there are few images, so the batch is {recipe.run.batch} instead of {batch}")
    options |= {"teacher": loaded.model, "classes": _class_names(loaded), "notes": notes}
    return _unwrapped(train_linearization(recipe, out, **options))


def _check_same(out: str | Path, **given_and_saved: tuple[Any, Any]) -> None:
    for name, (given, saved) in given_and_saved.items():
        if given not in (None, saved):
            raise ValueError(
                f"the run in {out} has {name} {saved!r}, got {given!r}; omit it to resume, or start a new run with "
                "another --out"
            )


def _check_teacher(loaded: LoadedModel, size: int) -> None:
    """Raise where a teacher does not take images of this size, or its attentions are free of exp() already."""
    output_at(loaded.model, size, f"choose a size that {loaded.name} takes with --size")
    if not any(call.in_attention for call in audit(loaded.model, size).calls):
        raise ValueError(
            f"the attention of {loaded.name} is free of exp() already, so there is nothing to linearize; give a model "
            "with softmax attention"
        )


def _teacher(model: nn.Module | str | Path, weights: str | Path | None, pretrained: bool | None) -> LoadedModel:
    if isinstance(model, nn.Module):
        if weights is not None or pretrained is not None:
            raise ValueError(
                "weights and pretrained go with the name of a model, not with a model that has its weights"
            )
        copied: nn.Module = copy.deepcopy(model)  # it will be frozen, and moved to the device
        if is_pretrained_model(model):
            copied = with_timm_interface(copied)
        name = settings_of(copied).name
        preprocessing: Any = Preprocessing.of_model(copied, size_of(copied))
        return _check_gives_tokens(LoadedModel(name, copied, preprocessing, *class_names_of(copied)))
    loaded = _check_gives_tokens(load_model(model, weights=weights, pretrained=pretrained, features=None))
    if not loaded.trained:
        raise ValueError(
            f"{model} has random weights, from which there is nothing to learn; give trained ones with --pretrained or "
            "--weights FILE, or the folder of a run"
        )
    return loaded


def _check_gives_tokens(loaded: LoadedModel) -> LoadedModel:
    """The model, in float32; raises for models of transformers that do not give the tokens of the whole image."""
    model = loaded.model
    if not isinstance(model, TimmInterface):
        return loaded
    if drops_patches(model.encoder.config):
        raise ValueError(
            f"{type(model.network).__name__} drops patches at random; load its encoder as a ViT, which has the same "
            "weights: ViTModel.from_pretrained(FOLDER, add_pooling_layer=False)"
        )
    model.float()  # transformers loads the dtype of the file
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
    # A student that drops activations at random cannot follow its teacher, which drops none.
    kwargs = {name: value for name, value in settings.kwargs.items() if "drop" not in name}
    preprocessing = loaded.preprocessing if size is None else replace(loaded.preprocessing, size=size)
    transfer = Transfer(teacher_attention=settings.attention)
    count = len(open_images(images, transfer.held_out, seed=0)[0])
    batch = possible_batch(batch, count, int(os.environ.get("WORLD_SIZE", "1")))
    stages = Stages(
        block_epochs=epochs_for(steps // 2, count, batch),
        attention_epochs=epochs_for(steps // 4, count, batch),
        network_epochs=epochs_for(steps // 4, count, batch),
    )
    return LinearizeRecipe(
        name="linearize",
        model=replace(settings, attention=attention, drop_path=0.0, kwargs=kwargs),
        data=Data(
            images,
            workers=0 if images == "digits" else 4,
            cache=images != "digits" and 3 * count * preprocessing.size**2 <= CACHE_BYTES,
            **vars(preprocessing),
        ),
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


def _unwrapped(done: Linearized) -> Linearized:
    """The result with the student that the user knows: a model of transformers without timm's interface."""
    model: Any = done.model
    return done._replace(model=model.network) if isinstance(model, TimmInterface) else done
