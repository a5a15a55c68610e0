"""Linearization of small models on the CPU."""

import copy
import io
import math

import pytest
import timm
import torch
from PIL import Image
from timm.layers import DropPath
from typer.testing import CliRunner

from closeness import assert_close
from sima_attn import assert_exp_free, linearize, load
from sima_attn._settings import from_dict, to_dict, with_overrides
from sima_attn.auditing.model import audit_named
from sima_attn.cli import app
from sima_attn.data.splits import open_data
from sima_attn.distill.images import open_images
from sima_attn.distill.networks import (
    Output,
    block_errors,
    build_student,
    exchanged,
    fit_gains,
    fold_gains,
    output_loss,
    projections_in,
    recorded,
    relative_error,
    run,
    settings_of,
)
from sima_attn.distill.recipes import ATTENTIONS, BLOCKS, NETWORK, STAGES, LinearizeRecipe, Stages
from sima_attn.distill.task import Linearization
from sima_attn.models.loading import load_model
from sima_attn.nn.registry import create_attention
from sima_attn.train.classify import train_classifier
from sima_attn.train.logs import read_log
from sima_attn.train.recipes import digits
from sima_attn.train.run import RunFolder

SMALL = ["run.threads=1", "run.log_steps=1", "report.speed=false"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A softmax ViT that knows the digits, without exp() outside of its attention."""
    folder = tmp_path_factory.mktemp("runs") / "teacher"
    changes = ["model.attention=softmax", "schedule.epochs=4", "schedule.warmup_epochs=1", "run.eval_epochs=4"]
    train_classifier(with_overrides(digits(), changes), folder, device="cpu", quiet=True)
    return folder


def linearized(teacher, out, **options):
    options = {"attention": "sima", "steps": 40, "batch": 128, "overrides": SMALL, "device": "cpu", **options}
    return linearize(teacher, "digits", out, quiet=True, **options)


@pytest.fixture(scope="module")
def done(teacher, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "student"
    return out, linearized(teacher, out)


def test_the_student_follows_its_teacher(done):
    _, result = done
    assert all(block.error_after < 0.8 * block.error_before for block in result.blocks)
    assert result.metrics["cosine"] > 0.85
    assert result.metrics["agreement"] > 90
    assert result.metrics["top1"] > result.metrics["teacher_top1"] - 5


@pytest.mark.parametrize("attention", ["sima", "sima_local", "relu2", "relu2_wide"])
def test_a_student_is_within_one_point_of_its_teacher(attention, teacher, tmp_path):
    """One point is 3.5 of the 355 val images; the students miss at most one that the teacher has right."""
    epochs = ["schedule.block_epochs=2", "schedule.attention_epochs=2", "schedule.network_epochs=1"]
    rates = ["schedule.attention_lr=1", "schedule.network_lr=0.1"]
    few = ["run.eval_epochs=100", "report.trade=0", "report.photos=0", "data.cache=true"]
    result = linearized(teacher, tmp_path / "run", attention=attention, overrides=[*SMALL, *epochs, *rates, *few])
    assert result.metrics["teacher_top1"] > 97
    assert result.metrics["top1"] > result.metrics["teacher_top1"] - 1
    stages = dict(result.record.stages)
    assert stages["conversion"]["top1"] <= result.metrics["top1"]
    assert stages["conversion"]["cosine"] < stages["blocks"]["cosine"] < stages["network"]["cosine"]
    assert_exp_free(result.model, input_size=(3, 8, 8))


def test_the_run_folder_is_the_student_and_nothing_else(done, teacher):
    out, result = done
    loaded = load_model(out)
    images = torch.randn(3, 3, 8, 8)
    assert torch.equal(loaded.model(images), result.model(images))
    assert not torch.equal(loaded.model(images), load_model(teacher).model(images))
    assert loaded.classes == load_model(teacher).classes
    assert_exp_free(loaded.model, input_size=(3, 8, 8))
    assert audit_named(str(out)).is_exp_free
    assert not audit_named(str(teacher)).is_exp_free
    assert "cosine of final tokens" in (out / "report.md").read_text()
    assert (out / "batch.png").is_file()
    assert len((out / "blocks.csv").read_text().splitlines()) == 1 + len(result.blocks)


def test_a_resumed_run_ends_with_the_same_bits(done, teacher, tmp_path, monkeypatch):
    class StoppedError(Exception):
        pass

    def stop(self, step):
        if step == 30:
            raise StoppedError

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Linearization, "after_step", stop)
        with pytest.raises(StoppedError):
            linearized(teacher, out, overrides=[*SMALL, "run.checkpoint_steps=7"])
    again = linearize(None, out=out, resume=True, device="cpu", quiet=True)
    whole = done[1]
    assert [block.path for block in again.blocks] == [block.path for block in whole.blocks]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name
    assert again.metrics == whole.metrics
    assert again.blocks == whole.blocks


def test_cached_images_are_the_same_images(done, teacher, tmp_path):
    """Without augmentation a cache changes nothing but the rounding of the normalized pixels."""
    cached = linearized(teacher, tmp_path / "run", overrides=[*SMALL, "data.cache=true"])
    whole = done[1]
    assert cached.metrics["teacher_top1"] == whole.metrics["teacher_top1"]
    assert cached.metrics["cosine"] == pytest.approx(whole.metrics["cosine"], abs=1e-3)
    assert [block.error_before for block in cached.blocks] == pytest.approx(
        [block.error_before for block in whole.blocks], rel=1e-4
    )


def test_a_run_with_cached_and_augmented_images_resumes_with_the_same_bits(teacher, tmp_path, monkeypatch):
    changes = [*SMALL, "data.cache=true", "augment.crop=padded", "augment.padding=1", "augment.flip=0.5"]
    changes += ["report.photos=0", "report.trade=0", "run.eval_epochs=100"]
    options = {"steps": 8, "batch": 700}  # 2 steps per epoch

    class StoppedError(Exception):
        pass

    def stop(self, step):
        if step == 5:
            raise StoppedError

    whole = linearized(teacher, tmp_path / "whole", overrides=changes, **options)
    with monkeypatch.context() as patch:
        patch.setattr(Linearization, "after_step", stop)
        with pytest.raises(StoppedError):
            linearized(teacher, tmp_path / "run", overrides=[*changes, "run.checkpoint_steps=3"], **options)
    again = linearize(None, out=tmp_path / "run", resume=True, device="cpu", quiet=True)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name
    assert again.metrics == whole.metrics


def write_parquet(path, images, **columns):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = [io.BytesIO() for _ in images]
    for file, image in zip(files, images, strict=True):
        image.save(file, format="png")
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"image": [{"bytes": file.getvalue()} for file in files], **columns}), path)


def test_labels_of_parquet_files_are_used_for_the_accuracy(done, teacher, tmp_path):
    for split, count in (("train", 64), ("val", 355)):
        source = open_data("digits", split)
        images = [source.read(i) for i in range(count)]
        write_parquet(tmp_path / f"{split}.parquet", images, label=source.labels[:count])
    train, val = open_images(str(tmp_path), 0.1, seed=0)
    assert (len(train), len(val)) == (64, 355)
    assert train.classes == val.classes == list("0123456789")
    few = ["data.workers=0", "report.photos=0", "report.trade=0"]
    result = linearize(
        teacher, tmp_path, tmp_path / "run", steps=4, batch=64, overrides=[*SMALL, *few], device="cpu", quiet=True
    )
    assert result.metrics["teacher_top1"] == done[1].metrics["teacher_top1"]


def test_fine_tuning_names_labels_that_cannot_be_used(teacher, tmp_path):
    for split in ("train", "val"):
        write_parquet(tmp_path / f"{split}.parquet", [Image.new("RGB", (8, 8))] * 9, label=[-1] * 9)
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="label") as error:
        linearize(teacher, tmp_path, out, finetune=1, overrides=SMALL, device="cpu", quiet=True)
    assert "have no labels" not in str(error.value)
    assert not out.exists()


def test_images_without_labels_are_opened_as_such(tmp_path):
    images = {split: [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(n)] for split, n in (("train", 9), ("val", 4))}
    for split, pictures in images.items():
        (tmp_path / "folder" / split).mkdir(parents=True)
        for i, picture in enumerate(pictures):
            picture.save(tmp_path / "folder" / split / f"{i}.png")
        write_parquet(tmp_path / "table" / f"{split}.parquet", pictures)
    for name in ("folder", "table"):
        train, val = open_images(str(tmp_path / name), 0.1, seed=0)
        assert (len(train), len(val)) == (9, 4)
        assert train.classes == val.classes == []
        assert val.read(3).getpixel((0, 0)) == (3, 0, 0)


def test_a_model_of_timm_and_a_folder_of_images(tmp_path):
    """No labels, no split, no classifier: a part of the images is held out, a broken one is skipped."""
    for i in range(200):
        Image.new("RGB", (40, 36), (i, 90, 200 - i)).save(tmp_path / f"{i}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    arguments = {"num_classes": 0, "depth": 2, "img_size": 32, "drop_path_rate": 0.3, "proj_drop_rate": 0.2}
    model = timm.create_model("vit_tiny_patch16_224", **arguments)
    options = {"attention": "sima", "steps": 4, "batch": 16, "device": "cpu", "quiet": True}
    out, settings = tmp_path / "runs" / "run", [*SMALL, "data.workers=0"]
    with pytest.raises(ValueError, match=r"does not fit the teacher: .* differ.*model_kwargs"):
        linearize(model, tmp_path, out, overrides=settings, **options)
    assert not out.exists()
    done = linearize(model, tmp_path, out, model_kwargs=arguments, overrides=settings, **options)
    assert set(done.metrics) == {"cosine", "knn_agreement"}
    assert all(p.requires_grad for p in model.parameters())  # the teacher was copied
    assert not any(isinstance(module, DropPath) for module in done.model.modules())
    assert {module.p for module in done.model.modules() if isinstance(module, torch.nn.Dropout)} == {0}
    assert [block.path for block in done.blocks] == ["blocks.0.attn", "blocks.1.attn"]
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(load_model(out).model(images), done.model(images))


def test_a_teacher_with_fixed_positions_learns_at_another_size(tmp_path):
    """Its position embeddings are resampled, and the run folder knows the size."""
    for i in range(24):
        Image.new("RGB", (50, 50), (9 * i, 90, 200)).save(tmp_path / f"{i}.png")
    arguments = {"depth": 1, "img_size": 32}
    model, out = timm.create_model("vit_tiny_patch16_224", **arguments), tmp_path / "run"
    options = {"attention": "sima", "steps": 2, "batch": 8, "device": "cpu", "quiet": True}
    settings = [*SMALL, "data.workers=0"]
    done = linearize(model, tmp_path, out, size=48, model_kwargs=arguments, overrides=settings, **options)
    loaded, images = load_model(out), torch.randn(1, 3, 48, 48)
    assert loaded.preprocessing.size == 48
    assert torch.equal(loaded.model(images), done.model(images))
    assert model.pos_embed.shape[1] == 1 + 2 * 2  # the teacher was copied


def test_stages():
    stages = Stages(block_epochs=2, attention_epochs=1, network_epochs=1, attention_lr=0.2, network_lr=0.02)
    assert stages.all_epochs == 4
    assert [stages.stage(step, 10) for step in (0, 19, 20, 29, 30, 39)] == [
        BLOCKS,
        BLOCKS,
        ATTENTIONS,
        ATTENTIONS,
        NETWORK,
        NETWORK,
    ]
    factors = [stages.factor(step, 10) for step in range(40)]
    assert max(factors[:20]) == pytest.approx(1, abs=0.05)
    assert max(factors[20:30]) == pytest.approx(0.2, abs=0.02)
    assert max(factors[30:]) == pytest.approx(0.02, abs=0.002)
    assert factors[19] < 0.02
    assert factors[20] < factors[21]


def test_recipes_survive_a_file(done):
    saved = RunFolder(done[0]).read_recipe(LinearizeRecipe)
    assert from_dict(LinearizeRecipe, to_dict(saved)) == saved
    assert saved.model.attention == "sima"
    assert saved.transfer.teacher_attention == "softmax"


def test_the_relative_error_is_zero_for_the_same_and_one_for_nothing():
    x = torch.randn(2, 5, 8)
    assert relative_error(x, x) == 0
    assert relative_error(torch.zeros_like(x), x) == pytest.approx(1)
    assert relative_error(3 * x, 2 * x) == pytest.approx(0.25)


def test_the_output_loss_adds_the_divergence_of_the_classes():
    tokens, logits = torch.randn(2, 5, 8), torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])
    same = Output(tokens, logits)
    other = Output(tokens, torch.zeros(2, 2))
    assert output_loss(same, same, 1.0) == pytest.approx(0)
    divergence = (0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)) / 2
    assert output_loss(other, same, 2.0) == pytest.approx(2 * divergence)
    assert output_loss(other, same, 0.0) == pytest.approx(0)


def test_the_student_begins_with_the_weights_of_its_teacher():
    teacher = timm.create_model("vit_tiny_patch16_224")
    student = build_student(teacher, settings_of(teacher), "sima")
    paths = exchanged(teacher, student)
    assert paths == [f"blocks.{i}.attn" for i in range(12)]
    assert all(type(student.get_submodule(path)).__name__ == "SimAttention" for path in paths)
    assert all(torch.equal(student.state_dict()[name], tensor) for name, tensor in teacher.state_dict().items())
    with pytest.raises(ValueError, match="does not say which model of timm it is"):
        settings_of(torch.nn.Linear(2, 2))


def test_gains_are_fitted_to_the_teacher():
    wanted = timm.create_model(
        "sima_deit_tiny_patch16_224", attention="sima_local", depth=1, img_size=32, num_classes=0
    )
    student = copy.deepcopy(wanted)
    attention, target = student.blocks[0].attn, torch.tensor([0.5, 2.0, -1.0])
    with torch.no_grad():
        wanted.blocks[0].attn.gain.copy_(target)
        wanted.blocks[0].attn.local.weight.normal_()
        attention.local.weight.copy_(wanted.blocks[0].attn.local.weight)
    fit_gains(wanted, student, ["blocks.0.attn"], torch.randn(4, 3, 32, 32))
    assert_close(attention.gain.detach(), target, 1e-3)


@pytest.mark.parametrize("attention", ["sima", "relu2"])
def test_gains_are_folded_into_an_attention_without_the_parameter(attention):
    """The error is that of explicit gains by least squares, so it is not larger than before, and no weight is new."""
    torch.manual_seed(0)
    teacher = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=48, num_classes=0).eval()
    settings = settings_of(teacher, {"depth": 2, "img_size": 48})
    student = build_student(teacher, settings, attention).eval()
    paths, images, names = exchanged(teacher, student), torch.randn(4, 3, 48, 48), list(student.state_dict())
    before = block_errors(teacher, student, paths, images)
    explicit = {}
    with recorded(teacher, paths) as seen:
        run(teacher, images)
    for path, (x, y) in seen.items():
        module = student.get_submodule(path)
        with torch.no_grad():
            heads = module.core(*module.split(x)).double()  # [B, H, N, D]
            columns = module.proj.weight.double().unflatten(1, (3, -1))  # [C, H, D]
            parts = torch.einsum("bhnd,chd->hbnc", heads, columns).flatten(1)
            target = (y - module.proj.bias).double().flatten()
            gains = torch.linalg.lstsq(parts.mT, target[:, None]).solution[:, 0]
            explicit[path] = ((gains @ parts - target).square().sum() / y.double().square().sum()).item()
    fit_gains(teacher, student, paths, images)
    after = block_errors(teacher, student, paths, images)
    assert after == pytest.approx(explicit, rel=1e-3)
    assert all(after[path] <= before[path] for path in paths)
    assert list(student.state_dict()) == names


def test_folded_gains_scale_the_heads():
    torch.manual_seed(0)
    x, gains = torch.randn(2, 9, 12), torch.tensor([3.0, -0.5, 0.0])
    for options in ({}, {"qkv_bias": False}, {"scale_norm": True, "norm_layer": torch.nn.LayerNorm}):
        module = create_attention("sima", 12, 3, **options)
        with torch.no_grad():
            heads = module.norm(module.core(*module.split(x)).transpose(1, 2).flatten(2)).unflatten(2, (3, 4))
            expected = module.proj((heads * gains[:, None]).flatten(2))
            fold_gains(projections_in(module), gains)
            assert_close(module(x), expected, 1e-5)


def test_held_out_images_are_not_learned_from(tmp_path):
    for i in range(30):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / f"{i:02}.png")
    train, val = open_images(str(tmp_path), 0.2, seed=1)
    names = {train.name(i) for i in range(len(train))}, {val.name(i) for i in range(len(val))}
    assert len(names[0]) == 24
    assert len(names[1]) == 6
    assert not names[0] & names[1]
    assert train.read(0).size == (8, 8)


def test_bad_input_is_named_and_leaves_no_folder(tmp_path, teacher):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="has random weights"):
        linearize("vit_tiny_patch16_224", "digits", out)
    with pytest.raises(ValueError, match=r"unknown attention 'smia'.*did you mean 'sima'"):
        linearized(teacher, out, attention="smia")
    with pytest.raises(ValueError, match="the same attentions"):
        linearized(teacher, out, attention="softmax")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        linearize(teacher, tmp_path / "nowhere", out)
    (tmp_path / "few").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "few" / "one.png")
    with pytest.raises(ValueError, match="has 1 images; a linearization needs at least 8"):
        linearize(teacher, tmp_path / "few", out)
    with pytest.raises(ValueError, match="needs a teacher and images"):
        linearize(None, "digits", out)
    with pytest.raises(ValueError, match=r"augment\.mixup must be 0"):
        linearized(teacher, out, overrides=["augment.mixup=0.5"])
    assert not out.exists()


def test_teachers_that_cannot_be_linearized_are_named_and_leave_no_folder(tmp_path, done):
    out, options = tmp_path / "run", {"attention": "sima", "device": "cpu", "quiet": True}
    with pytest.raises(ValueError, match=r"the attention of student is free of exp\(\) already, so there is nothing"):
        linearize(done[0], "digits", out, **{**options, "attention": "relu2"})
    small = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    with pytest.raises(ValueError, match="vit_tiny_patch16_224 takes images whose side is a multiple of 16 px, got 40"):
        linearize(small, "digits", out, size=40, **options)
    arguments = {"depths": (1, 1, 1, 1), "img_size": 64, "window_size": 2}
    biased = timm.create_model("swin_tiny_patch4_window7_224", **arguments)
    with pytest.raises(ValueError, match=r"nothing in this SwinTransformer could be converted .* a position bias"):
        linearize(biased, "digits", out, size=64, model_kwargs=arguments, **options)
    with pytest.raises(ValueError, match="does not say which model of timm it is"):
        linearize(torch.nn.Linear(2, 2), "digits", out, **options)
    assert not out.exists()


def test_a_run_is_resumed_with_its_own_model_and_attention_only(done, teacher):
    out, _ = done
    with pytest.raises(ValueError, match="has attention 'sima', got 'relu2'; omit it to resume"):
        linearize(None, out=out, attention="relu2", resume=True)
    with pytest.raises(ValueError, match="has size 8, got 16"):
        linearize(None, out=out, size=16, resume=True)
    for name, value in {"batch": 7, "keep": 1, "budget": 0.5, "finetune": 1}.items():
        with pytest.raises(ValueError, match=rf"has {name} .*, got {value}; omit it to resume"):
            linearize(None, out=out, resume=True, **{name: value})
    for given in ({"steps": 8}, {"pretrained": True}):
        with pytest.raises(ValueError, match="omit --steps and the weights"):
            linearize(None, out=out, resume=True, **given)
    with pytest.raises(ValueError, match=r"different recipe: model\.attention"):
        linearized(teacher, out, attention="relu2", resume=True)
    other = load_model(teacher).model
    torch.nn.init.normal_(other.head.weight)
    settings = RunFolder(out).read_recipe(LinearizeRecipe).model
    with pytest.raises(ValueError, match="has another teacher than the model given; omit the model"):
        linearize(other, "digits", out, attention="sima", model_kwargs=settings.kwargs, resume=True)
    with pytest.raises(ValueError, match="or omit both and continue a run with --resume"):
        linearize(None, "digits", out, resume=True)


def test_load_returns_the_student(done):
    out, result = done
    model, images = load(out), torch.randn(2, 3, 8, 8)
    assert not model.training
    assert torch.equal(model(images), result.model(images))
    assert load(out, features=True)(images).shape == (2, model.num_features)


def test_a_finished_run_is_not_overwritten(done, teacher):
    with pytest.raises(ValueError, match="already holds a run"):
        linearized(teacher, done[0])


def test_exchanged_says_when_nothing_differs():
    model = timm.create_model("sima_deit_tiny_patch16_224", depth=1)
    with pytest.raises(ValueError, match="the same attentions"):
        exchanged(model, model)


def test_the_command(teacher, tmp_path):
    out = tmp_path / "run"
    options = ["--attention", "sima", "--steps", "4", "--batch", "512", "--device", "cpu", "--set", "run.threads=1"]
    result = CliRunner().invoke(app, ["linearize", str(teacher), "--data", "digits", "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    assert "blocks.0.attn" in result.output
    assert (out / "weights.safetensors").is_file()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_linearization_is_the_plain_one(teacher, tmp_path):
    """Each stage has a loss of its own, and a recording of its own."""
    logs = {}
    for recorded_pass in ("false", "true"):
        changes = [*SMALL, "data.cache=true", "report.trade=0", "report.photos=0", f"run.cuda_graph={recorded_pass}"]
        linearized(teacher, tmp_path / recorded_pass, overrides=changes, device="cuda", finetune=2)
        logs[recorded_pass] = read_log(tmp_path / recorded_pass / "train.csv")
    assert {row["stage"] for row in logs["true"]} == set(STAGES)
    for a, b in zip(logs["false"], logs["true"], strict=True):
        for column in ("loss", "grad_norm"):
            assert float(b[column]) == pytest.approx(float(a[column]), rel=1e-2, abs=1e-4), (a["step"], column)
