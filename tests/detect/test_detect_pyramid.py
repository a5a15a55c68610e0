"""Feature pyramids and the padding law: a padded batch gives what its images give alone."""

import pytest
import timm
import torch
from shapes import SMALL
from torch import nn

from closeness import assert_close
from sima_attn.detect.backbone import STRIDE, BatchLayout, block_maps, spread_blocks
from sima_attn.detect.pyramid import CHANNELS, Pyramid, to_stride
from sima_attn.detect.rcnn import Anchors, build_rcnn, with_edges
from sima_attn.nn import SimAttention
from sima_attn.nn.local_values import LocalValues
from sima_attn.ops import ExpCounter

FAMILIES = list(SMALL)
DEIT, XCIT, CVT = FAMILIES


def pyramid(name, *, norm=False, **kwargs) -> Pyramid:
    """Biases, filters and BatchNorms as after training: at their start they hide what reaches the padding."""
    model = Pyramid(block_maps(name, **SMALL[name], **kwargs), norm).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
        if getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias, std=0.5)
        if isinstance(module, LocalValues):
            nn.init.normal_(module.weight, std=0.5)
    return model


def padded(sizes):
    """Images of whole strides, alone and on a common canvas."""
    images = [torch.randn(1, 3, *size, dtype=torch.float64) for size in sizes]
    canvas = tuple(max(sides) for sides in zip(*sizes, strict=True))
    batch = torch.zeros(len(sizes), 3, *canvas, dtype=torch.float64)
    for i, image in enumerate(images):
        batch[i, :, : image.shape[2], : image.shape[3]] = image[0]
    return images, batch, BatchLayout.of(sizes, canvas)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [(64, 96), (160, 32)])
def test_strides_are_4_to_64_for_every_family(name, size):
    maps = pyramid(name)(torch.randn(2, 3, *size, dtype=torch.float64))
    for (level, x), stride in zip(maps.items(), (4, 8, 16, 32, 64), strict=True):
        assert x.shape == (2, CHANNELS, -(-size[0] // stride), -(-size[1] // stride)), level


@pytest.mark.parametrize("name", ["sima_xcit_nano_12_p8_224", "sima_xcit_mini_p4_64", "sima_vit_mini_patch4_64"])
def test_finer_patches_are_brought_to_the_same_strides(name):
    model = Pyramid(block_maps(name, depth=2)).eval()
    with torch.no_grad():
        maps = model(torch.randn(1, 3, 64, 64))
    assert [x.shape[-1] for x in maps.values()] == [16, 8, 4, 2, 1]


def test_finer_by_transposed_convolutions_coarser_by_pooling():
    kinds = {want: [type(m).__name__ for m in to_stride(8, 16, want, nn.GELU).modules()] for want in (4, 8, 16, 32, 64)}
    assert kinds[4] == ["Sequential", "ConvTranspose2d", "BatchNorm2d", "GELU", "ConvTranspose2d"]
    assert kinds[8] == ["Sequential", "ConvTranspose2d"]
    assert kinds[16] == ["Identity"]
    assert kinds[32] == kinds[64] == ["MaxPool2d"]
    with pytest.raises(ValueError, match="a stride of 14 cannot be changed to 4"):
        to_stride(8, 14, 4, nn.GELU)


@pytest.mark.parametrize("norm", [True, False])
def test_with_norms_the_pyramid_does_not_depend_on_how_large_the_maps_are(norm, monkeypatch):
    """The law, and that it fails without them."""
    model = pyramid(XCIT, norm=norm)
    image = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    found = model.maps(image)
    outs = []
    for scale in (1, 30):
        monkeypatch.setattr(model.maps, "forward", lambda *_, scale=scale: [scale * x for x in found])
        outs.append(model(image)["1"])
    assert torch.allclose(*outs, rtol=1e-3, atol=1e-3) == norm


def test_frozen_statistics_stay_as_they_came_and_others_do_not():
    target = {"boxes": torch.tensor([[9.0, 9, 40, 50]]), "labels": torch.tensor([1]), "masks": torch.ones(1, 64, 64)}
    for frozen in (True, False):
        model = build_rcnn(XCIT, 2, proposals=4, freeze_statistics=frozen, **SMALL[XCIT])
        before = {name: x.clone() for name, x in model.backbone.maps.named_buffers()}
        losses = model.eval().train()([torch.rand(3, 64, 64)], [target])
        sum(losses.values()).backward()
        same = [torch.equal(x, before[name]) for name, x in model.backbone.maps.named_buffers() if "running" in name]
        assert same
        assert all(same) if frozen else not any(same)
        assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_blocks_are_the_papers_and_their_shares():
    assert spread_blocks(12) == (4, 6, 8, 12)
    assert spread_blocks(24) == (8, 12, 16, 24)
    maps = block_maps("sima_xcit_nano_12_p16_224")
    assert maps.indices == [3, 5, 7, 11]
    assert len(block_maps("sima_xcit_nano_12_p16_224", blocks=(1, 2, 3, 5)).body.blocks) == 5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (DEIT, {}),
        (DEIT, {"token_ref": "train"}),
        (DEIT, {"attention": "softmax"}),
        (DEIT, {"class_token": False, "global_pool": "avg"}),
        (DEIT, {"attention": "sima_local"}),
        (DEIT, {"attention": "sima_rope"}),
        (DEIT, {"attention": "relu2_wide"}),
        (XCIT, {}),
        (XCIT, {"token_ref": "train"}),
        (XCIT, {"attention": "xca"}),
        (XCIT, {"attention": "relu2"}),
        (XCIT, {"attention": "relu2_rope"}),
        (XCIT, {"norm": True}),
        (XCIT, {"lpi": False}),
        (CVT, {}),
        (CVT, {"token_ref": "train"}),
        (CVT, {"norm": True}),
        (CVT, {"attention": "softmax"}),
    ],
    ids=str,
)
def test_a_padded_batch_has_the_features_of_its_single_images(name, options):
    """Exact but for rounding, at every level, for DeiT, XCiT and CvT; and zero beside the images."""
    model = pyramid(name, **options)
    images, batch, layout = padded([(64, 96), (96, 32), (32, 64)])
    with torch.no_grad():
        together = model(batch, layout)
        for i, image in enumerate(images):
            alone = model(image)
            for level, x in alone.items():
                rows, columns = x.shape[2:]
                assert_close(together[level][i : i + 1, :, :rows, :columns], x, 1e-10)
                rest = together[level][i].clone()
                rest[:, :rows, :columns] = 0
                assert not rest.any()


def test_without_the_masks_padding_does_change_the_features():
    """The law above can fail."""
    model = pyramid(DEIT)
    images, batch, _ = padded([(64, 96), (96, 32)])
    with torch.no_grad(), pytest.raises(AssertionError):
        assert_close(model(batch)["2"][:1, :, :4, :6], model(images[0])["2"], 1e-2)


def test_an_attention_that_cannot_leave_padding_out_says_so_and_takes_single_sizes():
    model = pyramid(XCIT, attention="elu")
    images, batch, layout = padded([(64, 96), (96, 32)])
    assert model(images[0])["0"].shape[-1] == 24
    with pytest.raises(ValueError, match="EluAttention does not support padding"):
        model(batch, layout)


@pytest.mark.parametrize("name", FAMILIES)
def test_masked_training_has_gradients_everywhere_also_recomputed(name):
    """No parameter is left without one: several processes would wait for it for ever."""
    model = Pyramid(block_maps(name, **SMALL[name])).train()
    _, batch, layout = padded([(64, 96), (96, 32)])
    grads = []
    for recompute in (False, True):
        model.maps.body.set_grad_checkpointing(recompute)
        model.zero_grad()
        sum(x.square().mean() for x in model(batch.float(), layout).values()).backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == []
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert_close(grads[1], grads[0], 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_backbone_and_pyramid_are_free_of_exp_with_relu_and_not_without(name):
    counts = []
    _, batch, layout = padded([(64, 96), (96, 32)])
    for relu in (True, False):
        model = pyramid(name, relu=relu)
        with torch.no_grad(), ExpCounter() as counter:
            model(batch)
            model(batch, layout)
        counts.append(counter.total)
    assert counts[0] == 0
    assert counts[1] > 0


def test_parameters_are_the_papers_44_3_million_part_by_part():
    with torch.device("meta"):
        model = build_rcnn("sima_xcit_small_12_p16_224")
    parts = {
        "backbone": model.backbone.maps,
        "rescale": model.backbone.rescale,
        "fpn": model.backbone.fpn,
        "rpn": model.rpn,
        "box": nn.ModuleList([model.roi_heads.box_head, model.roi_heads.box_predictor]),
        "mask": nn.ModuleList([model.roi_heads.mask_head, model.roi_heads.mask_predictor]),
    }
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
    total = sum(p.numel() for p in model.parameters())
    assert sum(counts.values()) == total
    C, F, K = 384, 256, 81
    # Two transposed convolutions with BatchNorm, and one.
    assert counts["rescale"] == 3 * (4 * C * C + C) + 2 * C
    assert counts["fpn"] == 4 * (C * F + F) + 4 * (9 * F * F + F)
    assert counts["box"] == (49 * F * 1024 + 1024) + (1024 * 1024 + 1024) + 5 * K * (1024 + 1)
    # The classifier of 26.25 M without its head, class attention, final norm and class token.
    with torch.device("meta"):
        classifier = timm.create_model("sima_xcit_small_12_p16_224")
    gone = [classifier.head, classifier.cls_attn_blocks, classifier.norm]
    without = sum(p.numel() for p in classifier.parameters())
    without -= sum(p.numel() for module in gone for p in module.parameters()) + classifier.cls_token.numel()
    assert counts["backbone"] == without
    # mmdetection regresses boxes for 80 classes and draws masks for 80, torchvision for the background too.
    assert total - 4 * (1024 + 1) - (F + 1) == pytest.approx(44.3e6, rel=0.005)


def test_anchors_lie_at_exact_strides_and_only_on_the_images():
    from torchvision.models.detection.image_list import ImageList

    maps = [torch.zeros(2, 1, -(-96 // s), -(-160 // s)) for s in (4, 8, 16, 32, 64)]
    alone = [m[:1, :, : -(-64 // s), : -(-32 // s)] for m, s in zip(maps, (4, 8, 16, 32, 64), strict=True)]
    whole, part = Anchors()(ImageList(torch.zeros(2, 3, 96, 160), [(96, 160), (60, 30)]), maps)
    (single,) = Anchors()(ImageList(torch.zeros(1, 3, 64, 32), [(60, 30)]), alone)
    assert whole.shape == part.shape
    assert torch.equal(part[(part != 0).any(1)], single)
    centers = (whole[-3 * 6 :, :2] + whole[-3 * 6 :, 2:]) / 2  # of the coarsest level: 2 x 3 cells
    assert centers[::3].tolist() == [[x, y] for y in (0, 64) for x in (0, 64, 128)]


def test_edges_are_repeated_into_the_padding():
    maps = {str(i): torch.arange(8.0 * 8).view(1, 1, 8, 8)[..., : 8 >> i, : 8 >> i] for i in range(4)}
    layout = BatchLayout(((32, 32),), (32, 32))
    assert torch.equal(with_edges(maps, layout)["0"], maps["0"])
    smaller = with_edges({k: torch.cat([v, v], 3) for k, v in maps.items()}, BatchLayout(((32, 32),), (32, 64)))["0"]
    assert torch.equal(smaller[..., 8:], maps["0"][..., 7:].expand(-1, -1, -1, 8))


def test_there_is_no_layout_without_padding():
    assert BatchLayout.of([(60, 90), (64, 96)], (64, 96)) is None
    layout = BatchLayout.of([(60, 90), (32, 33)], (64, 96))
    assert layout.sizes == ((64, 96), (32, 64))
    for stride in (4, 16, STRIDE):
        assert layout.mask(stride, torch.device("cpu")).sum((1, 2, 3)).tolist() == [
            64 * 96 // stride**2,
            32 * 64 // stride**2,
        ]


@pytest.mark.parametrize("name", [DEIT, XCIT, CVT])
def test_a_padded_batch_gives_the_boxes_of_the_single_images(name):
    model = build_rcnn(name, 3, side=64, longest=96, score_threshold=0.0, detections=3, proposals=20, **SMALL[name])
    model = model.double().eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.1)
    images = [torch.rand(3, *size, dtype=torch.float64) for size in ((64, 90), (110, 70))]
    with torch.no_grad():
        together = model(images)
        for image, found in zip(images, together, strict=True):
            (alone,) = model([image])
            assert len(found["boxes"]) == 3
            for part in ("boxes", "scores", "masks"):
                assert_close(found[part], alone[part], 1e-7)
            assert torch.equal(found["labels"], alone["labels"])


def test_boxes_are_not_rounded_to_half_precision():
    """bfloat16 has whole pixels alone from 128 on, and every eighth at 1333."""
    model = build_rcnn(
        XCIT, 2, side=160, longest=160, score_threshold=0.0, detections=3, proposals=8, **SMALL[XCIT]
    ).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        (found,) = model([torch.rand(3, 160, 160)])
    assert {found[part].dtype for part in ("boxes", "scores", "masks")} == {torch.float32}
    assert (found["boxes"] != found["boxes"].bfloat16()).any()
    model.train()
    target = {"boxes": torch.tensor([[9.0, 9, 40, 50]]), "labels": torch.tensor([1]), "masks": torch.ones(1, 64, 64)}
    with torch.autocast("cpu", torch.bfloat16):
        losses = model([torch.rand(3, 64, 64)], [target])
    assert all(torch.isfinite(loss) and loss.dtype == torch.float32 for loss in losses.values())


def test_token_ref_is_the_tokens_of_the_training_size():
    model = build_rcnn("sima_xcit_nano_12_p16_224", 3, token_ref="train", depth=2)
    refs = {m.token_ref for m in model.modules() if isinstance(m, SimAttention)}
    assert refs == {14.0 * 14}


def test_targets_and_names_are_checked():
    model = build_rcnn(XCIT, 2, **SMALL[XCIT])
    image = torch.rand(3, 64, 64)
    good = {"boxes": torch.tensor([[1.0, 1, 9, 9]]), "labels": torch.tensor([1]), "masks": torch.ones(1, 64, 64)}
    for wrong, message in (
        ({"boxes": torch.tensor([[5.0, 1, 5, 9]])}, "x0 < x1"),
        ({"labels": torch.tensor([3])}, "labels must be from 1 to 2, got 3"),
        ({"masks": torch.ones(2, 64, 64)}, "masks"),
    ):
        with pytest.raises(ValueError, match=message):
            model([image], [{**good, **wrong}])
    with pytest.raises(ValueError, match="pass targets in training mode"):
        model([image])
    with pytest.raises(ValueError, match=r"unknown model .*did you mean 'sima_cvt_13'"):
        build_rcnn("sima_cvt13")
    with pytest.raises(ValueError, match="blocks must be four numbers from 1 to 2"):
        build_rcnn(XCIT, blocks=(1, 2, 3, 4), **SMALL[XCIT])
    with pytest.raises(ValueError, match="CvT feeds the pyramid from its stages"):
        build_rcnn(CVT, blocks=(1, 2, 3, 4))
    with pytest.raises(ValueError, match="cannot be built with"):
        build_rcnn(XCIT, depht=3)


def test_an_image_without_objects_can_be_trained_on():
    model = build_rcnn(XCIT, 2, proposals=4, **SMALL[XCIT]).train()
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long(), "masks": torch.zeros(0, 64, 64)}
    losses = model([torch.rand(3, 64, 64)], [empty])
    total = sum(losses.values())
    total.backward()
    assert torch.isfinite(total)
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
