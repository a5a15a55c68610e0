"""benchmarks/linearize_real.py and linearize_mini.py: their rows, tables and splits, with random weights."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer, _create_vision_transformer

import linearize_mini
import linearize_real
from closeness import assert_close
from linearize_mini import MiniRow
from linearize_real import Decoder, RealRow, SpeedRow, build_networks, compare, real_table, saliency, speed_table
from sima_attn.distill.task import Linearization
from sima_attn.models.loading import load_model
from sima_attn.report.rows import read_rows

SIZE = 28  # 2 x 2 patches
STORED_GRID = 3  # of the position embedding


@register_model
def vit_small_patch14_shallow(pretrained: bool = False, **kwargs) -> VisionTransformer:
    """DINOv2's ViT-S/14, whose width the decoder needs, with a single block."""
    shape = {"patch_size": 14, "embed_dim": 384, "depth": 1, "num_heads": 6, "init_values": 1.0}
    return _create_vision_transformer("vit_small_patch14_shallow", pretrained, **{**shape, **kwargs})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What `prepare` writes, with a shallow network of random weights and images of noise."""
    monkeypatch.setattr(linearize_real, "MODEL", vit_small_patch14_shallow.__name__)
    monkeypatch.setattr(linearize_real, "SIZE", SIZE)
    torch.manual_seed(0)
    backbone = timm.create_model(linearize_real.MODEL, img_size=14 * STORED_GRID, num_classes=0)
    parts = {"backbone": backbone, "decoder": Decoder()}
    weights = {f"{part}.{name}": t for part, module in parts.items() for name, t in module.state_dict().items()}
    save_file(
        {name: t.half() for name, t in weights.items() if "num_batches" not in name}, tmp_path / "weights.safetensors"
    )
    for split, count in (("train", 24), ("val", 3)):
        place = tmp_path / "photos" / split
        place.mkdir(parents=True)
        for i in range(count):
            Image.fromarray(np.random.default_rng(i).integers(0, 256, (32, 36, 3), np.uint8)).save(place / f"{i}.jpg")
    return tmp_path


def weights_in(folder):
    return linearize_real.load_file(folder / "weights.safetensors")


def test_a_student_of_the_real_model_is_measured_on_the_val_photos(folder, capsys):
    out = folder / "rows.csv"
    settings = ["run.precision=fp32", "data.workers=0", "run.threads=1", "report.trade=0", "report.photos=0"]
    options = [part for setting in settings for part in ("--set", setting)]
    shape = ["--epochs", "2", "1", "1", "--batch", "8", "--device", "cpu", "--folder", str(folder), "--out", str(out)]
    linearize_real.main(["run", "--attention", "relu2_wide", *shape, *options])
    (row,) = read_rows(out, RealRow)
    assert (row.attention, row.target_cosine, row.target_iou) == ("relu2_wide", 0.975, 0.93)
    assert (row.train_images, row.val_images, row.batch) == (24, 3, 8)
    assert row.steps == 4 * (23 // 8)  # one photo of train/ is held out
    assert "schedule.block_epochs=2 schedule.attention_epochs=1 schedule.network_epochs=1" in row.settings
    assert real_table([row]).markdown() in capsys.readouterr().out
    student = load_model(folder / "students" / "relu2_wide").model
    teacher, decoder = build_networks(weights_in(folder), SIZE)
    measured = compare(teacher, student, decoder, sorted((folder / "photos" / "val").iterdir()))
    assert_close(torch.tensor(measured), torch.tensor([row.patch_cosine, row.class_cosine, row.mask_iou]), 1e-4)
    assert 0.5 < row.patch_cosine < 1


def test_a_model_agrees_with_itself_and_not_with_another(folder):
    teacher, decoder = build_networks(weights_in(folder), SIZE)
    photos = sorted((folder / "photos" / "val").iterdir())
    assert compare(teacher, teacher, decoder, photos) == pytest.approx((1, 1, 1))
    other = timm.create_model(linearize_real.MODEL, img_size=SIZE, num_classes=0).eval()
    assert max(compare(teacher, other, decoder, photos)[:2]) < 0.9


def test_saliency_has_the_size_of_the_image(folder):
    backbone, decoder = build_networks(weights_in(folder), 3 * SIZE)
    tokens = backbone.forward_features(torch.randn(2, 3, 3 * SIZE, 3 * SIZE))
    assert saliency(tokens, decoder).shape == (2, 1, 3 * SIZE, 3 * SIZE)


def test_positions_are_those_of_the_file_at_its_size(folder):
    stored = weights_in(folder)["backbone.pos_embed"].float()
    same, _ = build_networks(weights_in(folder), 14 * STORED_GRID)
    assert torch.equal(same.pos_embed, stored)
    smaller, _ = build_networks(weights_in(folder), SIZE)
    assert smaller.pos_embed.shape == (1, 1 + 2 * 2, 384)
    assert torch.equal(smaller.pos_embed[:, 0], stored[:, 0])


def test_photos_are_split_always_in_the_same_way(tmp_path, monkeypatch):
    monkeypatch.setattr(linearize_real, "HELD_OUT", 2)
    for name in linearize_real.PHOTO_FOLDERS:
        (tmp_path / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (600, 512), (i, 0, 0)).save(tmp_path / name / f"{i}.jpg")
        (tmp_path / name / "labels.json").write_text("{}")
    splits = []
    for place in (tmp_path / "one", tmp_path / "two"):
        assert linearize_real.write_photos(tmp_path, place) == 9
        splits.append({split: sorted(p.name for p in (place / split).iterdir()) for split in ("train", "val")})
    assert splits[0] == splits[1]
    assert [len(names) for names in splits[0].values()] == [2 * 7, 2]
    sizes = [Image.open(tmp_path / "one" / split / names[0]).size for split, names in splits[0].items()]
    assert sizes == [(336, 336), (300, 256)]


def test_speed_in_onnx_runtime(folder):
    pytest.importorskip("onnxruntime")
    out = folder / "rows.csv"
    size = ["--sizes", str(SIZE), "--seconds", "0.01", "--threads", "1"]
    linearize_real.main(["onnx", "--attention", "sima", *size, "--folder", str(folder), "--out", str(out)])
    rows = read_rows(out, SpeedRow)
    assert [(row.attention, row.px, row.tokens, row.batch) for row in rows] == [
        ("softmax", 28, 5, 1),
        ("sima", 28, 5, 1),
    ]
    assert rows[0].speedup == 1
    assert rows[1].speedup == pytest.approx(rows[0].ms / rows[1].ms, abs=0.02)


def test_speedups_are_against_the_teacher():
    times = {"softmax": SimpleNamespace(p50=0.003), "relu2": SimpleNamespace(p50=0.002)}
    rows = list(linearize_real.speed_rows(times, 518, 8, "eager", "bfloat16", "cpu"))
    assert [(row.tokens, row.ms, row.teacher_ms, row.speedup) for row in rows] == [(1370, 3, 3, 1), (1370, 2, 3, 1.5)]
    table = speed_table(rows)
    assert table.header[-1] == "relu2"
    assert table.lines == [["eager", "518", "8", "3.0", "1.50x"]]


@pytest.fixture
def mini(tmp_path):
    """Arguments of the miniature on digits, and its folder."""
    shape = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 1, "num_heads": 2}
    settings = ["data.size=8", "run.threads=1", "run.precision=fp32", "augment.padding=1", "run.checkpoint_steps=10"]
    options = [part for setting in settings for part in ("--set", setting)]
    options += [part for name, value in shape.items() for part in ("--set-teacher", f"model.kwargs.{name}={value}")]
    options += ["--set-student", "run.batch=512", "--set-student", "report.photos=0"]
    call = ["--data", "digits", "--folder", str(tmp_path / "runs"), "--device", "cpu", "--epochs", "2", *options]
    return call, tmp_path / "runs", shape


def test_the_miniature_trains_a_teacher_and_its_students(mini, tmp_path, capsys):
    call, place, shape = mini
    out = tmp_path / "rows.csv"
    with pytest.raises(ValueError, match=r"there is no trained teacher in .*; run --only teacher first"):
        linearize_mini.main([*call, "--only", "relu2"])
    names = ["relu2", "relu2_wide_labels", "sima_scratch"]
    steps = [part for name in ("teacher", *names) for part in ("--only", name)]
    linearize_mini.main([*call, *steps, "--rows", str(out)])
    rows = read_rows(out, MiniRow)
    assert [row.name for row in rows] == names
    assert [row.labels for row in rows] == [False, True, True]
    assert [row.target for row in rows] == [-0.5, -0.5, 0]
    assert len({row.teacher_top1 for row in rows}) == 1
    for row in rows:
        assert row.difference == pytest.approx(row.top1 - row.teacher_top1, abs=0.011)
        assert (row.epochs, row.train_images) == (6, 1442)
    for name, attention in (("relu2/linearized", "relu2"), ("sima_scratch/run", "sima")):
        model = load_model(place / name)
        assert model.about["recipe"]["model"]["attention"] == attention
        assert model.about["recipe"]["model"]["kwargs"] == {"relu": True, **shape}
    capsys.readouterr()
    linearize_mini.main([*call, *steps])
    assert capsys.readouterr().out.count("finished before") == 4


def test_a_step_of_the_miniature_goes_on_where_it_was_cut_off(mini, tmp_path, monkeypatch, capsys):
    call, place, _ = mini
    linearize_mini.main([*call, "--only", "teacher", "--only", "sima"])
    student, row = place / "sima", (place / "sima" / "row.json").read_text()
    whole = load_model(student / "linearized").model.state_dict()
    after_step, written = Linearization.after_step, tmp_path / "rows.csv"

    def cut_off(task, step):
        after_step(task, step)
        if step == 11:
            raise KeyboardInterrupt

    shutil.rmtree(student)
    monkeypatch.setattr(Linearization, "after_step", cut_off)
    with pytest.raises(KeyboardInterrupt):
        linearize_mini.main([*call, "--only", "sima"])
    monkeypatch.setattr(Linearization, "after_step", after_step)
    compare_models = linearize_mini.compare
    monkeypatch.setattr(linearize_mini, "compare", None)
    capsys.readouterr()
    with pytest.raises(TypeError):
        linearize_mini.main([*call, "--only", "sima"])
    assert "resuming at step 10 of" in capsys.readouterr().err
    again = load_model(student / "linearized").model.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())

    monkeypatch.setattr(linearize_mini, "compare", compare_models)
    monkeypatch.setattr(linearize_mini, "linearize", lambda *_, **options: pytest.fail("the weights are there"))
    with pytest.raises(ValueError, match=r"linearized has a different recipe: schedule\.network_lr: 0\.15 -> 0\.2"):
        linearize_mini.main([*call, "--only", "sima", "--set-student", "schedule.network_lr=0.2"])
    linearize_mini.main([*call, "--only", "sima", "--rows", str(written)])
    assert [found.top1 for found in read_rows(written, MiniRow)] == [json.loads(row)["top1"]]


def test_a_student_sees_six_epochs_of_images_with_labels_or_without():
    for labels in (False, True):
        epochs = [int(setting.rpartition("=")[2]) for setting in linearize_mini.schedule_of(labels)]
        assert sum(epochs) == linearize_mini.EPOCHS
        assert epochs[-1] == (linearize_mini.LABELED_EPOCHS if labels else 0)
