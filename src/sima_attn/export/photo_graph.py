"""`data.loader.evaluation_transform` inside an ONNX graph.

Shapes: photo [height, width, 3] in bytes -> images [1, 3, size, size], normalized.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.models.preprocessing import Preprocessing


class PreparePhoto(nn.Module):
    """PIL's arithmetic but for its rounding to bytes: within about one gray level of the transform.

    That transform cuts the ends off a photo more than 10 times as long as wide before resizing, a graph does not: there
    the two may be shifted by a part of a pixel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, how: Preprocessing) -> None:
        super().__init__()
        self.size, self.interpolation = how.size, how.interpolation
        self.resized, self.squash = how.resized, how.crop_mode == "squash"
        self.register_buffer("mean", torch.tensor(how.mean).view(1, 3, 1, 1) * 255)
        self.register_buffer("std", torch.tensor(how.std).view(1, 3, 1, 1) * 255)

    def forward(self, photo: Tensor) -> Tensor:
        """Photo [height, width, 3] in bytes -> [1, 3, size, size]."""
        height, width, _ = photo.shape
        rows: Any = self.resized
        columns: Any = self.resized
        if not self.squash:
            rows = torch.sym_max(self.resized, self.resized * height // width)
            columns = torch.sym_max(self.resized, self.resized * width // height)
        image = photo.permute(2, 0, 1)[None].float()  # [1, 3, height, width]
        image = self.resize(image, height, columns)  # PIL, too, resizes rows first and clips between the two
        image = self.resize(image, rows, columns)
        image = image.narrow(2, middle(rows - self.size), self.size).narrow(3, middle(columns - self.size), self.size)
        # An exporter cannot know what it measures: saying it keeps everything after this free of open sizes.
        image = image.reshape(1, 3, self.size, self.size)
        return (image - self.mean) / self.std

    def resize(self, image: Tensor, rows: Any, columns: Any) -> Tensor:
        """[1, 3, height, width] -> [1, 3, rows, columns], values kept within those of bytes."""
        return F.interpolate(image, size=(rows, columns), mode=self.interpolation, antialias=True).clamp(0, 255)


def middle(excess: Any) -> Any:
    """round(excess / 2), halves to the even number, in integers only: where torchvision cuts."""
    return (excess + excess // 2 % 2) // 2
