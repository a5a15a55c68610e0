"""What the training loop trains: a task has the model, the batches and the loss; and what a run returns."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from safetensors.torch import save_file
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

from sima_attn._files import atomic_write
from sima_attn._settings import to_dict
from sima_attn.models.huggingface import TimmInterface, save_folder
from sima_attn.train.run import RunFolder
from sima_attn.train.sharding import whole_tensors


class Task(ABC):
    """Model, data and loss of a run: classification, DINO or detection.

    Attributes:
        recipe: That of the run.
        model: The module to train. The loop wraps it and passes the wrapped module to `loss`.
        steps_per_epoch: Optimizer steps per epoch.
        title: Title of the learning curve.
        recordable: Whether the loss supports CUDA graphs (run.cuda_graph): everything that changes between steps is in
            the prepared batch, a sequence of tensors of fixed shapes, or in tensors that `before_step` fills. Other
            changes are those from stage to stage, see `starts_stage`.
        calls_wrapper: Whether `loss` calls the wrapped module, which averages the gradients of several processes. If it
            calls parts of `model` instead, the loop averages them.
        stage: Name of the current stage for logs and progress bar, set by `before_step`; empty in a run of one stage.
    """

    recipe: Any
    model: nn.Module
    steps_per_epoch: int
    title: str = ""
    recordable: ClassVar[bool] = False
    calls_wrapper: ClassVar[bool] = True
    stage: str = ""

    @abstractmethod
    def batches(self, start: int, stop: int) -> Iterator[Any]:
        """Batches of this process, on its device, for the steps from start to stop: `accumulate` batches per step.

        They must depend only on the arguments and the recipe: a resumed run calls this with its own start.
        """

    def prepare(self, batch: Any) -> Any:
        """Augment a batch for `loss`: everything that draws random numbers or branches in Python at each step."""
        return batch

    def draw_batch(self, batch: Any, path: Path) -> None:  # noqa: B027
        """Draw a prepared batch into a PNG file, with the labels; it must not draw random numbers.

        The loop calls it with the first batch of a run, before the pass.
        """

    @abstractmethod
    def loss(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a prepared batch, and further numbers to log under fixed names."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model, reduced over all processes."""

    def parameter_groups(self, weight_decay: float) -> Any:
        """Parameter groups of the optimizer: no decay for biases, norms and the model's `no_weight_decay` list."""
        excluded: Any = getattr(self.model, "no_weight_decay", tuple)
        return param_groups_weight_decay(self.model, weight_decay, no_weight_decay_list=excluded())

    def starts_stage(self, step: int) -> bool:
        """Whether a stage with another loss begins with this step, counted from 0.

        The optimizer then starts anew: its averages of squared gradients would be those of the old loss. Where the new
        gradients are a hundred times larger, so would be the first steps. A recorded pass is recorded again.
        """
        return False

    def before_step(self, step: int, groups: list[dict[str, Any]]) -> None:  # noqa: B027
        """Called with the parameter groups after the learning rates are set, e.g. to schedule the weight decay."""

    def after_backward(self, step: int) -> None:  # noqa: B027
        """Called when the gradients of a step are complete and unscaled, e.g. to drop some of them."""

    def after_step(self, step: int) -> None:  # noqa: B027
        """Called after each optimizer step with the number of completed steps, e.g. to update a teacher."""

    def needs_evaluation(self, step: int) -> bool:
        """Whether to evaluate after this many steps, beside run.eval_epochs, e.g. before training or after a stage."""
        return False

    def is_finished(self) -> bool:
        """Whether to end the run before its last step; asked after each evaluation, and when a run is resumed.

        The answer must follow from `state` alone, and be the same in all processes.
        """
        return False

    def state(self) -> dict[str, nn.Module]:
        """Further modules to save in checkpoints, by name: a teacher, a center."""
        return {}

    def about(self, recipe: Any) -> dict[str, Any]:
        """Plain values to save with each checkpoint and the weights: the recipe, the classes, the number of images."""
        return {"recipe": to_dict(recipe)}

    @property
    def kept_epoch(self) -> float | None:
        """The epoch whose weights are the result; None for the last one."""
        return None

    def result(self) -> nn.Module:
        """The module to save as weights.safetensors."""
        return self.model

    def write_result(self, folder: RunFolder, about: dict[str, Any], *, first: bool) -> None:
        """Write the trained weights, with what `about` returns, into the run folder.

        All processes call it, because sharded weights are gathered from all; the first one writes. Of a model of
        transformers it writes what `save_pretrained` does.
        """
        network = self.result()
        if isinstance(network, TimmInterface):
            if first:
                save_folder(network, folder.path, self.recipe.data.preprocessing)
            return
        tensors = whole_tensors(network, keep=first)
        if first:
            with atomic_write(folder.weights) as temporary:
                save_file(tensors, temporary, metadata={"about": json.dumps(about)})


class RunSummary(NamedTuple):
    """Metrics of the last evaluation, the averaged model, steps of the run, seconds of this process.

    There is an averaged model with run.ema; of a sharded run it is only in the checkpoints.
    """

    metrics: dict[str, float]
    ema: nn.Module | None
    steps: int
    seconds: float
