"""The loop: accumulation, several processes, averages, schedule, what it says when numbers run away."""

import itertools
import json
import subprocess
import sys

import pytest
import timm
import torch
from torch import nn

from sima_attn._settings import to_dict, with_overrides
from sima_attn.models.building import build_model
from sima_attn.nn import SimAttention
from sima_attn.nn.baselines.softmax import SoftmaxAttention
from sima_attn.train.checkpoint import checkpoints, load_newest
from sima_attn.train.classify import Classification, train_classifier
from sima_attn.train.fabric import start_fabric
from sima_attn.train.logs import read_log
from sima_attn.train.non_finite import first_non_finite
from sima_attn.train.recipes import Model, Optim, Schedule
from small_runs import class_folders, small_recipe


@pytest.fixture
def data(tmp_path):
    return class_folders(tmp_path / "data")


def train(recipe, out):
    finished = train_classifier(recipe, out, device="cpu", quiet=True)
    return finished, load_newest(out / "checkpoints")


def losses(out):
    return [float(row["loss"]) for row in read_log(out / "train.csv")]


def test_accumulated_parts_equal_the_whole_batch(data, tmp_path):
    _, whole = train(small_recipe(data), tmp_path / "whole")
    _, parts = train(small_recipe(data, run={"accumulate": 4}), tmp_path / "parts")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    for name, weight in whole["model"].items():
        assert torch.allclose(parts["model"][name], weight, atol=2e-4), name


TRAIN = """
import json, sys
from sima_attn.train.classify import train_classifier
from sima_attn.train.recipes import Recipe
from sima_attn._settings import from_dict
train_classifier(from_dict(Recipe, json.loads(sys.argv[1])), sys.argv[2], device="cpu", quiet=True)
"""


def test_two_processes_give_the_loss_of_one(data, tmp_path):
    """torchrun, gloo; and only the first process writes."""
    recipe = small_recipe(data)
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [str(tmp_path / "train.py"), json.dumps(to_dict(recipe)), str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    finished, one = train(recipe, tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    two = load_newest(tmp_path / "two" / "checkpoints")
    assert two["metrics"]["loss"] == pytest.approx(finished.metrics["loss"], rel=1e-4)
    for name, weight in one["model"].items():
        assert torch.allclose(two["model"][name], weight, atol=2e-4), name


def test_the_average_is_that_of_the_weights_after_each_step(data, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        Classification, "after_step", lambda self, step: seen.append(self.model.head.weight.detach().clone())
    )
    start = None

    def remember(self, *arguments):
        nonlocal start
        Classification_init(self, *arguments)
        start = self.model.head.weight.detach().clone()

    Classification_init = Classification.__init__
    monkeypatch.setattr(Classification, "__init__", remember)
    finished, state = train(small_recipe(data, run={"ema": 0.8}), tmp_path / "run")
    average = start
    for weight in seen:
        average = 0.8 * average + 0.2 * weight
    assert len(seen) == 6
    assert torch.allclose(state["ema"]["head.weight"], average, atol=1e-6)
    assert torch.equal(finished.ema.head.weight, state["ema"]["head.weight"])
    assert {"top1", "ema_top1"} <= finished.metrics.keys()


def test_the_learning_rate_warms_up_falls_as_a_cosine_and_cools_down(data, tmp_path):
    schedule = Schedule(epochs=4, warmup_epochs=1, warmup_lr=0.0, min_lr=1e-4, cooldown_epochs=1)
    recipe = small_recipe(data, run={"log_steps": 1}, schedule=schedule, optim=Optim(lr=1e-3, lr_batch=16))
    train(recipe, tmp_path / "run")
    rates = [float(row["lr"]) for row in read_log(tmp_path / "run" / "train.csv")]
    assert len(rates) == 15  # 3 steps an epoch
    top = 1e-3 * 8 / 16
    assert rates[:4] == pytest.approx([0, top / 3, 2 * top / 3, _cosine(3 / 12, top)])
    assert rates[3:12] == pytest.approx([_cosine(step / 12, top) for step in range(3, 12)])
    assert rates[12:] == pytest.approx([1e-4] * 3)


def _cosine(share, top, low=1e-4):
    return low + (top - low) * (1 + torch.cos(torch.tensor(share * torch.pi)).item()) / 2


def test_clipping_bounds_the_step(data, tmp_path):
    """With plain SGD the weights move by at most lr * clip a step."""
    sgd = {"name": "momentum", "weight_decay": 0.0, "lr_batch": 0}
    recipe = small_recipe(data, epochs=1, optim=Optim(lr=1.0, clip=1e-3, **sgd))
    seen = []
    original = Classification.before_step
    try:
        Classification.before_step = lambda self, step, groups: seen.append(
            torch.cat([p.detach().flatten() for p in self.model.parameters()])
        )
        train(recipe, tmp_path / "run")
    finally:
        Classification.before_step = original
    assert 0 < (seen[1] - seen[0]).norm() <= 1.001e-3


def test_gradient_checkpointing_and_bf16_train(data, tmp_path):
    _, plain = train(small_recipe(data), tmp_path / "plain")
    _, saved = train(small_recipe(data, run={"grad_checkpointing": True}), tmp_path / "saved")
    for name, weight in plain["model"].items():
        assert torch.allclose(saved["model"][name], weight, atol=1e-5)
    finished, half = train(small_recipe(data, run={"precision": "bf16"}), tmp_path / "half")
    assert finished.metrics["loss"] < 2
    assert all(weight.dtype == torch.float32 for weight in half["model"].values())
    assert not torch.equal(half["model"]["head.weight"], plain["model"]["head.weight"])


def test_a_loss_that_is_not_finite_names_step_and_module_and_keeps_the_checkpoint(data, tmp_path, monkeypatch):
    def poison(self, step):
        if step == 3:
            with torch.no_grad():
                self.model.blocks[1].mlp.fc1.bias[0] = float("inf")

    monkeypatch.setattr(Classification, "after_step", poison)
    recipe = small_recipe(data, run={"checkpoint_steps": 2})
    with pytest.raises(ValueError, match=r"loss of step 4 is not finite: first in the output of blocks\.1\.mlp\.fc1"):
        train(recipe, tmp_path / "run")
    kept = load_newest(tmp_path / "run" / "checkpoints")
    assert kept["step"] == 2
    assert all(torch.isfinite(weight).all() for weight in kept["model"].values())


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(data, tmp_path, monkeypatch):
    class BadGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float("nan")

    loss, calls = Classification.loss, itertools.count()

    def bad_in_the_second_step(self, model, batch):
        found, numbers = loss(self, model, batch)
        return (BadGradient.apply(found) if next(calls) == 1 else found), numbers

    monkeypatch.setattr(Classification, "loss", bad_in_the_second_step)
    with pytest.raises(ValueError, match=r"gradient of step 2 is not finite"):
        train(small_recipe(data, run={"checkpoint_steps": 1}), tmp_path / "run")
    assert checkpoints(tmp_path / "run" / "checkpoints")[0].name == "step-00000001.pt"


def test_there_is_a_checkpoint_from_before_even_where_the_first_step_goes_wrong(data, tmp_path):
    fast = with_overrides(small_recipe(data), ["optim.lr=1e30"])
    with pytest.raises(ValueError, match=r"is not finite.*Earlier checkpoints are in"):
        train(fast, tmp_path / "run")
    kept = load_newest(tmp_path / "run" / "checkpoints")
    assert kept["step"] == 0
    assert all(torch.isfinite(weight).all() for weight in kept["model"].values())


def test_first_non_finite_tells_a_bad_input_and_a_bad_loss():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    bad, good = torch.tensor([[float("nan"), 1.0]]), torch.ones(1, 2)
    _, where = first_non_finite(model, lambda: model(bad))
    assert "output of 0 (Linear), whose input was already not finite" in where
    _, where = first_non_finite(model, lambda: model(good).sum() / 0)
    assert "the loss function" in where
    assert not model[0]._forward_hooks


def test_twins_differ_in_one_word():
    sima, softmax = (build_model(Model("sima_deit_tiny_patch16_224", name), 10) for name in ("sima", "softmax"))
    assert isinstance(sima.blocks[0].attn, SimAttention)
    assert isinstance(softmax.blocks[0].attn, SoftmaxAttention)
    assert sima.state_dict().keys() == softmax.state_dict().keys()


def test_models_of_other_families_are_converted_and_plain_ones_stay():
    converted = build_model(Model("vit_tiny_patch16_224", "sima"), 10)
    assert isinstance(converted.blocks[0].attn, SimAttention)
    assert type(build_model(Model("vit_tiny_patch16_224"), 10).blocks[0].attn) is timm.layers.Attention


@pytest.mark.parametrize("name", ["sima_deit_tiny_patch16_224", "sima_xcit_nano_12_p16_224", "sima_cvt_13"])
def test_drop_path_is_the_same_in_every_block_and_absent_in_class_attention(name):
    model = build_model(Model(name, drop_path=0.3), 10)
    rates = {path: module.drop_prob for path, module in model.named_modules() if type(module).__name__ == "DropPath"}
    assert set(rates.values()) == {0.3}
    assert not any("cls_attn" in path for path in rates)
    blocks = [m for path, m in model.named_modules() if hasattr(m, "drop_path1")]
    assert len(rates) >= 2 * len(blocks) > 0
    growing = build_model(Model("sima_deit_tiny_patch16_224", drop_path=0.3, constant_drop_path=False), 10)
    assert growing.blocks[1].drop_path1.drop_prob < 0.3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model("sima_diet_tiny_patch16_224"), r"unknown model .*did you mean 'sima_deit_tiny"),
        (Model("sima_cvt_13", num_classes=7), r"the data have 10 classes, model\.num_classes is 7"),
        (Model("sima_cvt_13", kwargs={"depht": 3}), r"cannot be built with .*depht"),
        (Model("resnet18", "sima"), r"nothing in this ResNet could be converted"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(model, message):
    with pytest.raises(ValueError, match=message):
        build_model(model, 10)


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="auto, cpu or cuda, got 'tpu'"):
        start_fabric("tpu", "fp32")
    with pytest.raises(ValueError, match="fp16 training needs a GPU"):
        start_fabric("cpu", "fp16")


def test_each_process_needs_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes on a machine with 1 GPUs; each needs one of its own"):
        start_fabric("cuda", "fp32")


def test_a_run_has_its_threads_and_gives_them_back(data, tmp_path, monkeypatch, two_threads):
    seen = set()
    monkeypatch.setattr(Classification, "after_step", lambda self, step: seen.add(torch.get_num_threads()))
    train(small_recipe(data, epochs=1, run={"threads": 1}), tmp_path / "run")
    assert seen == {1}
    assert torch.get_num_threads() == 2


def test_a_run_leaves_the_precision_of_float32_products_as_it_was(data, tmp_path, monkeypatch):
    """On a GPU a run in bf16 allows TF32, in which a run or an evaluation in fp32 after it would compute."""

    def start(device, *settings):
        torch.set_float32_matmul_precision("high")
        return start_fabric(device, *settings)

    monkeypatch.setattr("sima_attn.train.start.start_fabric", start)
    before = torch.get_float32_matmul_precision()
    train(small_recipe(data, epochs=1), tmp_path / "run")
    try:
        assert torch.get_float32_matmul_precision() == before != "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_wrong_settings_leave_no_folder_behind(data, tmp_path):
    with pytest.raises((ValueError, AssertionError), match="nonesuch"):
        train(with_overrides(small_recipe(data), ["optim.name=nonesuch"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_images_that_the_model_cannot_take_leave_no_folder_behind(data, tmp_path):
    recipe = small_recipe(data, model={"name": "vit_tiny_patch16_224", "kwargs": {"depth": 1, "embed_dim": 12}})
    with pytest.raises(ValueError, match=r"cannot take images of 16 px: .*; change data\.size, or set .*img_size=16"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_mixing_needs_an_even_number_of_images(data, tmp_path):
    with pytest.raises(ValueError, match="3 is odd"):
        train(small_recipe(data, augment={"mixup": 0.8}, run={"batch": 3}), tmp_path / "run")


def test_it_runs_without_torchdata_tensorboard_and_matplotlib(data, tmp_path, monkeypatch):
    for name in ("torchdata", "tensorboard", "torch.utils.tensorboard", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    finished, _ = train(small_recipe(data, epochs=1), tmp_path / "run")
    assert finished.steps == 3
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "batch.png",
        "checkpoints",
        "eval.csv",
        "recipe.yaml",
        "train.csv",
        "weights.safetensors",
    }
