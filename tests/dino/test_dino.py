"""DINO: loss, head, teacher and a whole optimizer step against formulas in NumPy; crops, collapse, crashes."""

import math
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forked
from sima_attn._settings import check, from_dict, to_dict, with_overrides
from sima_attn.data.augment import HUE, YIQ, blur, jitter_colors, random_boxes, sample_boxes
from sima_attn.data.crops import CropBatch, CropImage, View, split_views, views
from sima_attn.data.settings import Crops, Data
from sima_attn.dino import task as dino
from sima_attn.dino.recipes import DINO_RECIPES, DinoRecipe, Distill, named_dino_recipe
from sima_attn.dino.task import (
    Branch,
    Dino,
    DinoLoss,
    Head,
    build_backbone,
    cosine,
    entropy,
    information,
    spread,
    train_dino,
)
from sima_attn.nn import SimAttention, SimClassAttention
from sima_attn.probe.features import load_backbone
from sima_attn.probe.settings import Probe
from sima_attn.report.progress import RunProgress
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.classify import train_classifier
from sima_attn.train.fabric import start_fabric
from sima_attn.train.logs import read_log
from sima_attn.train.recipes import Model, Optim, Run, Schedule
from sima_attn.train.run import RunFolder
from small_runs import VIT, class_folders, picture, small_recipe

XCIT = Model(
    "sima_xcit_nano_12_p16_224",
    "sima",
    drop_path=0.2,
    kwargs={"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
)
SMALL = Distill(out_dim=12, hidden_dim=10, bottleneck_dim=6, momentum=0.9)


def small_dino(path, *changes, **parts) -> DinoRecipe:
    """A run of a second: 16 px, two layers, 2 global and 3 local crops."""
    recipe = DinoRecipe(
        name="small",
        model=Model("sima_deit_tiny_patch16_224", "sima", kwargs=VIT),
        data=Data(str(path), size=16, workers=0),
        crops=Crops(local_count=3, local_size=8, blur_sigma=(0.1, 1.0)),
        distill=SMALL,
        optim=Optim(lr=1e-3, lr_batch=0, weight_decay=0.04),
        schedule=Schedule(epochs=2, warmup_epochs=0),
        run=Run(batch=8, log_steps=1),
        probe=Probe(k=3, bank=20),
    )
    return with_overrides(replace(recipe, **parts), changes)


@pytest.fixture
def data(tmp_path):
    return class_folders(tmp_path / "data")


def train(recipe, out):
    finished = train_dino(recipe, out, device="cpu", quiet=True)
    return finished, load_newest(out / "checkpoints")


# The formulas, as one would write them on paper.


def np_softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def np_gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def np_loss(student, teacher, center, student_temp, teacher_temp):
    """student [V, B, K], teacher [G, B, K]."""
    terms = []
    for t in range(len(teacher)):
        for v in range(len(student)):
            if v != t:
                p = np_softmax((teacher[t] - center) / teacher_temp)
                log_q = np.log(np_softmax(student[v] / student_temp))
                terms.append(-(p * log_q).sum(-1).mean())
    return np.mean(terms)


def np_head(x, weights):
    for i in (0, 2, 4):
        x = x @ weights[f"mlp.{i}.weight"].T + weights[f"mlp.{i}.bias"]
        x = np_gelu(x) if i < 4 else x
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    v = weights["last_layer.parametrizations.weight.original1"]
    return x @ (v / np.linalg.norm(v, axis=1, keepdims=True)).T


def float64(module):
    return {name: w.detach().double().numpy().copy() for name, w in module.state_dict().items()}


@pytest.mark.parametrize(("V", "G"), [(5, 2), (2, 2), (3, 1), (4, 3)])
def test_the_loss_is_the_mean_cross_entropy_of_different_views(V, G):
    B, K = 4, 12
    student, teacher, center = torch.randn(V * B, K), torch.randn(G * B, K), torch.randn(K)
    loss = DinoLoss(SMALL)
    loss.center.copy_(center)
    value, targets = loss(student, teacher, B, 0.05)
    expected = np_loss(
        student.double().numpy().reshape(V, B, K),
        teacher.double().numpy().reshape(G, B, K),
        center.double().numpy(),
        0.1,
        0.05,
    )
    assert value.item() == pytest.approx(expected, rel=1e-5)
    assert np.allclose(targets.numpy(), np_softmax((teacher - center).double().numpy() / 0.05), atol=1e-6)


def test_centring_takes_off_what_all_outputs_share():
    loss = DinoLoss(SMALL)
    student, teacher = torch.randn(10, 12), torch.randn(4, 12)
    alone, _ = loss(student, teacher, 2, 0.04)
    shared = torch.randn(12)
    loss.center.copy_(shared)
    moved, _ = loss(student, teacher + shared, 2, 0.04)
    assert torch.allclose(alone, moved, atol=1e-4)


def test_the_head_is_a_cosine_to_its_prototypes():
    head = Head(7, SMALL)
    with torch.no_grad():
        head.mlp[0].bias.normal_()
    x = torch.randn(5, 7)
    out = head(x)
    assert np.allclose(out.detach().numpy(), np_head(x.double().numpy(), float64(head)), atol=1e-6)
    assert out.abs().max() <= 1 + 1e-6
    gains = head.last_layer.parametrizations.weight.original0
    assert torch.equal(gains, torch.ones(12, 1))
    assert not gains.requires_grad
    assert Head(7, replace(SMALL, norm_last_layer=False)).last_layer.parametrizations.weight.original0.requires_grad


def test_two_whole_steps_agree_with_numpy(tmp_path, monkeypatch):
    """Numerical gradients, clipping of each, AdamW with its rising decay, teacher and center: all in float64."""

    def tiny(recipe):
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))

    monkeypatch.setattr(dino, "build_backbone", tiny)
    # Numerical gradients need weights that are not tiny.
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda weight, std: nn.init.normal_(weight, std=0.7))
    seen, start = [], {}
    original = Dino.prepare

    def crops(self, batch):
        groups = original(self, batch)
        if not seen:
            start.update(float64(self.model))
        seen.append([g.mean((2, 3)).double().numpy() for g in groups])
        return groups

    monkeypatch.setattr(Dino, "prepare", crops)
    clip, lr, eps, low = 0.02, 0.05, 1e-2, 1e-5
    recipe = small_dino(
        class_folders(tmp_path / "data", per_class=(2, 1)),
        optim=Optim(lr=lr, lr_batch=0, weight_decay=0.1, eps=eps),
        distill=Distill(out_dim=6, hidden_dim=5, bottleneck_dim=3, momentum=0.6, clip=clip, freeze_last_layer=0),
        schedule=Schedule(epochs=1, warmup_epochs=0, min_lr=low),
        run=Run(batch=3),
        probe=Probe(bank=0),
    )
    _, state = train(recipe, tmp_path / "run")
    assert len(seen) == state["step"] == 2

    def logits(w, groups):
        x = np.concatenate(groups) @ w["backbone.2.weight"].T + w["backbone.2.bias"]
        return np_head(x, {n.removeprefix("head."): v for n, v in w.items()})

    student, teacher, center = start, {n: v.copy() for n, v in start.items()}, np.zeros(6)
    frozen = "head.last_layer.parametrizations.weight.original0"
    names = [n for n in student if n != frozen]
    moments = {n: [np.zeros_like(student[n]), np.zeros_like(student[n])] for n in names}
    clipped = 0
    for step, groups in enumerate(seen):
        outputs = logits(teacher, groups[:1])  # [2 * 3, 6]

        def loss(w, groups=groups, outputs=outputs, center=center):
            return np_loss(logits(w, groups).reshape(5, 3, 6), outputs.reshape(2, 3, 6), center, 0.1, 0.04)

        rate = low + (lr - low) * (1 + math.cos(math.pi * step / 2)) / 2
        decay = 0.4 + (0.1 - 0.4) * (1 + math.cos(math.pi * step / 2)) / 2
        gradients = {}
        for n in names:
            gradients[n] = np.zeros_like(student[n])
            for i in np.ndindex(student[n].shape):
                kept = student[n][i]
                student[n][i] = kept + 1e-6
                above = loss(student)
                student[n][i] = kept - 1e-6
                gradients[n][i] = (above - loss(student)) / 2e-6
                student[n][i] = kept
        for n in names:
            norm = np.linalg.norm(gradients[n])
            clipped += norm > clip
            g = gradients[n] * min(1, clip / (norm + 1e-6))
            first, second = moments[n]
            first[:], second[:] = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
            if student[n].ndim > 1:
                student[n] *= 1 - rate * decay
            one, two = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
            student[n] -= rate * one / (np.sqrt(two) + eps)
        m = 1 + (0.6 - 1) * (1 + math.cos(math.pi * step / 2)) / 2
        for n in names:
            teacher[n] = m * teacher[n] + (1 - m) * student[n]
        center = 0.9 * center + 0.1 * outputs.mean(0)
    assert 0 < clipped < 2 * len(names)
    for n in student:
        assert np.allclose(state["model"][n].numpy(), student[n], atol=2e-5), n
        assert np.allclose(state["task"]["teacher"][n].numpy(), teacher[n], atol=2e-5), n
    assert np.allclose(state["task"]["center"]["center"].numpy(), center, atol=1e-5)


def test_schedules():
    assert [cosine(0.996, 1, s, 4) for s in (0, 2, 4)] == pytest.approx([0.996, 0.998, 1])
    assert [cosine(0.04, 0.4, s, 4) for s in (0, 2, 4)] == pytest.approx([0.04, 0.22, 0.4])
    rising = Distill(teacher_temp=0.07, teacher_temp_start=0.04, teacher_temp_epochs=4)
    temperatures = [dino.teacher_temperature(rising, epoch) for epoch in range(6)]
    assert temperatures == pytest.approx([*np.linspace(0.04, 0.07, 4), 0.07, 0.07])
    assert dino.teacher_temperature(replace(rising, teacher_temp_epochs=1), 0) == 0.04
    assert dino.teacher_temperature(Distill(), 0) == 0.04


def test_the_weight_decay_rises_and_only_matrices_have_it(data, tmp_path, monkeypatch):
    seen = []
    original = Dino.before_step

    def look(self, step, groups):
        original(self, step, groups)
        seen.append([group["weight_decay"] for group in groups])
        assert all(p.ndim <= 1 for p in groups[0]["params"])
        assert all(p.ndim > 1 for p in groups[1]["params"])
        assert sum(len(g["params"]) for g in groups) == sum(p.requires_grad for p in self.model.parameters())

    monkeypatch.setattr(Dino, "before_step", look)
    train(small_dino(data, "probe.bank=0"), tmp_path / "run")
    assert seen == [[0.0, pytest.approx(cosine(0.04, 0.4, step, 6))] for step in range(6)]


def test_the_last_layer_is_frozen_in_the_first_epoch_and_the_gains_always(data, tmp_path, monkeypatch):
    seen = []
    original = Dino.after_step

    def look(self, step):
        original(self, step)
        weights = self.model.head.last_layer.parametrizations.weight
        seen.append([weights.original0.clone(), weights.original1.clone(), self.model.head.mlp[0].weight.clone()])

    monkeypatch.setattr(Dino, "after_step", look)
    _, state = train(small_dino(data, "probe.bank=0"), tmp_path / "run")
    gains, prototypes, other = zip(*seen, strict=True)
    assert all(torch.equal(g, torch.ones_like(g)) for g in gains)
    assert [torch.equal(p, prototypes[0]) for p in prototypes] == [True, True, True, False, False, False]
    assert not torch.equal(other[1], other[0])
    assert state["step"] == 6


# Crops


def test_views_are_the_global_ones_and_then_the_local_ones():
    made = views(Crops(local_count=3), 224)
    assert [view.size for view in made] == [224, 224, 96, 96, 96]
    assert [view.blur for view in made] == [1.0, 0.1, 0.5, 0.5, 0.5]
    assert [view.solarize for view in made] == [0.0, 0.2, 0.0, 0.0, 0.0]
    assert len(views(Crops(), 224)) == 10
    assert made[0] == View(224, (0.4, 1.0), 1.0, 0.0)


def test_crops_of_a_batch_have_their_sizes_and_are_all_different():
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    crops = Crops(local_count=4, local_size=12)
    data = Data("", size=32, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    crop = CropBatch(crops, data)
    large, small = crop(images)
    assert large.shape == (6, 3, 32, 32)
    assert small.shape == (12, 3, 12, 12)
    for group in (large, small):
        assert group.min() >= 0
        assert group.max() <= 1
    assert len({tuple(crop.flatten().tolist()) for crop in small}) == 12
    assert len(CropBatch(replace(crops, local_count=0), data)(images)) == 1
    made = []
    for given in (data, data, replace(data, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))):
        torch.manual_seed(5)
        made.append(CropBatch(crops, given)(images))
    for one, again, normalized in zip(*made, strict=True):
        assert torch.equal(one, again)
        mean, std = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
        assert torch.allclose(normalized, (one - mean) / std, atol=1e-5)


def test_blur_and_solarization_have_the_chance_of_their_view():
    """Of the global views the first is never solarized here, the second always."""
    crops = Crops(
        global_scale=(1.0, 1.0), local_count=0, flip=0.0, jitter=0.0, gray=0.0, blur=(0.0, 0.0, 0.0), solarize=1.0
    )
    data = Data("", size=16, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    white = torch.full((3, 3, 16, 16), 255, dtype=torch.uint8)
    first, second = CropBatch(crops, data)(white)[0].chunk(2)
    assert torch.allclose(first, torch.ones(3, 3, 16, 16))
    assert torch.allclose(second, torch.zeros(3, 3, 16, 16), atol=1e-6)
    edge = white.clone()
    edge[..., :8] = 0
    torch.manual_seed(0)
    blurred = CropBatch(replace(crops, solarize=0.0, blur=(1.0, 0.0, 0.0), blur_sigma=(2.0, 2.0)), data)(edge)[0]
    first, second = ((view > 0.02) & (view < 0.98) for view in blurred.chunk(2))
    assert (first.sum((1, 2, 3)) > second.sum((1, 2, 3))).all()


def test_drawing_the_views_leaves_the_weights_as_they_are(data, tmp_path, monkeypatch):
    recipe = small_dino(data, "schedule.epochs=1", "model.drop_path=0.2", "probe.bank=0")
    train(recipe, tmp_path / "with")
    monkeypatch.setattr(Dino, "draw_batch", lambda *arguments: None)
    train(recipe, tmp_path / "without")
    assert not (tmp_path / "without" / "batch.png").exists()
    with_, without = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("with", "without"))
    assert with_ == without


def test_views_follow_one_another_each_of_all_images():
    """Images of one color each: every view of image b has color b, in both ways of making them."""
    plain = {"jitter": 0.0, "gray": 0.0, "blur": (1.0, 1.0, 1.0), "solarize": 0.0, "local_count": 3, "local_size": 8}
    crops = Crops(**plain)
    levels = [40, 120, 200]
    images = torch.tensor(levels, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, 16, 16)
    plain_colors = Data("", size=16, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    from PIL import Image

    crop = CropImage(crops, 16, "bicubic")
    rows = torch.stack([crop(Image.new("RGB", (20, 18), (level,) * 3)) for level in levels])
    assert rows.dtype == torch.uint8
    for groups in (CropBatch(crops, plain_colors)(images), split_views(rows, crops, 16)):
        assert [group.shape for group in groups] == [(6, 3, 16, 16), (9, 3, 8, 8)]
        for group in groups:
            expected = torch.tensor(levels).repeat(len(group) // 3).view(-1, 1, 1, 1) / 255
            assert (group - expected).abs().max() < 1e-2


def test_a_crop_of_all_of_the_image_is_the_image_or_its_mirror():
    images = torch.rand(8, 3, 10, 10)
    boxes = random_boxes(images, (1.7, 1.7))  # an area larger than the image, at any ratio: all of it
    whole = sample_boxes(images, boxes, 10, flip=0.0, padding_mode="border")
    assert torch.allclose(whole, images, atol=1e-6)
    mirrored = sample_boxes(images, boxes, 10, flip=1.0, padding_mode="border")
    assert torch.allclose(mirrored, images.flip(3), atol=1e-5)


def test_blur_is_a_gaussian_and_keeps_what_is_flat():
    images = torch.rand(2, 3, 33, 33)
    out = blur(images, (1.3, 1.3))
    place = np.arange(33)
    kernel = np.exp(-((place - 16) ** 2) / (2 * 1.3**2))
    kernel /= kernel.sum()
    expected = np.einsum("bcij,i,j->bc", images.double().numpy(), kernel, kernel)
    assert np.allclose(out[:, :, 16, 16].numpy(), expected, atol=1e-6)
    assert torch.allclose(blur(torch.full((1, 3, 8, 8), 0.3), (0.1, 2.0)), torch.tensor(0.3))


def test_hue_keeps_the_luma_and_grays():
    images = torch.rand(4, 3, 6, 6) * 0.2 + 0.4  # far from the ends, where nothing is cut off
    turned = jitter_colors(images, 0.0, 0.0, 0.0, 0.1)
    luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    assert torch.allclose((turned * luma).sum(1), (images * luma).sum(1), atol=1e-3)
    assert not torch.allclose(turned, images, atol=1e-3)
    angle = torch.tensor(0.7)
    yiq = torch.tensor(YIQ)
    turn = torch.tensor([[1, 0, 0], [0, angle.cos(), -angle.sin()], [0, angle.sin(), angle.cos()]])
    combined = torch.stack([torch.ones(()), angle.cos(), angle.sin()]) @ HUE
    assert torch.allclose(combined.view(3, 3), torch.linalg.inv(yiq) @ turn @ yiq, atol=1e-5)
    gray = torch.rand(2, 1, 5, 5).expand(2, 3, 5, 5)
    assert torch.allclose(jitter_colors(gray, 0.0, 0.0, 0.5, 0.5), gray, atol=1e-3)
    assert torch.allclose(jitter_colors(images, 0.0, 0.0, 0.0, 0.0), images, atol=1e-6)


def test_one_pass_a_size_and_the_passes_do_not_mix():
    model = build_backbone(small_dino("digits")).eval()
    branch = Branch(model, Head(16, SMALL))
    calls = []
    model.register_forward_hook(lambda module, inputs, output: calls.append(tuple(inputs[0].shape)))
    large, small = torch.rand(4, 3, 16, 16), torch.rand(6, 3, 8, 8)
    features, logits = branch([large, small])
    assert calls == [(4, 3, 16, 16), (6, 3, 8, 8)]
    assert features.shape == (10, 16)
    assert logits.shape == (10, 12)
    assert torch.allclose(features[4:], model(small), atol=1e-6)
    calls.clear()
    branch([large, torch.rand(6, 3, 16, 16)])
    assert calls == [(10, 3, 16, 16)]


# Collapse


def test_information_is_zero_for_any_constant_and_entropy_tells_which():
    K = 12
    uniform, one = torch.full((6, K), 1 / K), F.one_hot(torch.zeros(6, dtype=torch.long), K).float()
    assert information(uniform) == information(one) == 0
    assert entropy(uniform).item() == pytest.approx(math.log(K))
    assert entropy(one) == 0
    different = F.one_hot(torch.arange(6), K).float()
    assert information(different).item() == pytest.approx(math.log(6), rel=1e-5)
    assert spread(torch.ones(6, 4)) == pytest.approx(0, abs=1e-6)
    assert spread(torch.eye(4)).item() == pytest.approx(3 / 4)


def test_a_constant_output_stops_the_run_and_says_why(data, tmp_path, monkeypatch):
    original = Dino.prepare
    monkeypatch.setattr(Dino, "prepare", lambda self, batch: [g * 0 for g in original(self, batch)])
    recipe = small_dino(data, "distill.collapse_steps=7", "schedule.epochs=8", "run.checkpoint_steps=5", "probe.bank=0")
    with pytest.raises(ValueError, match=r"teacher has collapsed: for 10 steps up to step 10 .* distill\.teacher_temp"):
        train(recipe, tmp_path / "run")
    assert load_newest(tmp_path / "run" / "checkpoints")["task"]["center"]["flat_steps"] == 5
    rows = read_log(tmp_path / "run" / "train.csv")
    assert float(rows[-1]["teacher_information"]) < 1e-6
    assert float(rows[-1]["feature_variance"]) < 1e-6
    assert float(rows[0]["teacher_entropy"]) > 0


def test_a_single_flat_step_is_forgotten():
    loss = DinoLoss(SMALL)
    for told in (0.0, 0.0, 1.0, 0.0):
        loss.update(torch.zeros(12), torch.tensor(told))
    assert loss.flat_steps == 1


# Runs


def test_two_epochs_leave_a_teacher_logs_and_a_curve(data, tmp_path):
    finished, state = train(small_dino(data), tmp_path / "run")
    assert finished.steps == 6
    assert set(finished.metrics) == {"knn_top1", "knn_top5"}
    rows = read_log(tmp_path / "run" / "train.csv")
    assert {"loss", "teacher_entropy", "teacher_information", "feature_variance", "grad_norm", "lr"} <= set(rows[0])
    assert all(float(row["teacher_information"]) > dino.COLLAPSED for row in rows)
    assert (tmp_path / "run" / "learning_curve.png").is_file()
    assert (tmp_path / "run" / "batch.png").is_file()
    teacher, student = (
        load_backbone(what, branch=branch).model.state_dict()
        for what, branch in ((tmp_path / "run", "teacher"), (tmp_path / "run", "student"))
    )
    for name, weight in teacher.items():
        assert torch.equal(weight, state["task"]["teacher"][f"backbone.{name}"]), name
        assert torch.equal(student[name], state["model"][f"backbone.{name}"])
    assert not torch.equal(teacher["patch_embed.proj.weight"], student["patch_embed.proj.weight"])


def test_the_teacher_has_no_drop_path_and_the_student_has(data):
    """Both stay in training mode: what is drawn shows when the same image is asked about twice."""
    recipe = small_dino(data, "probe.bank=0", model=replace(XCIT, drop_path=0.5))
    task = Dino(recipe, start_fabric("cpu", "fp32"), RunProgress(shown=False))
    images = torch.randn(8, 3, 16, 16)
    assert torch.equal(task.teacher([images])[1], task.teacher([images])[1])
    assert not torch.equal(task.model([images])[1], task.model([images])[1])


def test_without_a_bank_no_labels_and_no_val_images_are_needed(tmp_path):
    for i in range(8):
        (tmp_path / "data" / "train" / "all").mkdir(parents=True, exist_ok=True)
        picture(i).save(tmp_path / "data" / "train" / "all" / f"{i}.png")
    finished, _ = train(small_dino(tmp_path / "data", "probe.bank=0", "schedule.epochs=1"), tmp_path / "run")
    assert finished.metrics == {}


def test_accumulated_parts_equal_the_whole_batch(data, tmp_path):
    _, whole = train(small_dino(data, "probe.bank=0"), tmp_path / "whole")
    _, parts = train(small_dino(data, "probe.bank=0", "run.accumulate=2"), tmp_path / "parts")
    for kind in ("teacher", "center"):
        for name, weight in whole["task"][kind].items():
            assert torch.allclose(parts["task"][kind][name], weight, atol=2e-4), name


def test_bf16_and_gradient_checkpointing_train(data, tmp_path):
    few = ("schedule.epochs=1", "probe.bank=0")
    _, plain = train(small_dino(data, *few, model=replace(XCIT, drop_path=0.0)), tmp_path / "plain")
    saved = small_dino(data, *few, "run.grad_checkpointing=true")
    assert train(saved, tmp_path / "saved")[1]["step"] == 3
    _, half = train(small_dino(data, *few, "run.precision=bf16"), tmp_path / "half")
    assert all(w.dtype == torch.float32 for w in half["model"].values() if w.is_floating_point())
    assert plain["step"] == 3


def same(a, b):
    """Equal to the last bit, at every depth."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def test_the_comparison_sees_a_last_bit():
    one = torch.ones(3)
    assert same({"a": [one, 1]}, {"a": [one.clone(), 1]})
    assert not same({"a": [one, 1]}, {"a": [torch.nextafter(one, torch.tensor(2.0)), 1]})


def test_killed_and_gone_on_with_equals_never_stopped(data, tmp_path):
    """XCiT with BatchNorm and drop path, from workers; and from a device cache with accumulated parts."""
    changes = (
        "schedule.epochs=2",
        "run.checkpoint_steps=2",
        "distill.teacher_temp_epochs=2",
        "distill.teacher_temp=0.07",
    )
    recipes = {
        "workers": small_dino(
            data, *changes, "data.workers=1", "probe.bank=0", "data.size=32", "crops.local_size=16", model=XCIT
        ),
        "cache": small_dino(data, *changes, "data.cache=true", "run.accumulate=2", "distill.token_ref=true"),
    }
    for name, recipe in recipes.items():
        log = tmp_path / "log"
        died = forked.run(log, forked.train_and_die, train_dino, Dino, 5, recipe, tmp_path / name)
        assert died == -signal.SIGKILL, log.read_text()
        train_dino(recipe, tmp_path / name, resume=True, device="cpu", quiet=True)
        _, whole = train(recipe, tmp_path / f"whole-{name}")
        gone_on = load_newest(tmp_path / name / "checkpoints")
        assert whole["step"] == 6
        assert same(whole, gone_on)
        for log in ("train", "eval"):
            rows = [
                [{k: v for k, v in row.items() if k != "images_per_second"} for row in read_log(folder / f"{log}.csv")]
                for folder in (tmp_path / name, tmp_path / f"whole-{name}")
            ]
            assert rows[0] == rows[1]
        weights = [(tmp_path / folder / "weights.safetensors").read_bytes() for folder in (name, f"whole-{name}")]
        assert weights[0] == weights[1]


def test_two_processes_give_the_numbers_of_one(data, tmp_path):
    recipe = small_dino(data, "schedule.epochs=1")
    log = tmp_path / "log"
    assert forked.train_in_two(log, train_dino, recipe, tmp_path / "two", quiet=True) == [0, 0], log.read_text()
    finished, one = train(recipe, tmp_path / "one")
    two = load_newest(tmp_path / "two" / "checkpoints")
    losses = [[float(row["loss"]) for row in read_log(tmp_path / name / "train.csv")] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert two["metrics"] == pytest.approx(finished.metrics)
    for name, weight in one["task"]["center"].items():
        assert torch.allclose(two["task"]["center"][name], weight, atol=1e-4), name


def test_sharded_student_and_teacher_killed_and_resumed_by_one_process(data, tmp_path):
    """With a last layer that is frozen at first, so that it has no optimizer state in the checkpoint, and clipping."""
    settings = ["run.checkpoint_steps=2", "distill.freeze_last_layer=1", "distill.clip=0.05"]
    plain, log, out = small_dino(data, *settings), tmp_path / "log", tmp_path / "run"
    recipe = with_overrides(plain, ["run.strategy=fsdp"])
    killed = (forked.train_until_killed, train_dino, Dino, 1, 3)
    assert -signal.SIGKILL in forked.run_group(log, 2, *killed, recipe, out)
    saved = load_newest(out / "checkpoints")
    assert saved["step"] == 2
    unfinished = load_backbone(out).model.state_dict()
    assert all(torch.equal(weight, saved["task"]["teacher"][f"backbone.{name}"]) for name, weight in unfinished.items())
    train_dino(recipe, out, resume=True, device="cpu", quiet=True)
    finished, whole = train(plain, tmp_path / "whole")
    resumed = load_newest(out / "checkpoints")
    rows = [read_log(folder / "train.csv") for folder in (out, tmp_path / "whole")]
    assert len(rows[0]) == len(rows[1]) == 6
    for name in ("loss", "teacher_entropy", "grad_norm"):  # the other numbers are those of the batch of a process
        assert [float(row[name]) for row in rows[0]] == pytest.approx([float(row[name]) for row in rows[1]], rel=1e-4)
    assert resumed["metrics"] == pytest.approx(finished.metrics)
    for part in ("teacher", "center"):
        for name, weight in whole["task"][part].items():
            assert torch.allclose(resumed["task"][part][name], weight, atol=1e-4), name


def test_a_fresh_start_in_a_folder_and_another_recipe_are_refused(data, tmp_path):
    recipe = small_dino(data, "schedule.epochs=1", "probe.bank=0")
    train(recipe, tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a run"):
        train(recipe, tmp_path / "run")
    with pytest.raises(ValueError, match=r"a different recipe: crops\.local_count: 3 -> 2"):
        train_dino(
            with_overrides(recipe, ["crops.local_count=2"]), tmp_path / "run", resume=True, device="cpu", quiet=True
        )
    assert from_dict(DinoRecipe, to_dict(recipe)) == recipe
    assert RunFolder(tmp_path / "run").read_recipe(DinoRecipe) == recipe


# token_ref


def test_token_ref_is_the_number_of_tokens_of_a_global_crop():
    plain, made_up = (
        build_backbone(small_dino("digits", f"distill.token_ref={on}")).eval() for on in ("false", "true")
    )
    made_up.load_state_dict(plain.state_dict())
    assert [m.token_ref for m in plain.modules() if isinstance(m, SimAttention)] == [None, None]
    assert [m.token_ref for m in made_up.modules() if isinstance(m, SimAttention)] == [16.0, 16.0]
    large, small = torch.rand(2, 3, 16, 16), torch.rand(2, 3, 8, 8)
    assert torch.allclose(plain(large), made_up(large), atol=1e-6)
    assert not torch.allclose(plain(small), made_up(small), atol=1e-4)
    seen = []
    for model in (plain, made_up):
        model.blocks[0].attn.proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        model(small)
    assert torch.allclose(seen[1], seen[0] * 4 / 16, atol=1e-6)  # 4 tokens there, 16 in a global crop


def test_token_ref_needs_sima():
    with pytest.raises(ValueError, match="token_ref is for SimA attention only"):
        build_backbone(small_dino("digits", "distill.token_ref=true", "model.attention=softmax"))


def test_with_class_token_ref_the_untrained_class_token_depends_on_the_image_as_much_as_with_softmax():
    small = ["model.kwargs.embed_dim=64", "model.kwargs.depth=2", "model.kwargs.num_heads=2"]
    images, spreads = torch.rand(24, 3, 64, 64), {}
    for name, settings in {
        "paper": ["distill.class_token_ref=false"],
        "ours": [],
        "softmax": ["model.kwargs.class_attention=softmax"],
    }.items():
        torch.manual_seed(0)
        backbone = build_backbone(with_overrides(named_dino_recipe("miniature"), [*small, *settings]))
        spreads[name] = spread(backbone(images)).item()
        roots = {module.token_ref for module in backbone.modules() if isinstance(module, SimClassAttention)}
        assert roots == {"paper": {None}, "ours": {65**0.5}, "softmax": set()}[name]
    assert 10 * spreads["paper"] < spreads["ours"]
    assert 0.5 < spreads["ours"] / spreads["softmax"] < 2


# Recipes and what they refuse


def test_the_recipes_are_the_papers():
    sima, xca, vit = (named_dino_recipe(name) for name in ("xcit_small_12", "xcit_small_12_xca", "vit_small"))
    assert replace(xca, name=sima.name, model=replace(xca.model, attention="sima")) == sima
    assert (sima.schedule.epochs, sima.run.batch, sima.optim.lr_at(256)) == (100, 256, 2.5e-4)
    assert (sima.optim.weight_decay, sima.distill.weight_decay_end) == (0.04, 0.4)
    assert (sima.crops.global_count, sima.crops.local_count, sima.data.size, sima.crops.local_size) == (2, 8, 224, 96)
    assert (sima.distill.out_dim, sima.distill.bottleneck_dim, sima.distill.momentum) == (65536, 256, 0.996)
    assert vit.model.attention == "softmax"
    for make in DINO_RECIPES.values():
        check(make())
        assert from_dict(DinoRecipe, to_dict(make())) == make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.num_classes=10", "model.num_classes must be none, got 10"),
        ("data.val=0.2", "data.val must be none, got 0.2"),
        ("run.ema=0.9", "the teacher is the average"),
        ("crops.global_count=0", r"crops\.global_count must be at least 1, got 0"),
        ("crops.local_size=0", r"crops\.local_size must be at least 1"),
        ("crops.local_scale=0.5,0.2", r"crops\.local_scale must be two numbers, the lower one first"),
        ("crops.blur=0.5,2,0", r"crops\.blur\[1\] must be between 0 and 1, got 2"),
        ("distill.student_temp=0", r"distill\.student_temp must be above 0"),
        ("distill.momentum=1.5", r"distill\.momentum must be between 0 and 1"),
        ("distill.clip=0", r"distill\.clip must be above 0 or none, got 0"),
        ("distill.weight_decay_end=-5", r"distill\.weight_decay_end must be at least 0"),
        ("distill.weight_decay_end=nan", r"distill\.weight_decay_end must be at least 0, got nan"),
        ("crops.strength=-1,0.4,0.2,0.1", r"crops\.strength\[0\] must be at least 0, got -1"),
        ("crops.strength=0.4,0.4,0.2,0.9", r"crops\.strength\[3\] must be between 0 and 0\.5, got 0\.9"),
        ("probe.lr=-1", r"probe\.lr must be above 0"),
        ("probe.bank=2", r"probe\.bank must be 0 or at least probe\.k=3, got 2"),
        ("schedule.warmup_epochs=5", r"schedule\.warmup_epochs must be below schedule\.epochs=2, got 5"),
        ("run.precision=fp8", r"run\.precision must be one of"),
    ],
)
def test_a_value_no_run_can_have_is_refused_before_anything_is_read(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(small_dino(tmp_path / "none", change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_view_is_refused():
    with pytest.raises(ValueError, match=r"crops\.global_count \+ crops\.local_count must be at least 2, got 1"):
        check(small_dino("digits", "crops.global_count=1", "crops.local_count=0"))


def test_other_errors_say_what_to_do(data, tmp_path):
    with pytest.raises(ValueError, match=r"unknown DINO recipe 'digit'.*did you mean 'digits'"):
        named_dino_recipe("digit")
    vit = Model("vit_tiny_patch16_224", kwargs={"img_size": 16, "patch_size": 4, "depth": 1})
    with pytest.raises(ValueError, match=r"cannot take images of 8 px.*dynamic_img_size"):
        train(small_dino(data, model=vit), tmp_path / "run")
    alone = small_dino(data, "crops.local_count=0", model=vit)
    assert dino.check_takes_crops(dino.build_backbone(alone), alone) == 192  # no crop of 8 px is made
    everywhere = Model("sima_deit_tiny_patch16_224", "sima", kwargs={**VIT, "global_pool": ""})
    with pytest.raises(ValueError, match="one vector per image"):
        train(small_dino(data, model=everywhere), tmp_path / "run")
    with pytest.raises(ValueError, match=r"probe\.k must be at most 24, the number of training images, got 30"):
        train(small_dino(data, "probe.k=30", "probe.bank=100"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_any_run_or_model_gives_a_backbone(data, tmp_path):
    recipe = small_recipe(data, epochs=1)
    train_classifier(recipe, tmp_path / "classes", device="cpu", quiet=True)
    backbone = load_backbone(tmp_path / "classes")
    assert backbone.model(torch.zeros(1, 3, 16, 16)).shape == (1, 16)
    with pytest.raises(ValueError, match="only a run of `sima dino` has a student"):
        load_backbone(tmp_path / "classes", branch="student")
    with pytest.raises(ValueError, match=r"unknown branch 'pupil'"):
        load_backbone(tmp_path / "classes", branch="pupil")
    random, again = (load_backbone("sima_xcit_nano_12_p16_224").model for _ in range(2))
    assert torch.equal(random.cls_token, again.cls_token)
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        load_backbone(tmp_path)
    with pytest.raises(ValueError, match="unknown model, run folder or file"):
        load_backbone(str(tmp_path / "none"))


def test_images_without_labels_are_enough(data, tmp_path):
    flat = tmp_path / "flat" / "train"
    flat.mkdir(parents=True)
    for i, path in enumerate(sorted((data / "train").rglob("*.png"))):
        shutil.copy(path, flat / f"{i}.png")
    finished, _ = train(small_dino(tmp_path / "flat", "schedule.epochs=1", "probe.bank=0"), tmp_path / "run")
    assert finished.steps > 0
    assert load_backbone(tmp_path / "run").model(torch.randn(1, 3, 16, 16)).dim() == 2
