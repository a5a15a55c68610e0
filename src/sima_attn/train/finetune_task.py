"""Fine-tuning as a task of the training loop: what is taken from the trained model, what learns, what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sima_attn.conversion.api import SIMA_FORMS
from sima_attn.conversion.huggingface import core_of
from sima_attn.conversion.modules import looks_like_attention
from sima_attn.models import huggingface
from sima_attn.models.building import Exchanges, build_exchanged_model
from sima_attn.models.huggingface import TRANSFORMERS, TimmInterface
from sima_attn.nn import Attention
from sima_attn.nn.eval_mode import eval_mode
from sima_attn.train.best import Best
from sima_attn.train.classify import Classification
from sima_attn.train.finetune_recipe import BACKBONE, FinetuneRecipe

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from sima_attn.report.progress import RunProgress


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
        exchanges: How a timm model differs from the one of its settings.
        description: In a resumed run, the class and the configuration of a model of transformers.
    """

    recipe: FinetuneRecipe

    def __init__(
        self,
        recipe: FinetuneRecipe,
        fabric: Fabric,
        progress: RunProgress,
        *,
        start: Start | None,
        exchanges: Exchanges,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self.start, self.exchanges, self.description, self.progress = start, exchanges, description, progress
        self.keeps_classifier = False
        super().__init__(recipe, fabric, progress)
        self.title = f"{recipe.finetune.start}, fine-tuned on {len(self.classes)} classes"
        freeze(self.model, recipe.finetune.freeze)
        if isinstance(self.model, TimmInterface):
            freeze_unused(self.model, recipe.data.size)
        self.best = Best(self.model)
        self.completed = 0

    def build_model(self) -> nn.Module:
        """The model with a classifier for the classes of the data, and the other weights of the trained model."""
        if self.start is not None and isinstance(self.start.model, TimmInterface):
            self.description = huggingface.describe_classifier(self.start.model.network, self.classes)
        if self.description is not None:
            network = huggingface.build(self.description)
            model: nn.Module = TimmInterface(network, self.recipe.data.preprocessing)
        else:
            model = build_exchanged_model(self.recipe.model, len(self.classes), self.exchanges)
        if self.start is not None:
            self.keeps_classifier = self.start.classes == self.classes
            take_weights(model, self.start, keep_head=self.keeps_classifier)
            for note in (*self.start.notes, *self.summary()):
                self.progress.say(note)
            self.start = None  # its weights are not needed any more
        return model

    def summary(self) -> list[str]:
        """What the data are, and what the recipe makes of them."""
        kept = "the classes are those of the model, whose classifier is kept"
        head = kept if self.keeps_classifier else "the classifier is new"
        return [
            head,
            self.recipe.summary(len(self.source), self.steps_per_epoch),
        ]

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

    def needs_evaluation(self, step: int) -> bool:
        """Before the first step, where the classifier is kept: a run never ends below its start."""
        return step == 0 and self.keeps_classifier

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """As of any classifier; the best weights are kept."""
        metrics = super().evaluate(model)
        # Of the same accuracy, the lower loss is better.
        self.best.offer(model, metrics, (metrics["top1"], -metrics["loss"]), self.completed)
        if self.is_finished():
            self.progress.say(
                f"stopped early: {self.best.waited} evaluations in a row were not better than the one after "
                f"epoch {self.kept_epoch:g} (finetune.patience)"
            )
        return metrics

    @property
    def kept_epoch(self) -> float:
        """The epoch after which the best weights were found."""
        return self.best.step / self.steps_per_epoch

    def is_finished(self) -> bool:
        """After `patience` evaluations without a better one."""
        patience = self.recipe.finetune.patience
        return bool(patience) and self.best.waited >= patience

    def state(self) -> dict[str, nn.Module]:
        """The best weights, and the teacher."""
        return {**super().state(), "best": self.best}

    def about(self, recipe: FinetuneRecipe) -> dict[str, Any]:
        """As of any classifier, and what else is needed to build the model."""
        description = {} if self.description is None else {TRANSFORMERS: self.description}
        return {"task": "finetune", **super().about(recipe), **self.exchanges.to_dict(), **description}

    def result(self) -> nn.Module:
        """The weights with the best val accuracy."""
        return self.best.network


def take_weights(model: nn.Module, start: Start, *, keep_head: bool) -> None:
    """Copy the weights of the trained model; those of the classifier only where it is kept.

    Parameters that only the new attentions have keep their initial values.
    """
    source, target, heads = start.model, model, [] if keep_head else head_paths(model)
    if isinstance(source, TimmInterface) and isinstance(target, TimmInterface) and not keep_head:
        # Without a classifier the encoder has other names around it, and may have a pooler in its place.
        source, target, heads = source.encoder, target.encoder, ["pooler"]
    given, wanted = source.state_dict(), target.state_dict()
    new = attention_paths(target) if start.changed else []
    fitting = {name for name in given.keys() & wanted.keys() if given[name].shape == wanted[name].shape}
    foreign = sorted(name for name in (given.keys() | wanted.keys()) - fitting if not is_in(name, [*heads, *new]))
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise ValueError(
            f"the weights of {start.name} do not fit the model to fine-tune: {', '.join(foreign[:5])}{more} differ; "
            "choose the attention and the size that the weights were trained with, or other weights"
        )
    target.load_state_dict({name: given[name] for name in fitting if not is_in(name, heads)}, strict=False)


def is_in(name: str, paths: Sequence[str]) -> bool:
    """Whether a tensor belongs to one of the modules at these paths."""
    return name.startswith(tuple(f"{path}." for path in paths))


def head_paths(model: Any) -> list[str]:
    """Paths of the classifiers of a model; a distilled DeiT has two."""
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
        or core_of(module) is not None
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
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_in(name, paths))


def freeze_unused(model: nn.Module, size: int) -> None:
    """Freeze weights that do not change the logits, such as the mask token of DINOv2.

    They get no gradient, and several processes would wait for it.
    """
    with eval_mode(model):
        model(torch.zeros(1, 3, size, size)).sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
