"""A trained classifier as a teacher: a student learns from its probabilities beside the labels.

Both see the same augmented images, so that the teacher says what is in the crop or mixture that the student sees.
Shapes: B batch, S side in pixels, K classes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from sima_attn.data.cache import resize
from sima_attn.data.settings import Data
from sima_attn.models.compiled import compile_blocks
from sima_attn.models.loading import load_model
from sima_attn.train.recipes import TeacherSettings


class Teacher(nn.Module):
    """A frozen classifier that sees the images of the student at its own size, with its own mean and std.

    Args:
        classes: Of the data; those of the teacher must be the same.
        data: Size, mean and std of the student's images.
        compiled: Compile it with torch.compile, as the student.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, settings: TeacherSettings, classes: list[str], data: Data, *, compiled: bool) -> None:
        super().__init__()
        loaded = load_model(settings.path)
        loaded.check_has_classes()
        if not loaded.trained:
            raise ValueError(f"the teacher {settings.path} has random weights; give the run of a trained classifier")
        if loaded.classes != classes:
            raise ValueError(
                f"the teacher {settings.path} knows {_listed(loaded.classes)}, the data have {_listed(classes)}; train "
                "or fine-tune a teacher on the classes of the data"
            )
        self.settings = settings
        self.size = loaded.preprocessing.size
        mean, std, own_mean, own_std = (
            torch.tensor(values).view(1, 3, 1, 1)
            for values in (data.mean, data.std, loaded.preprocessing.mean, loaded.preprocessing.std)
        )
        self.register_buffer("scale", std / own_std, persistent=False)
        self.register_buffer("shift", (mean - own_mean) / own_std, persistent=False)
        self.network: Any = loaded.model.requires_grad_(False)
        if compiled:
            for module in self.network.modules():
                if isinstance(module, DropPath):
                    module.drop_prob = 0.0  # of no effect in evaluation, and blocks of one rate share a compilation
            self.network = compile_blocks(self.network)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Normalized images of the student [B, 3, S, S] -> logits [B, K]."""
        return self.network(resize(images * self.scale + self.shift, self.size)).float()

    def train(self, mode: bool = True) -> "Teacher":
        """The teacher stays in evaluation mode."""
        return super().train(False)

    def loss(self, logits: Tensor, images: Tensor) -> Tensor:
        """Kullback-Leibler divergence from the teacher's probabilities to the student's, for logits [B, K].

        The square of the temperature keeps the gradients of about the same size.
        """
        T = self.settings.temperature
        student, teacher = (x.float().div(T).log_softmax(1) for x in (logits, self(images)))
        return T**2 * F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def _listed(classes: list[str] | None) -> str:
    """Their number and the first ones."""
    if classes is None:
        return "classes without names"
    return f"{len(classes)} classes ({', '.join(classes[:3])}{', ...' * (len(classes) > 3)})"
