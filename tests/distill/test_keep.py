"""Attentions that stay softmax, the supervised stage, several processes, and the report."""

import csv
import os
import shutil
from unittest import mock

import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import forked
from sima_attn import linearize
from sima_attn._settings import with_overrides
from sima_attn.auditing.model import audit_named
from sima_attn.cli import app
from sima_attn.data.splits import open_data
from sima_attn.distill.features import feature_colors, knn_agreement
from sima_attn.distill.keeping import keep_blocks, kept_for_now, rank_blocks, relative_quality
from sima_attn.distill.networks import build_student, exchanged, settings_of
from sima_attn.distill.recipes import ATTENTIONS, FINETUNE, NETWORK, Stages
from sima_attn.distill.report import MetricsRow, SpeedRow
from sima_attn.distill.speed import measure_speed, sizes_for
from sima_attn.distill.task import Linearization
from sima_attn.models.loading import load_model
from sima_attn.report.rows import read_rows
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.classify import train_classifier
from sima_attn.train.logs import TensorBoard
from sima_attn.train.recipes import digits

DEPTH = 3
PLAIN = ["run.threads=1", "run.log_steps=1", "data.workers=0"]
FAST = [*PLAIN, "report.speed=false", "report.photos=0"]


class StoppedError(Exception):
    """A run that a test ends early."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A softmax ViT of three blocks that knows the digits a little, without exp() outside of its attention."""
    folder = tmp_path_factory.mktemp("runs") / "teacher"
    vit = [f"model.kwargs.depth={DEPTH}", "model.kwargs.embed_dim=48", "model.kwargs.num_heads=2"]
    epochs = ["schedule.epochs=3", "schedule.warmup_epochs=1", "run.eval_epochs=3"]
    train_classifier(with_overrides(digits(), ["model.attention=softmax", *vit, *epochs]), folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """60 digits to learn from and 30 to measure on, in class folders."""
    folder = tmp_path_factory.mktemp("images")
    for split, count in (("train", 6), ("val", 3)):
        source = open_data("digits", split)
        for label, name in enumerate(source.classes):
            (folder / split / name).mkdir(parents=True)
            for index in (source.labels == label).nonzero()[0][:count]:
                source.read(int(index)).save(folder / split / name / f"{index}.png")
    return folder


def linearized(teacher, images, out, **options):
    """6, 3 and 3 steps in the first three stages."""
    options = {"attention": "sima", "steps": 12, "batch": 20, "overrides": FAST, "device": "cpu", **options}
    return linearize(teacher, images, out, quiet=True, **options)


@pytest.fixture(scope="module")
def mixed(teacher, images, tmp_path_factory):
    """A run that keeps one block and is fine-tuned, with everything that a report shows."""
    out = tmp_path_factory.mktemp("runs") / "mixed"
    return out, linearized(teacher, images, out, keep=1, finetune=1, overrides=[*PLAIN, "report.photos=2"])


def softmax_modules(folder):
    return [call.module for call in audit_named(str(folder)).calls]


def test_a_mixed_model_loads_as_it_was_and_its_softmax_is_counted(mixed, teacher):
    out, done = mixed
    assert len(done.record.kept) == 1
    assert [block.path for block in done.blocks if block.kept] == done.record.kept
    loaded, images = load_model(out).model, torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded(images), done.model(images))
    kept, original = (model.get_submodule(done.record.kept[0]) for model in (loaded, load_model(teacher).model))
    assert type(kept) is type(original)
    assert softmax_modules(out) == done.record.kept
    assert len(softmax_modules(teacher)) == DEPTH


def test_the_checkpoint_of_a_running_mixed_model_loads(mixed):
    out, done = mixed
    (checkpoint,) = sorted((out / "checkpoints").glob("*.pt"))[-1:]
    assert softmax_modules(checkpoint) == done.record.kept


@pytest.mark.parametrize("step", [2, 6, 12, 13])
def test_a_mixed_run_resumes_with_the_same_bits(mixed, teacher, images, tmp_path, monkeypatch, step):
    """Stopped before the choice and after it, at the end of the distillation, and while it is fine-tuned."""
    after_step = Linearization.after_step

    def stop(self, completed):
        if completed == step + 1:
            raise StoppedError
        after_step(self, completed)

    with monkeypatch.context() as patch:
        patch.setattr(Linearization, "after_step", stop)
        settings = [*PLAIN, "report.photos=2", "run.checkpoint_steps=1"]
        with pytest.raises(StoppedError):
            linearized(teacher, images, tmp_path / "run", keep=1, finetune=1, overrides=settings)
    again = linearize(
        None, out=tmp_path / "run", resume=True, overrides=["report.speed=false"], device="cpu", quiet=True
    )
    whole = mixed[1]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name
    assert (again.metrics, again.blocks, again.record) == (whole.metrics, whole.blocks, whole.record)


def test_the_report_has_everything(mixed):
    out, _ = mixed
    text = (out / "report.md").read_text()
    for words in ("| conversion |", "| finetune |", "| kept |", "same nearest neighbor", "features.png", "MiB"):
        assert words in text
    stages = read_rows(out / "stages.csv", MetricsRow)
    names = ["conversion", "blocks", "attentions", "network", "finetune"]
    assert [row.stage for row in stages] == [*names, "result"]
    assert [row.kept for row in read_rows(out / "keep.csv", MetricsRow)] == [0, 1, 2]
    speed = read_rows(out / "speed.csv", SpeedRow)
    assert {row.pixels for row in speed} == {8, 18, 36}  # whole patches of 2 pixels
    assert {row.model for row in speed} == {"teacher", "student", "0 kept", "1 kept", "2 kept"}
    assert Image.open(out / "features.png").size[0] > 3 * 200
    with open(out / "train.csv") as file:
        assert list(dict.fromkeys(row["stage"] for row in csv.DictReader(file))) == names[1:]


def test_each_stage_has_its_own_charts():
    board = TensorBoard.__new__(TensorBoard)
    board.writer = mock.Mock()
    board.add({"step": 3, "epoch": 1.0, "stage": "blocks", "loss": 0.5}, "train")
    board.add({"step": 3, "epoch": 1.0, "loss": 0.5}, "train")
    assert [call.args for call in board.writer.add_scalar.call_args_list] == [
        ("train/blocks/loss", 0.5, 3),
        ("train/loss", 0.5, 3),
    ]


def test_the_supervised_stage_keeps_the_more_accurate_weights(mixed):
    done = mixed[1]
    stages = dict(done.record.stages)
    assert done.metrics["top1"] >= max(stages["network"]["top1"], stages["finetune"]["top1"]) - 1e-9


def test_auto_keeps_the_smallest_number_that_reaches_the_budget(teacher, images, tmp_path):
    unlabeled = tmp_path / "images"
    unlabeled.mkdir()
    for path in images.glob("train/*/*.png"):
        shutil.copy(path, unlabeled)
    none = linearized(teacher, unlabeled, tmp_path / "none", batch=18)
    cosines = [kept.metrics["cosine"] for kept in none.record.ranking]
    assert none.record.kept == []
    assert sorted(cosines) == cosines
    between = (cosines[0] + cosines[1]) / 2
    one = linearized(teacher, unlabeled, tmp_path / "one", batch=18, keep="auto", budget=between)
    assert one.record.kept == [none.record.ranking[1].path]
    assert one.record.ranking == none.record.ranking
    with pytest.raises(ValueError, match=r"1\.0 was not reached: with 2 of 3 .* kept, the cosine .* is 0\.\d+; "):
        linearized(teacher, unlabeled, tmp_path / "run", batch=18, keep="auto", budget=1.0)


def test_the_ranking_is_greedy_and_bounded():
    gains = {"a": 0.1, "b": 0.3, "c": 0.2, "d": 0.4}
    asked = []

    def measure(paths):
        asked.append(list(paths))
        return {"cosine": sum(gains[path] for path in paths)}

    errors = {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}
    ranked = rank_blocks(errors, measure, most=2, candidates=2)
    assert [each.path for each in ranked] == ["", "b", "c"]  # d has the largest gain, but too small an error
    assert asked == [[], ["a"], ["b"], ["b", "a"], ["b", "c"]]
    assert [each.path for each in rank_blocks(errors, measure, most=9, candidates=4)] == ["", "d", "b", "c", "a"]
    enough = rank_blocks(errors, measure, most=4, candidates=4, is_enough=lambda so_far: len(so_far) == 2)
    assert [each.path for each in enough] == ["", "d"]


def test_a_budget_is_of_the_accuracy_where_there_are_labels():
    assert relative_quality({"cosine": 0.9})[1] == 0.9
    assert relative_quality({"cosine": 0.9, "top1": 45.0, "teacher_top1": 90.0})[1] == 0.5


def test_kept_attentions_are_those_of_the_teacher_and_share_the_parameters_of_the_optimizer():
    teacher = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=0).eval()
    settings = settings_of(teacher, {"depth": 2, "img_size": 32})
    student = build_student(teacher, settings, "sima_local").eval()
    paths, images = exchanged(teacher, student), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        student.blocks[1].attn.qkv.weight.normal_()
    before, parameter = student(images), student.blocks[1].attn.qkv.weight
    with kept_for_now(student, teacher, paths):
        assert torch.equal(student(images), teacher(images))
    assert torch.equal(student(images), before)
    keep_blocks(student, teacher, paths[1:])
    assert exchanged(teacher, student) == paths[:1]
    assert student.blocks[1].attn.qkv.weight is parameter
    assert torch.equal(parameter, teacher.blocks[1].attn.qkv.weight)
    keep_blocks(student, teacher, paths[:1])
    assert torch.equal(student(images), teacher(images))


def test_the_optimizer_starts_anew_with_each_stage(teacher, images, tmp_path, monkeypatch):
    """The first step of Adam changes a weight by the learning rate, whatever the gradient; with old averages it
    does not."""
    before, found = {}, {}
    prepare, finish = Linearization.before_step, Linearization.after_step

    def before_step(self, step, groups):
        prepare(self, step, groups)
        if self.starts_stage(step):
            weight = self.model.get_submodule(self.paths[0]).proj.weight
            before[self.stage] = weight.detach().clone(), groups[0]["lr"]

    def after_step(self, step):
        if self.starts_stage(step - 1):
            weight, lr = before[self.stage]
            found[self.stage] = (self.model.get_submodule(self.paths[0]).proj.weight - weight).abs().max().item() / lr
        finish(self, step)

    monkeypatch.setattr(Linearization, "before_step", before_step)
    monkeypatch.setattr(Linearization, "after_step", after_step)
    linearized(teacher, images, tmp_path / "run", overrides=[*FAST, "report.trade=0"])
    assert found == {ATTENTIONS: pytest.approx(1, rel=1e-2), NETWORK: pytest.approx(1, rel=1e-2)}


def test_parameters_of_the_teacher_alone_stay_as_they_are(images, tmp_path):
    """XCA has a temperature, which SimA has not: no optimizer would change it or clear its gradient."""
    kwargs = {"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 3, "num_heads": 2}
    teacher = timm.create_model("sima_vit_mini_patch4_64", attention="xca", num_classes=0, **kwargs)
    teacher.pretrained_cfg = {**teacher.pretrained_cfg, "input_size": (3, 8, 8)}
    options = {"keep": 1, "model_kwargs": {**kwargs}, "overrides": [*FAST, "transfer.teacher_attention=xca"]}
    done = linearized(teacher, images, tmp_path / "run", **options)
    kept = f"{done.record.kept[0]}.temperature"
    assert torch.equal(done.model.get_parameter(kept), teacher.get_parameter(kept))
    last = load_newest(tmp_path / "run" / "checkpoints")["model"]  # the best weights may be from before the last stage
    assert not torch.equal(last["blocks.0.mlp.fc1.weight"], teacher.blocks[0].mlp.fc1.weight)
    pixels = torch.randn(1, 3, 8, 8)
    assert torch.equal(load_model(tmp_path / "run").model(pixels), done.model(pixels))


def test_bad_choices_are_named_and_leave_no_folder(teacher, images, tmp_path):
    out = tmp_path / "run"
    for options, message in (
        ({"keep": 3}, r"keep=3 leaves no attention to linearize: .* has 3 .* keep at most 2"),
        ({"keep": "some"}, "keep must be a number of attentions from 0 on or 'auto', got 'some'"),
        ({"keep": -1}, "keep must be a number"),
        ({"keep": 1, "budget": 0.9}, r"a budget of 0\.9 .* keep must be auto, got 1"),
        ({"keep": "auto", "budget": 1.5}, r"transfer\.budget must be above 0 and at most 1"),
        ({"finetune": -1}, r"finetune_epochs must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            linearized(teacher, images, out, **options)
    for i in range(16):
        (tmp_path / "images" / "cat").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / "images" / "cat" / f"{i}.png")
    with pytest.raises(ValueError, match=r"the classes of the teacher \(10\) and the images \(1\) differ"):
        linearized(teacher, tmp_path / "images", out, finetune=1, batch=8)
    shutil.move(tmp_path / "images" / "cat", tmp_path / "unlabeled")
    with pytest.raises(ValueError, match="unlabeled contains no class folders"):
        linearized(teacher, tmp_path / "unlabeled", out, finetune=1, batch=8)
    assert not out.exists()


def test_kept_attentions_of_a_file_are_checked(mixed, tmp_path):
    weights = mixed[0] / "weights.safetensors"
    with safe_open(weights, "pt") as file:
        about, tensors = file.metadata()["about"], load_file(weights)
    path = mixed[1].record.kept[0]
    for wrong, message in (("blocks.9.attn", "has no attention 'blocks.9.attn' to keep"), ("", "has no attention ''")):
        changed = about.replace(f'"kept": {{"{path}"', f'"kept": {{"{wrong}"')
        assert changed != about
        save_file(tensors, tmp_path / "weights.safetensors", metadata={"about": changed})
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path / "weights.safetensors")


def linearize_and_save(teacher, images, out, device, quiet):
    done = linearized(teacher, images, out, keep=1)
    torch.save((done.model.state_dict(), done.metrics, done.record), f"{out}-{os.environ['RANK']}.pt")


def test_two_processes_agree(teacher, images, tmp_path):
    """gloo. Both end with the same weights, numbers and kept attentions, and they learn what one process learns."""
    log = tmp_path / "log"
    codes = forked.train_in_two(log, linearize_and_save, teacher, images, tmp_path / "two", quiet=True)
    assert codes == [0, 0], log.read_text()
    first, second = (torch.load(path, weights_only=False) for path in sorted(tmp_path.glob("two-*.pt")))
    assert first[1:] == second[1:]
    for name, tensor in first[0].items():
        assert torch.equal(second[0][name], tensor), name
    one = linearized(teacher, images, tmp_path / "one", keep=1)
    assert first[2].kept == one.record.kept
    assert first[1]["cosine"] == pytest.approx(one.metrics["cosine"], abs=2e-3)
    assert (tmp_path / "two" / "report.md").is_file()


def test_stages_with_fine_tuning():
    stages = Stages(block_epochs=2, attention_epochs=0, network_epochs=1, finetune_epochs=1, finetune_lr=0.1)
    assert stages.all_epochs == 4
    assert [stages.stage(step, 10) for step in (19, 20, 29, 30, 39)] == ["blocks", NETWORK, NETWORK, FINETUNE, FINETUNE]
    assert stages.last_steps(10) == [20, 30, 40]
    assert stages.first_step(FINETUNE, 10) == 30
    assert stages.first_step("attentions", 10) is None
    assert max(stages.factor(step, 10) for step in range(30, 40)) == pytest.approx(0.1, abs=0.01)


def test_neighbors_agree_where_features_are_alike():
    features = torch.randn(20, 6)
    assert knn_agreement(features, 3 * features) == 100
    assert knn_agreement(torch.eye(3)[:, :2] + 0.1, torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])) < 100


def test_colors_are_those_of_the_teacher():
    tokens = torch.randn(2, 16, 8)
    teacher, student = feature_colors(tokens, tokens)
    assert torch.equal(teacher, student)
    assert teacher.shape == (2, 16, 3)
    assert teacher.min() == 0
    assert teacher.max() == 1
    assert not torch.equal(feature_colors(tokens, tokens.flip(0))[1], teacher)


def test_sizes_that_a_model_does_not_take_are_left_out():
    class FixedSize(torch.nn.Module):
        """Images of 8 pixels alone."""

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3 * 8 * 8, 2)

        def forward(self, images):
            return self.layer(images.flatten(1))

    model = FixedSize()
    rows, notes = measure_speed({"teacher": (model, 0)}, [8, 16], precision="fp32", autocast=torch.no_grad)
    assert [row.pixels for row in rows] == [8]
    assert len(notes) == 1
    assert notes[0].startswith("16 px is left out: ")
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0)
    assert sizes_for(vit, 224) == [224, 512, 1040]
    rows, notes = measure_speed({"teacher": (vit, 0)}, [224, 256], precision="fp32", autocast=torch.no_grad)
    assert [row.pixels for row in rows] == [224, 256]  # a copy of it is set to the size
    assert vit.patch_embed.img_size == (224, 224)


def test_the_command_takes_the_options(teacher, images, tmp_path):
    options = ["--attention", "sima", "--steps", "4", "--batch", "20", "--device", "cpu", "--keep", "auto"]
    options += ["--budget", "0.1", "--finetune", "1", *(word for text in FAST for word in ("--set", text))]
    command = ["linearize", str(teacher), "--data", str(images), "--out", str(tmp_path / "run"), *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "top-1" in result.output
    assert "features.png" not in result.output  # report.photos=0
    assert "speedup" not in (tmp_path / "run" / "report.md").read_text()  # report.speed=false
