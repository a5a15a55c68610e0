"""Fine-tuning: what is taken from the trained model, what learns, which weights are kept, and what is refused."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from typer.testing import CliRunner

import forked
from sima_attn import finetune, save_official
from sima_attn._settings import to_dict, with_overrides
from sima_attn.auditing import audit
from sima_attn.cli import app
from sima_attn.data.loader import possible_batch
from sima_attn.models.building import build_model
from sima_attn.models.loading import load_model
from sima_attn.nn import ATTENTIONS
from sima_attn.train.classify import Classification
from sima_attn.train.evaluate import evaluate
from sima_attn.train.finetune_recipe import FinetuneRecipe, default_batch, default_epochs
from sima_attn.train.finetune_task import Finetuning
from sima_attn.train.logs import read_log
from sima_attn.train.recipes import Model
from sima_attn.train.run import RunFolder
from small_runs import class_folders, picture, small_recipe

FAST = ["data.workers=0", "run.threads=1"]
STILL = [*FAST, "optim.lr=1e-60", "schedule.warmup_lr=0", "schedule.min_lr=0"]  # nothing learns
XCIT = Model(
    "sima_xcit_mini_p4_64",
    "sima",
    kwargs={"depth": 1, "embed_dim": 32, "num_heads": 2, "cls_attn_layers": 1, "img_size": 16},
)


class StoppedError(Exception):
    pass


def write_run(folder, classes=("a", "b"), model=None, **about):
    """A run folder, as if trained: random weights with the metadata of a run."""
    torch.manual_seed(3)
    recipe = small_recipe(model=None)
    settings = model or recipe.model
    recipe = small_recipe(model=vars(settings))
    network = build_model(settings, len(classes))
    folder.mkdir(parents=True)
    metadata = {"recipe": to_dict(recipe), "classes": list(classes), **about}
    save_file(network.state_dict(), folder / "weights.safetensors", metadata={"about": json.dumps(metadata)})
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("source") / "run")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """CLASS/n.png of three classes, without a split."""
    root = tmp_path_factory.mktemp("photos")
    for k, name in enumerate(("cat", "dog", "owl")):
        (root / name).mkdir()
        for i in range(10):
            picture(100 * k + i).save(root / name / f"{i}.png")
    return root


def tuned(model, data, out, **options):
    options = {"epochs": 1, "overrides": FAST, "device": "cpu", "quiet": True, **options}
    return finetune(model, data, out, **options)


def test_all_weights_but_the_classifier_are_taken_over(source, photos, tmp_path):
    done = tuned(source, photos, tmp_path / "run", overrides=STILL)
    before, after = load_model(source).model.state_dict(), done.model.state_dict()
    assert after["head.weight"].shape == (3, 16)
    for name in before.keys() - {"head.weight", "head.bias"}:
        assert torch.equal(before[name], after[name]), name
    loaded = load_model(tmp_path / "run")
    assert loaded.classes == ["cat", "dog", "owl"]
    assert loaded.about["task"] == "finetune"
    assert (tmp_path / "run" / "batch.png").is_file()


def test_the_classifier_is_kept_where_the_classes_are_the_same(photos, tmp_path):
    start = write_run(tmp_path / "start", ("cat", "dog", "owl"))
    done = tuned(start, photos, tmp_path / "run", overrides=STILL)
    assert torch.equal(load_model(start).model.head.weight, done.model.head.weight)
    same_number = write_run(tmp_path / "other", ("cow", "dog", "owl"))
    done = tuned(same_number, photos, tmp_path / "run2", overrides=STILL)
    assert not torch.equal(load_model(same_number).model.head.weight, done.model.head.weight)


def test_a_run_that_keeps_the_classifier_never_ends_below_its_start(photos, tmp_path, monkeypatch):
    scores, weights = iter([70, 60, 65]), []

    def scored(self, model):
        weights.append(model.head.weight.detach().clone())
        return {"top1": float(next(scores)), "top5": 100.0, "loss": 1.0}

    monkeypatch.setattr(Classification, "evaluate", scored)
    start = write_run(tmp_path / "start", ("cat", "dog", "owl"))
    done = tuned(start, photos, tmp_path / "run", epochs=2)
    assert (done.metrics["top1"], done.epoch) == (70, 0)
    assert torch.equal(weights[0], load_model(start).model.head.weight)
    assert torch.equal(done.model.head.weight, weights[0])
    steps = [row["step"] for row in read_log(tmp_path / "run" / "eval.csv")]
    assert steps == ["0", "3", "6"]
    again = finetune(out=tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert (again.metrics["top1"], again.epoch) == (70, 0)


def test_at_another_size_positions_are_resampled_and_sima_keeps_its_scale(source, photos, tmp_path):
    done = tuned(source, photos, tmp_path / "run", size=32, overrides=STILL)
    given = load_model(source).model.pos_embed
    expected = resample_abs_pos_embed(given, new_size=[8, 8], num_prefix_tokens=0)
    torch.testing.assert_close(done.model.pos_embed, expected)
    loaded = load_model(tmp_path / "run")
    assert loaded.preprocessing.size == 32
    assert [block.attn.token_ref for block in loaded.model.blocks] == [16, 16]  # the tokens at 16 px
    again = tuned(tmp_path / "run", photos, tmp_path / "again", size=48, overrides=STILL)
    assert [block.attn.token_ref for block in again.model.blocks] == [16, 16]  # their scale is still that one
    assert again.model.pos_embed.shape == (1, 144, 16)


def test_the_same_size_has_no_token_ref(source, photos, tmp_path):
    done = tuned(source, photos, tmp_path / "run")
    assert [block.attn.token_ref for block in done.model.blocks] == [None, None]


@pytest.mark.parametrize("attention", ["sima", "relu2"])
def test_a_timm_model_with_weights_and_another_attention(attention, photos, tmp_path):
    network = timm.create_model("vit_tiny_patch16_224", num_classes=7)
    torch.save(network.state_dict(), tmp_path / "mine.pth")
    options = {"weights": tmp_path / "mine.pth", "attention": attention, "size": 32, "overrides": STILL}
    done = tuned("vit_tiny_patch16_224", photos, tmp_path / "run", **options)
    before, after = network.state_dict(), done.model.state_dict()
    assert torch.equal(before["blocks.3.attn.qkv.weight"], after["blocks.3.attn.qkv.weight"])
    assert after["pos_embed"].shape == (1, 5, 192)
    loaded = load_model(tmp_path / "run")
    assert not [call for call in audit(loaded.model, 32).calls if call.in_attention]
    assert loaded.about["recipe"]["finetune"]["layer_decay"] == 1


def test_an_official_checkpoint_is_fine_tuned(photos, tmp_path):
    """The names of the official code: pos_embeder, and one projection to q, k and v in the class attention."""
    torch.manual_seed(4)
    trained = timm.create_model("sima_xcit_nano_12_p16_224", num_classes=7)
    file = tmp_path / "official.pth"
    save_official(trained, file)
    assert "pos_embeder.token_projection.weight" in torch.load(file, weights_only=True)["model"]
    done = tuned(f"sima_xcit_nano_12_p16_224={file}", photos, tmp_path / "run", size=32, overrides=STILL)
    before, after = trained.state_dict(), done.model.state_dict()
    assert after["head.weight"].shape == (3, 128)
    for name in ("cls_attn_blocks.1.attn.q.weight", "pos_embed.token_projection.weight", "blocks.7.attn.qkv.weight"):
        assert torch.equal(before[name], after[name]), name
    assert done.model.blocks[0].attn.token_ref == 196  # the tokens at 224 px
    with pytest.raises(ValueError, match="does not say which model it is; give its name too, as NAME=FILE"):
        tuned(file, photos, tmp_path / "other")


def test_a_linearized_run_keeps_its_attentions(photos, tmp_path):
    start = write_run(tmp_path / "linearized", task="linearize", kept={"blocks.0.attn": "softmax"})
    done = tuned(start, photos, tmp_path / "run", attention="sima", size=32)
    kept, new = (block.attn for block in done.model.blocks)
    assert (isinstance(kept, ATTENTIONS["softmax"]), isinstance(new, ATTENTIONS["sima"])) == (True, True)
    assert new.token_ref == 16


def test_a_run_of_dino_gets_a_classifier(photos, tmp_path):
    start = write_run(tmp_path / "dino", (), task="dino")
    done = tuned(start, photos, tmp_path / "run")
    assert done.model(torch.zeros(1, 3, 16, 16)).shape == (1, 3)


@pytest.mark.parametrize(("freeze", "learning"), [("backbone", ["head"]), ("all-but-attention", ["attn", "head"])])
def test_frozen_weights_and_statistics_keep_their_values(freeze, learning, photos, tmp_path):
    start = write_run(tmp_path / "start", model=XCIT)
    done = tuned(start, photos, tmp_path / "run", freeze=freeze, lr=0.01)
    before, after = load_model(start).model.state_dict(), done.model.state_dict()
    changed = {
        name for name in before if name not in ("head.weight", "head.bias") and not before[name].equal(after[name])
    }
    assert all(any(part in name for part in learning) for name in changed), changed
    assert bool(changed) == ("attn" in learning)
    assert any("running_mean" in name for name in before)


def test_earlier_layers_have_smaller_learning_rates(source, photos, tmp_path, monkeypatch):
    seen = {}

    def look(self, step, groups):
        names = {id(p): name for name, p in self.model.named_parameters()}
        seen.update({names[id(p)]: group["lr"] for group in groups for p in group["params"]})

    monkeypatch.setattr(Finetuning, "before_step", look)
    tuned(source, photos, tmp_path / "run", overrides=[*FAST, "finetune.layer_decay=0.5"])
    head = seen["head.weight"]
    assert seen["blocks.1.attn.qkv.weight"] == pytest.approx(head / 2)
    assert seen["blocks.0.attn.qkv.weight"] == pytest.approx(head / 4)
    assert seen["pos_embed"] == pytest.approx(head / 8)


def test_the_best_weights_are_kept_and_the_run_stops_early(source, photos, tmp_path, monkeypatch):
    """Accuracies by epoch: the second is the best, a tie with a higher loss is none, and three worse ones end it."""
    scores, weights = iter([(20, 1), (60, 1), (60, 2), (50, 1), (55, 1), (90, 1)]), []

    def scored(self, model):
        weights.append(model.head.weight.detach().clone())
        top1, loss = next(scores)
        return {"top1": float(top1), "top5": 100.0, "loss": float(loss)}

    monkeypatch.setattr(Classification, "evaluate", scored)
    done = tuned(source, photos, tmp_path / "run", epochs=9, overrides=[*FAST, "finetune.patience=3"])
    assert (done.metrics, done.epoch) == ({"top1": 60, "top5": 100, "loss": 1}, 2)
    assert done.summary.steps == 5 * 3
    assert torch.equal(done.model.head.weight, weights[1])
    again = finetune(out=tmp_path / "run", resume=True, device="cpu", quiet=True)  # nothing is left to do
    assert (again.metrics, again.epoch, again.summary.steps) == (done.metrics, 2, 15)
    assert torch.equal(again.model.head.weight, weights[1])


@pytest.mark.parametrize("step", [2, 4, 7])
def test_a_resumed_run_ends_with_the_same_bits(step, source, photos, tmp_path, monkeypatch):
    options = {"size": 24, "freeze": "all-but-attention", "epochs": 3, "overrides": [*FAST, "run.checkpoint_steps=1"]}
    whole = tuned(source, photos, tmp_path / "whole", **options)

    def stop(self, completed):
        self.completed = completed
        if completed == step + 1:
            raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(Finetuning, "after_step", stop)
        with pytest.raises(StoppedError):
            tuned(source, photos, tmp_path / "run", **options)
    again = finetune(out=tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert (again.metrics, again.epoch) == (whole.metrics, whole.epoch)
    one, other = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "run"))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_two_processes_give_the_weights_of_one(source, photos, tmp_path):
    """gloo: the same batches, evaluation and best weights; only the first process writes."""
    options = {"epochs": 2, "batch": 8, "size": 24, "overrides": [*FAST, "finetune.patience=1"], "quiet": True}
    log = tmp_path / "log"
    assert forked.train_in_two(log, finetune, source, photos, tmp_path / "two", **options) == [0, 0], log.read_text()
    one = tuned(source, photos, tmp_path / "one", **options).model.state_dict()
    two = load_model(tmp_path / "two").model.state_dict()
    for name, weight in one.items():
        assert torch.allclose(two[name], weight, atol=2e-4), name


def test_a_run_without_a_split_is_evaluated_on_its_held_out_images(source, photos, tmp_path):
    done = tuned(source, photos, tmp_path / "run", val=0.3)
    loaded = load_model(tmp_path / "run")
    result = evaluate(loaded)
    assert (result.images, result.top1) == (9, pytest.approx(done.metrics["top1"]))
    with pytest.raises(ValueError, match="has val images of its own"):
        tuned(source, class_folders(tmp_path / "split"), tmp_path / "other", val=0.3)
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_fine_tuned_is_said(source, photos, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=r"resnet18 has random weights.*--weights FILE or --pretrained"):
        tuned("resnet18", photos, out)
    with pytest.raises(ValueError, match="needs images: give a folder with --data"):
        tuned(source, None, out)
    with pytest.raises(ValueError, match=r"finetune\.freeze must be one of backbone, all-but-attention or none"):
        tuned(source, photos, out, freeze="head")
    with pytest.raises(ValueError, match="unknown attention 'smia'"):
        tuned(source, photos, out, attention="smia")
    with pytest.raises(ValueError, match="contains no class folders"):
        tuned(source, tmp_path, out)
    (tmp_path / "one" / "cat").mkdir(parents=True)
    for i in range(4):
        picture(i).save(tmp_path / "one" / "cat" / f"{i}.png")
    with pytest.raises(ValueError, match=r"has one class \(cat\), and a classifier needs at least two"):
        tuned(source, tmp_path / "one", out)
    linearized = write_run(tmp_path / "linearized", task="linearize")
    with pytest.raises(ValueError, match="is fine-tuned as it is: omit --attention, got 'softmax'"):
        tuned(linearized, photos, out, attention="softmax")
    torch.save(timm.create_model("resnet18").state_dict(), tmp_path / "resnet.pth")
    with pytest.raises(ValueError, match=r"ResNet has no attention to train: use --freeze backbone"):
        tuned("resnet18", photos, out, weights=tmp_path / "resnet.pth", freeze="all-but-attention", size=32)
    with pytest.raises(ValueError, match="does not fit vit_tiny_patch16_224"):
        tuned("vit_tiny_patch16_224", photos, out, weights=tmp_path / "resnet.pth")
    assert not out.exists()


def test_images_that_cannot_be_read_are_named(source, photos, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "bad" / name).mkdir(parents=True)
        for i in range(10):
            (tmp_path / "bad" / name / f"{i}.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"images in a row cannot be read, the first ones: .*bad"):
        tuned(source, tmp_path / "bad", tmp_path / "run")


def test_a_run_is_resumed_with_its_own_model_and_settings(source, photos, tmp_path):
    out = tmp_path / "run"
    tuned(source, photos, out)
    with pytest.raises(ValueError, match="already holds a run"):
        tuned(source, photos, out)
    with pytest.raises(ValueError, match="omit the model and its weights"):
        tuned(source, None, out, resume=True)
    with pytest.raises(ValueError, match=r"different recipe: schedule\.epochs: 1 -> 2"):
        tuned(None, None, out, epochs=2, resume=True)


def test_defaults_follow_from_the_number_of_images():
    counts = (3, 100, 1000, 10_000, 100_000)
    assert [default_epochs(n) for n in counts] == [50, 50, 47, 15, 5]
    assert [default_batch(n) for n in counts] == [8, 8, 32, 128, 128]
    assert possible_batch(64, 100, 1) == 64
    assert possible_batch(64, 51, 2) == 50


def test_a_batch_of_few_images_can_be_mixed_in_pairs(source, tmp_path):
    few = class_folders(tmp_path / "few", per_class=(3, 1))
    tuned(source, few, tmp_path / "run", batch=64, overrides=[*FAST, "augment.mixup=0.8"])
    assert RunFolder(tmp_path / "run").read_recipe(FinetuneRecipe).run.batch == 8  # of 9


def test_the_recipe_says_what_it_chose_and_why_where_it_is_a_default(source, photos, tmp_path):
    tuned(source, photos, tmp_path / "run")
    recipe = RunFolder(tmp_path / "run").read_recipe(FinetuneRecipe)
    assert recipe.summary(24, 3) == (
        "1 epochs of 3 steps, batch 8 (small enough for many steps), 16 px, learning rate 0.0005, times 0.75 for each "
        "earlier layer (their features are general), does not stop early"
    )
    changes = ["schedule.epochs=50", "run.batch=6", "finetune.freeze=backbone", "finetune.patience=0"]
    assert with_overrides(recipe, changes).summary(24, 4) == (
        "50 epochs (the fewer images, the more) of 4 steps, batch 6, 16 px, learning rate 0.0005 for the classifier "
        "alone, does not stop early"
    )


def test_the_command(source, photos, tmp_path):
    out = tmp_path / "run"
    settings = [word for each in FAST for word in ("--set", each)]
    command = ["finetune", str(source), "--data", str(photos), "--out", str(out), "--device", "cpu", *settings]
    result = CliRunner().invoke(app, [*command, "--epochs", "1", "--batch", "64"])
    assert result.exit_code == 0, result.output
    assert "has no val images: 20% of each class are held out" in result.output
    assert "there are 24 train images, so the batch is 24 instead of 64" in result.output
    place = f"{photos.name}/"
    assert f"24 train images in {place}; 6 val images in {place}, 20% of each class; 3 classes" in result.output
    assert "the classifier is new" in result.output
    assert "1 epochs of 1 steps, batch 24, 16 px, learning rate 0.0005, times 0.75 for each earlier" in result.output
    result = CliRunner().invoke(app, ["eval", str(out), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "confusion matrix" in result.output
