"""torchvision's Mask R-CNN, or Faster R-CNN without masks, on the feature pyramid of a model of the zoo.

The heads are torchvision's. The changes make the results independent of the padding of a batch: anchors are at exact
strides and only on the image, and RoIAlign sees the border of the image.

Shapes: B batch, A anchors, C channels, K classes; boxes (x0, y0, x1, y1) in pixels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper

from sima_attn.detect.backbone import BatchLayout, block_maps
from sima_attn.detect.pyramid import COARSEST, STRIDES, Pyramid

ANCHOR_SIDES = (32, 64, 128, 256, 512)  # one per level
ANCHOR_RATIOS = (0.5, 1.0, 2.0)
LEVELS = ("0", "1", "2", "3")  # of the pyramid, for pooling boxes and masks
LEAST_LOGIT = -1e4  # below all others, and within float16

Target = dict[str, Tensor]


class Anchors(AnchorGenerator):
    """Anchors at exact strides. Anchors in the padding are empty boxes: (0, 0, 0, 0).

    torchvision divides the side of the batch by that of the map, which gives 61 instead of 64 at 800 pixels, and
    depends on the other images in the batch.
    """

    def __init__(self) -> None:
        super().__init__(tuple((side,) for side in ANCHOR_SIDES), (ANCHOR_RATIOS,) * len(ANCHOR_SIDES))

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Anchors [A, 4] per image."""
        device = feature_maps[0].device
        self.set_cell_anchors(torch.promote_types(feature_maps[0].dtype, torch.float32), device)
        strides = (*STRIDES, COARSEST)
        steps: Any = [[stride] * 2 for stride in strides]  # numbers: tensors would synchronize
        levels = self.grid_anchors([list(x.shape[-2:]) for x in feature_maps], steps)  # [rows * columns * 3, 4] each
        layout = BatchLayout.of(image_list.image_sizes, tuple(image_list.tensors.shape[-2:]))
        if layout is None:
            return [torch.cat(levels)] * len(image_list.image_sizes)
        ratios = len(ANCHOR_RATIOS)
        masks = [layout.mask(stride, device).flatten(1).repeat_interleave(ratios, dim=1) for stride in strides]
        return list(torch.cat(levels) * torch.cat(masks, dim=1)[..., None])


def is_empty(boxes: Tensor) -> Tensor:
    """True for boxes [..., 4] without width."""
    return boxes[..., 2] <= boxes[..., 0]


def _to_float32(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Forward hook that casts the outputs of a head to float32, unless their dtype is larger.

    torchvision rounds boxes to the dtype of the head outputs. Under autocast that is bfloat16, with a resolution of 8
    pixels at 1333.
    """
    return tree_map(lambda x: x.to(torch.promote_types(x.dtype, torch.float32)), outputs)


class ProposalNetwork(RegionProposalNetwork):
    """torchvision's module, in which empty anchors are neither proposed nor trained on."""

    def filter_proposals(
        self, proposals: Tensor, objectness: Tensor, image_shapes: list[tuple[int, int]], num_anchors_per_level: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The best proposals. Empty anchors give empty boxes, which rank last and are then removed as too small."""
        objectness = objectness.reshape(proposals.shape[:2]).masked_fill(is_empty(proposals), LEAST_LOGIT)
        return super().filter_proposals(proposals, objectness, image_shapes, num_anchors_per_level)

    def assign_targets_to_anchors(
        self, anchors: list[Tensor], targets: list[Target]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Labels of the anchors: 1 for objects, 0 for background, -1 for ignored."""
        labels, boxes = super().assign_targets_to_anchors(anchors, targets)
        return [x.masked_fill(is_empty(a), -1) for x, a in zip(labels, anchors, strict=True)], boxes


def pool(side: int) -> MultiScaleRoIAlign:
    """RoIAlign to side x side cells, with the known strides; torchvision infers them from the first images."""
    align = MultiScaleRoIAlign(list(LEVELS), side, sampling_ratio=2)
    align.scales = [1 / stride for stride in STRIDES]
    align.map_levels = initLevelMapper(2, 5)  # log2 of the strides
    return align


def with_edges(features: OrderedDict[str, Tensor], layout: BatchLayout) -> OrderedDict[str, Tensor]:
    """The maps with the last row and column of each image repeated into the padding.

    RoIAlign interpolates between the last cell and the border of a map; in a padded batch it would mix in the padding.
    """
    return OrderedDict(
        (name, torch.stack([_with_edge(x, grid) for x, grid in zip(features[name], layout.grids(stride), strict=True)]))
        for name, stride in zip(LEVELS, STRIDES, strict=True)
    )


def _with_edge(x: Tensor, grid: tuple[int, int]) -> Tensor:
    rows, columns = (
        torch.arange(side, device=x.device).clamp(max=own - 1) for side, own in zip(x.shape[1:], grid, strict=True)
    )
    return x.index_select(1, rows).index_select(2, columns)  # its gradient needs no sort


class SimaRCNN(FasterRCNN):
    """Mask R-CNN, or Faster R-CNN without masks, with K classes, labels 1 to K, on a feature pyramid.

    Images are [3, height, width] in [0, 1], of any sizes. In evaluation they are resized to a shorter side of
    `min_size` and a longer side of at most `max_size`, and results are in pixels of the given image. In training they
    are not resized.
    """

    def __init__(
        self,
        backbone: Pyramid,
        num_classes: int,
        *,
        masks: bool = True,
        proposals: int = 1000,
        freeze_statistics: bool = False,
        **kwargs: Any,
    ) -> None:
        anchors = Anchors()
        head = RPNHead(backbone.out_channels, anchors.num_anchors_per_location()[0])
        box_predictor = FastRCNNPredictor(1024, num_classes + 1)  # 0 is the background
        super().__init__(
            backbone,
            rpn_anchor_generator=anchors,
            rpn_head=head,
            box_roi_pool=pool(7),
            box_predictor=box_predictor,
            _skip_resize=True,  # only in training
            **kwargs,
        )
        for part in (head, box_predictor):
            part.register_forward_hook(_to_float32)
        if masks:  # as in torchvision's MaskRCNN
            self.roi_heads.mask_roi_pool = pool(14)
            self.roi_heads.mask_head = MaskRCNNHeads(backbone.out_channels, (256,) * 4, 1)
            self.roi_heads.mask_predictor = MaskRCNNPredictor(256, 256, num_classes + 1)
            self.roi_heads.mask_predictor.register_forward_hook(_to_float32)
        self.rpn = ProposalNetwork(
            anchors,
            head,
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2000, "testing": 1000},
            post_nms_top_n={"training": proposals, "testing": proposals},
            nms_thresh=0.7,
        )
        self.num_classes, self.freeze_statistics = num_classes, freeze_statistics
        self.train()

    @property
    def has_masks(self) -> bool:
        """Whether it is a Mask R-CNN; otherwise a Faster R-CNN."""
        return self.roi_heads.has_mask()

    def train(self, mode: bool = True) -> SimaRCNN:
        """Set training or evaluation mode; frozen BatchNorms stay in evaluation mode."""
        super().train(mode)
        if self.freeze_statistics:
            for module in self.backbone.maps.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def forward(self, images: list[Tensor], targets: list[Target] | None = None) -> Any:
        """Losses by name in training; boxes, labels, scores and masks [n, 1, height, width] per image in evaluation.

        A target has boxes [n, 4], labels [n] from 1 to K and, for a Mask R-CNN, masks [n, height, width]; n may be 0.
        """
        if self.training != (targets is not None):
            raise ValueError("pass targets in training mode and only there; see model.train() and model.eval()")
        check_targets(targets or [], self.num_classes, self.has_masks)
        given = [tuple(image.shape[-2:]) for image in images]
        batch, targets = self.transform(images, targets)
        layout = BatchLayout.of(batch.image_sizes, tuple(batch.tensors.shape[-2:]))
        features = self.backbone(batch.tensors, layout)
        proposals, losses = self.rpn(batch, features, targets)
        pooled = features if layout is None else with_edges(features, layout)
        detections, more = self.roi_heads(pooled, proposals, batch.image_sizes, targets)
        if self.training:
            return losses | more
        return self.transform.postprocess(detections, batch.image_sizes, given)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks of the backbone in the backward pass, to save memory."""
        self.backbone.maps.body.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Parameters of the backbone without weight decay, besides norms and biases."""
        return {f"backbone.maps.body.{name}" for name in self.backbone.maps.body.no_weight_decay()}


def check_targets(targets: Sequence[Target], num_classes: int, masks: bool) -> None:
    """Raise ValueError for targets with wrong shapes, empty boxes, unknown labels, or without masks that are needed."""
    for target in targets:
        given = {name: tuple(value.shape) for name, value in target.items()}
        n = len(target["labels"])
        has_masks = len(given.get("masks", ())) == 3 and given["masks"][0] == n
        if given["boxes"] != (n, 4) or (masks and not has_masks):
            needed = "boxes [n, 4], labels [n]" + " and masks [n, height, width]" * masks
            raise ValueError(f"a target needs {needed}, got {given}")
    if not any(len(target["labels"]) for target in targets):
        return
    boxes, labels = (torch.cat([target[name] for target in targets]) for name in ("boxes", "labels"))
    ends = (boxes[:, 2:] - boxes[:, :2]).min(), labels.min(), labels.max()
    least, low, high = torch.stack([end.to(boxes.dtype) for end in ends]).tolist()  # one synchronization
    if not least > 0:
        wrong = boxes[~(boxes[:, 2:] > boxes[:, :2]).all(dim=1)][0]
        raise ValueError(f"a box must have x0 < x1 and y0 < y1, got {wrong}")
    if low < 1 or high > num_classes:
        raise ValueError(f"labels must be from 1 to {num_classes}, got {low:.0f} to {high:.0f}")


def build_rcnn(
    name: str,
    num_classes: int = 80,
    *,
    masks: bool = True,
    blocks: Sequence[int] | None = None,
    drop_path: float = 0.0,
    norm_maps: bool = False,
    freeze_statistics: bool = False,
    side: int = 800,
    longest: int = 1333,
    score_threshold: float = 0.05,
    detections: int = 100,
    proposals: int = 1000,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **kwargs: Any,
) -> SimaRCNN:
    """Mask R-CNN, or Faster R-CNN without masks, on a DeiT, XCiT or CvT of the zoo.

    Args:
        name: Name of the model, e.g. "sima_xcit_small_12_p16_224" as in the paper.
        num_classes: Number of classes without the background.
        masks: False builds a Faster R-CNN, which returns boxes only.
        blocks, drop_path, prepare, kwargs: See `block_maps`.
        norm_maps: Apply a LayerNorm to each map before the pyramid; see `Pyramid`.
        freeze_statistics: Keep the running statistics of the backbone's BatchNorms in training, where the statistics
            of a batch come from a few images and their padding.
        side, longest: Shorter side, and maximum of the longer side, in evaluation; in pixels.
        score_threshold, detections: Minimum score, and maximum number of detections per image.
        proposals: Maximum number of regions per image that the heads process.
    """
    maps = block_maps(name, blocks=blocks, drop_path=drop_path, prepare=prepare, **kwargs)
    return SimaRCNN(
        Pyramid(maps, norm_maps),
        num_classes,
        masks=masks,
        proposals=proposals,
        freeze_statistics=freeze_statistics,
        min_size=side,
        max_size=longest,
        box_score_thresh=score_threshold,
        box_detections_per_img=detections,
    )
