"""The linear classifier: the paper's features exactly, SGD as NumPy has it, and what it refuses."""

import math

import numpy as np
import pytest
import timm
import torch
from typer.testing import CliRunner

import sima_attn  # noqa: F401
from sima_attn import cli
from sima_attn._settings import with_overrides
from sima_attn.data.loader import mixed_seed
from sima_attn.dino.recipes import named_dino_recipe
from sima_attn.dino.task import train_dino
from sima_attn.probe.features import Features, LayerFeatures
from sima_attn.probe.linear import LinearRow, train_linear
from sima_attn.probe.settings import Probe
from sima_attn.report.rows import read_rows

IMAGES = (2, 3, 32, 32)


def model(name, **kwargs):
    built = timm.create_model(name, num_classes=0, **kwargs).eval()
    with torch.no_grad():
        for p in built.parameters():  # norms and layer scales away from 1, so that each one matters
            p.add_(0.1 * torch.randn_like(p))
    return built


@torch.no_grad()
def test_xcit_gives_two_class_tokens_and_two_averages():
    xcit = model("sima_xcit_nano_12_p16_224", embed_dim=16, depth=3, num_heads=2, patch_size=8)
    images = torch.rand(IMAGES)
    x, (rows, columns) = xcit.patch_embed(images)
    x = x + xcit.pos_embed(2, rows, columns).reshape(2, -1, x.shape[1]).permute(0, 2, 1)
    layers = []
    for block in xcit.blocks:
        x = block(x, rows, columns)
        layers.append(x)
    x = torch.cat([xcit.cls_token.expand(2, -1, -1), x], dim=1)
    classes = []
    for block in xcit.cls_attn_blocks:
        x = block(x)
        classes.append(x[:, 0])
    expected = torch.cat([layers[1].mean(1), layers[2].mean(1), *classes], dim=1)
    assert expected.shape == (2, 4 * 16)
    assert torch.allclose(LayerFeatures(xcit, norm=False)(images), expected, atol=1e-5)
    normed = torch.cat([*(xcit.norm(y).mean(1) for y in layers[1:]), *(xcit.norm(y) for y in classes)], dim=1)
    found = LayerFeatures(xcit)(images)
    assert torch.allclose(found, normed, atol=1e-5)
    assert torch.allclose(found[:, -16:], xcit(images), atol=1e-5)  # the last one is what k-NN reads
    assert not xcit.blocks[-1]._forward_hooks


@torch.no_grad()
def test_a_vit_gives_its_last_class_tokens_and_an_average():
    vit = model("sima_deit_tiny_patch16_224", embed_dim=12, depth=5, num_heads=2, img_size=32, patch_size=8)
    images = torch.rand(IMAGES)
    _, layers = vit.forward_intermediates(images, indices=5, return_prefix_tokens=True, norm=True, output_fmt="NLC")
    (tokens, prefix) = zip(*layers, strict=True)
    expected = torch.cat([*(p[:, 0] for p in prefix[1:]), tokens[-1].mean(1)], dim=1)
    assert torch.allclose(LayerFeatures(vit)(images), expected, atol=1e-5)
    assert LayerFeatures(vit, layers=1)(images).shape == (2, 2 * 12)


@torch.no_grad()
def test_models_without_a_class_token_and_cvt():
    kwargs = {"embed_dim": 12, "depth": 3, "num_heads": 2, "img_size": 32, "patch_size": 8}
    vit = model("sima_deit_tiny_patch16_224", class_token=False, global_pool="avg", **kwargs)
    images = torch.rand(IMAGES)
    found = LayerFeatures(vit)(images)
    assert found.shape == (2, 3 * 12)  # all its three layers
    assert torch.allclose(found[:, -12:], vit(images), atol=1e-5)
    cvt = model("sima_cvt_13", embed_dims=(8, 12, 16), depths=(1, 1, 2), num_heads=(1, 1, 2))
    assert LayerFeatures(cvt, layers=2)(images).shape == (2, 3 * 16)
    assert torch.allclose(LayerFeatures(cvt, layers=1)(images)[:, :16], cvt(images), atol=1e-5)


def test_layers_that_are_not_there_are_refused():
    xcit = model("sima_xcit_nano_12_p16_224", embed_dim=16, depth=3, num_heads=2)
    with pytest.raises(ValueError, match=r"3 layers requested, but SimXcit has 2"):
        LayerFeatures(xcit, layers=3)
    with pytest.raises(ValueError, match="0 layers requested"):
        LayerFeatures(xcit, layers=0)
    with pytest.raises(ValueError, match=r"ResNet has no list of blocks .*--features output"):
        LayerFeatures(timm.create_model("resnet18"))
    with pytest.raises(ValueError, match=r"the blocks of EfficientNet return no tokens; use --features output"):
        LayerFeatures(timm.create_model("efficientnet_b0"))(torch.rand(IMAGES))


def features(seed, n=60, width=5, classes=3, apart=2.0):
    generator = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, width)) * apart
    labels = generator.integers(0, classes, n)
    values = (centers[labels] + generator.normal(size=(n, width))).astype(np.float32)
    return Features(values, labels, np.arange(n), [str(c) for c in range(classes)])


def test_it_is_sgd_with_momentum_and_a_cosine():
    train, val = features(0), features(1)
    probe = Probe(epochs=3, batch=16, lr=0.1, momentum=0.9, weight_decay=0.01)
    result = train_linear(train, val, probe, seed=4, eval_epochs=1)
    # The start is that of its seed; the rest is written out.
    generator = torch.Generator().manual_seed(mixed_seed(4))
    w = torch.nn.init.normal_(torch.empty(3, 5), std=0.01, generator=generator).double().numpy()
    b, vw, vb = np.zeros(3), np.zeros((3, 5)), np.zeros(3)
    x, y = train.values.astype(np.float64), np.eye(3)[train.labels]
    for epoch in range(3):
        rate = 0.1 * (1 + math.cos(math.pi * epoch / 3)) / 2
        order = np.random.default_rng([4, epoch]).permutation(60)
        for at in range(0, 60, 16):
            rows = order[at : at + 16]
            scores = x[rows] @ w.T + b
            p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            error = (p - y[rows]) / len(rows)
            vw = 0.9 * vw + error.T @ x[rows] + 0.01 * w
            vb = 0.9 * vb + error.sum(0) + 0.01 * b
            w, b = w - rate * vw, b - rate * vb
        assert result.rows[epoch].lr == pytest.approx(rate)
    assert np.allclose(result.classifier.weight.detach().numpy(), w, atol=1e-5)
    assert np.allclose(result.classifier.bias.detach().numpy(), b, atol=1e-5)
    ranking = np.argsort(-(val.values @ w.T + b), axis=1)
    assert result.top1 == pytest.approx(100 * (ranking[:, 0] == val.labels).mean())
    assert result.top5 == 100  # of three classes


def test_it_learns_what_can_be_separated_and_is_the_same_twice():
    train, val = features(0, apart=8.0), features(1, apart=8.0)
    steps = []
    one = train_linear(train, val, Probe(epochs=20, batch=16, lr=0.05), on_step=lambda d, t: steps.append((d, t)))
    assert one.top1 == 100
    assert steps[-1] == (20, 20)
    assert [row.epoch for row in one.rows] == [10, 20]
    two = train_linear(train, val, Probe(epochs=20, batch=16, lr=0.05))
    assert torch.equal(one.classifier.weight, two.classifier.weight)


def test_the_default_is_the_papers():
    assert Probe() == Probe(k=20, temperature=0.07, epochs=100, batch=1024, lr=1e-3, weight_decay=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f._replace(labels=f.labels[:-1]), r"the 60 val images need one label each.* got .* \(59,\)"),
        (lambda f: f._replace(labels=f.labels - 1), r"need one label each, from 0 to \d+; got .* from -1"),
    ],
)
def test_wrong_features_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        train_linear(features(0), change(features(1)), Probe(epochs=1))


def test_a_rate_that_is_too_high_is_said():
    huge = features(0)._replace(values=features(0).values * 1e18)
    with pytest.raises(ValueError, match=r"loss of epoch \d+ is not finite; use a lower lr"):
        train_linear(huge, features(1), Probe(epochs=3, batch=16, lr=1e30))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "dino"
    changes = ["schedule.epochs=1", "schedule.warmup_epochs=0", "crops.local_count=2", "run.batch=288", "probe.bank=0"]
    train_dino(with_overrides(named_dino_recipe("digits"), changes), out, device="cpu", quiet=True)
    return out


def test_the_command(run, tmp_path):
    arguments = ["linear", str(run), "--epochs", "20", "--out", str(tmp_path / "rows.csv")]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "linear on 128 channels" in result.output  # two layers of 64
    rows = read_rows(tmp_path / "rows.csv", LinearRow)
    assert rows[-1].epoch == 20
    assert 50 < rows[-1].top1 <= rows[-1].top5 <= 100
    result = CliRunner().invoke(cli.app, ["linear", str(run), "--features", "output", "--epochs", "1"])
    assert "linear on 64 channels" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--features", "pixels"), "unknown features 'pixels'"),
        (("--features", "output", "--layers", "2"), "apply to --features layers only"),
        (("--layers", "9"), "9 layers requested"),
        (("--lr", "nan"), "--lr must be above 0, got nan"),
        (("--device", "tpu"), "device must be auto, cpu or cuda"),
    ],
)
def test_the_command_refuses(run, arguments, message):
    result = CliRunner().invoke(cli.app, ["linear", str(run), *arguments])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
