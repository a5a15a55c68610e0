"""Images -> boxes, classes, scores and masks: torchvision's Mask R-CNN on the pyramid of a model of the zoo.

Its heads are torchvision's. What is added makes a padded batch give what its images give alone: anchors lie at exact
strides and only on the image, and RoIAlign finds the image's border where it would be.

Shapes: B batch, A anchors, C channels, K classes; boxes (x0, y0, x1, y1) in pixels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper

from sima_attn.detect.backbone import Inside, block_maps
from sima_attn.detect.pyramid import COARSEST, STRIDES, Pyramid

ANCHOR_SIDES = (32, 64, 128, 256, 512)  # one a level
ANCHOR_RATIOS = (0.5, 1.0, 2.0)
LEVELS = ("0", "1", "2", "3")  # of the pyramid, that boxes and masks are pooled from
LEAST_LOGIT = -1e4  # below any other; float16 holds it

Target = dict[str, Tensor]


class Anchors(AnchorGenerator):
    """Anchors at exact strides. Those on the padding of an image are empty: (0, 0, 0, 0).

    torchvision divides the side of the batch by that of the map: 61 instead of 64 at 800 pixels, and another
    number for the same image in another batch.
    """

    def __init__(self) -> None:
        super().__init__(tuple((side,) for side in ANCHOR_SIDES), (ANCHOR_RATIOS,) * len(ANCHOR_SIDES))

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """[A, 4] for each image."""
        device = feature_maps[0].device
        self.set_cell_anchors(torch.promote_types(feature_maps[0].dtype, torch.float32), device)
        strides = (*STRIDES, COARSEST)
        steps: Any = [[stride] * 2 for stride in strides]  # numbers: tensors of them would wait for the device
        levels = self.grid_anchors([list(x.shape[-2:]) for x in feature_maps], steps)  # [rows * columns * 3, 4] each
        inside = Inside.of(image_list.image_sizes, tuple(image_list.tensors.shape[-2:]))
        if inside is None:
            return [torch.cat(levels)] * len(image_list.image_sizes)
        ratios = len(ANCHOR_RATIOS)
        masks = [inside.mask(stride, device).flatten(1).repeat_interleave(ratios, dim=1) for stride in strides]
        return list(torch.cat(levels) * torch.cat(masks, dim=1)[..., None])


def is_empty(boxes: Tensor) -> Tensor:
    """Which boxes [..., 4] have no width."""
    return boxes[..., 2] <= boxes[..., 0]


def widened(x: Tensor) -> Tensor:
    """float32 at least.

    torchvision rounds boxes to the type of what the heads give. Under autocast that would be bfloat16, whose
    neighbours lie 8 pixels apart at 1333.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RegionHead(RPNHead):
    """torchvision's, its outputs widened."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Maps -> objectness and box offsets of each."""
        objectness, offsets = super().forward(x)
        return [widened(o) for o in objectness], [widened(o) for o in offsets]


class BoxPredictor(FastRCNNPredictor):
    """torchvision's, its outputs widened."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Regions -> class scores and box offsets."""
        scores, offsets = super().forward(x)
        return widened(scores), widened(offsets)


class MaskPredictor(MaskRCNNPredictor):
    """torchvision's, its outputs widened."""

    def forward(self, x: Tensor) -> Tensor:
        """Regions -> masks of every class."""
        return widened(super().forward(x))


class ProposalNetwork(RegionProposalNetwork):
    """torchvision's, in which empty anchors are neither proposed nor trained on."""

    def filter_proposals(
        self, proposals: Tensor, objectness: Tensor, image_shapes: list[tuple[int, int]], num_anchors_per_level: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The best proposals: an empty anchor makes an empty box, which comes last and is then dropped as too small."""
        objectness = objectness.reshape(proposals.shape[:2]).masked_fill(is_empty(proposals), LEAST_LOGIT)
        return super().filter_proposals(proposals, objectness, image_shapes, num_anchors_per_level)

    def assign_targets_to_anchors(
        self, anchors: list[Tensor], targets: list[Target]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """1 for objects, 0 for background, -1 for what is not sampled."""
        labels, boxes = super().assign_targets_to_anchors(anchors, targets)
        return [x.masked_fill(is_empty(a), -1) for x, a in zip(labels, anchors, strict=True)], boxes


def pool(side: int) -> MultiScaleRoIAlign:
    """RoIAlign to side x side cells; torchvision guesses the strides from the first images, here they are known."""
    align = MultiScaleRoIAlign(list(LEVELS), side, sampling_ratio=2)
    align.scales = [1 / stride for stride in STRIDES]
    align.map_levels = initLevelMapper(2, 5)  # log2 of the strides
    return align


def with_edges(features: OrderedDict[str, Tensor], inside: Inside) -> OrderedDict[str, Tensor]:
    """The maps, their last real row and column repeated into the padding.

    RoIAlign reads between the last cell and the border of a map; on a larger canvas it would mix the padding in.
    """
    return OrderedDict(
        (name, torch.stack([_with_edge(x, grid) for x, grid in zip(features[name], inside.grids(stride), strict=True)]))
        for name, stride in zip(LEVELS, STRIDES, strict=True)
    )


def _with_edge(x: Tensor, grid: tuple[int, int]) -> Tensor:
    rows, columns = (
        torch.arange(side, device=x.device).clamp(max=own - 1) for side, own in zip(x.shape[1:], grid, strict=True)
    )
    return x.index_select(1, rows).index_select(2, columns)  # its gradient needs no sorting


class SimaMaskRCNN(MaskRCNN):
    """Mask R-CNN of K classes, labels 1 to K, on a pyramid.

    Images [3, height, width] in [0, 1], of any sizes. In evaluation they are resized to `min_size` and at most
    `max_size`, and what comes back is in pixels of the image given; in training they are taken as they come.
    """

    def __init__(
        self,
        backbone: Pyramid,
        num_classes: int,
        *,
        proposals: int = 1000,
        freeze_statistics: bool = False,
        **kwargs: Any,
    ) -> None:
        anchors = Anchors()
        head = RegionHead(backbone.out_channels, anchors.num_anchors_per_location()[0])
        super().__init__(
            backbone,
            rpn_anchor_generator=anchors,
            rpn_head=head,
            box_roi_pool=pool(7),
            box_predictor=BoxPredictor(1024, num_classes + 1),  # 0 is the background
            mask_roi_pool=pool(14),
            mask_predictor=MaskPredictor(256, 256, num_classes + 1),
            _skip_resize=True,  # in training
            **kwargs,
        )
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

    def train(self, mode: bool = True) -> SimaMaskRCNN:
        """Training or evaluation; frozen statistics stay as they are in both."""
        super().train(mode)
        if self.freeze_statistics:
            for module in self.backbone.maps.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def forward(self, images: list[Tensor], targets: list[Target] | None = None) -> Any:
        """Losses by name in training; in evaluation boxes, labels, scores and masks [n, 1, height, width] an image.

        A target has boxes [n, 4], labels [n] from 1 to K and masks [n, height, width]; n may be 0.
        """
        if self.training != (targets is not None):
            raise ValueError("targets are needed in training and only there; see model.train() and model.eval()")
        check_targets(targets or [], self.num_classes)
        given = [tuple(image.shape[-2:]) for image in images]
        batch, targets = self.transform(images, targets)
        inside = Inside.of(batch.image_sizes, tuple(batch.tensors.shape[-2:]))
        features = self.backbone(batch.tensors, inside)
        proposals, losses = self.rpn(batch, features, targets)
        pooled = features if inside is None else with_edges(features, inside)
        detections, more = self.roi_heads(pooled, proposals, batch.image_sizes, targets)
        if self.training:
            return losses | more
        return self.transform.postprocess(detections, batch.image_sizes, given)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's blocks in the backward pass, to save memory."""
        self.backbone.maps.body.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Parameters that optimisers must not decay, beside norms and biases: the backbone's."""
        return {f"backbone.maps.body.{name}" for name in self.backbone.maps.body.no_weight_decay()}


def check_targets(targets: Sequence[Target], num_classes: int) -> None:
    """Raise for boxes, labels and masks that do not fit each other."""
    for target in targets:
        boxes, labels, masks = target["boxes"], target["labels"], target["masks"]
        if boxes.shape != (len(labels), 4) or masks.dim() != 3 or len(masks) != len(labels):
            raise ValueError(
                "a target needs boxes [n, 4], labels [n] and masks [n, height, width], got "
                f"{tuple(boxes.shape)}, {tuple(labels.shape)} and {tuple(masks.shape)}"
            )
    if not any(len(target["labels"]) for target in targets):
        return
    boxes, labels = (torch.cat([target[name] for target in targets]) for name in ("boxes", "labels"))
    ends = (boxes[:, 2:] - boxes[:, :2]).min(), labels.min(), labels.max()
    least, low, high = torch.stack([end.to(boxes.dtype) for end in ends]).tolist()  # one wait for the device
    if not least > 0:
        wrong = boxes[~(boxes[:, 2:] > boxes[:, :2]).all(dim=1)][0]
        raise ValueError(f"a box must have x0 < x1 and y0 < y1, got {wrong}")
    if low < 1 or high > num_classes:
        raise ValueError(f"labels go from 1 to {num_classes}, got {low:.0f} to {high:.0f}")


def build_mask_rcnn(
    name: str,
    num_classes: int = 80,
    *,
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
) -> SimaMaskRCNN:
    """Mask R-CNN on a DeiT, XCiT or CvT of the zoo.

    Args:
        name: Of the model, e.g. "sima_xcit_small_12_p16_224", the paper's.
        num_classes: Without the background.
        blocks, drop_path, prepare, kwargs: See `block_maps`.
        norm_maps: Whether a LayerNorm stands between each block's map and the pyramid; see `Pyramid`.
        freeze_statistics: Whether BatchNorm of the backbone keeps the statistics it came with, also in training,
            where those of a batch are those of a few images and their padding.
        side, longest: In evaluation the shorter side, and the most that the longer one may have, in pixels.
        score_threshold, detections: Least score, and most detections of an image.
        proposals: Most regions of an image that the heads look at.
    """
    if num_classes < 1 or side < 1 or longest < side:
        raise ValueError(
            f"there must be a class or more, and a side that is not above the longest, got {num_classes=}, {side=}, "
            f"{longest=}"
        )
    maps = block_maps(name, blocks=blocks, drop_path=drop_path, prepare=prepare, **kwargs)
    return SimaMaskRCNN(
        Pyramid(maps, norm_maps),
        num_classes,
        proposals=proposals,
        freeze_statistics=freeze_statistics,
        min_size=side,
        max_size=longest,
        box_score_thresh=score_threshold,
        box_detections_per_img=detections,
    )
