"""Weights in the package: a run becomes a file, `pretrained=True` finds it, `sima classify` uses it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from sima_attn import assert_exp_free, cli
from sima_attn._settings import to_dict
from sima_attn.data.loader import evaluation_transform
from sima_attn.data.settings import Augment, Data
from sima_attn.data.splits import open_data
from sima_attn.explain.answer import classify
from sima_attn.models import pretrained
from sima_attn.models.building import build_model
from sima_attn.models.loading import load_model
from sima_attn.models.pretrained import Card, in_half, read_card, save_shipped, weights_file
from sima_attn.train.classify import train_classifier
from sima_attn.train.evaluate import evaluate
from sima_attn.train.recipes import Model, Optim, Recipe, Run, Schedule
from sima_attn.train.run import RunFolder

NAME = "sima_xcit_mini_p4_64_relu"
CLASSES = ("n01", "n02", "n03")
TINY_IMAGENET = Path(__file__).parents[3] / "shared" / "data" / "tiny-imagenet-100"


def sima(*arguments, code=0):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def noise(seed, size=(70, 64)):
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.byte().numpy())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model of full size after two steps."""
    root = tmp_path_factory.mktemp("run")
    for split in ("train", "val"):
        for i, name in enumerate(CLASSES):
            (root / "data" / split / name).mkdir(parents=True)
            for j in range(2):
                noise(10 * i + j).save(root / "data" / split / name / f"{j}.png")
    (root / "data" / "classes.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tbox [turtle]\nn03\towl\n")
    recipe = Recipe(
        name="two_steps",
        model=Model(NAME, "sima"),
        data=Data(str(root / "data"), size=64, workers=0),
        augment=Augment(crop="none", flip=0.0),
        optim=Optim(lr=1e-3, lr_batch=0),
        schedule=Schedule(epochs=1, warmup_epochs=0),
        run=Run(batch=3, ema=0.5),
    )
    train_classifier(recipe, root / "run", device="cpu", quiet=True)
    return root, recipe


@pytest.fixture
def weights(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "WEIGHTS", tmp_path / "weights")
    return tmp_path / "weights"


@pytest.fixture
def card():
    facts = {
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
        "recipe": {},
        "epochs": 1.0,
        "top1": 1.0,
        "top5": 2.0,
        "images": 3,
        "terms": "none",
    }
    return Card(classes=list(CLASSES), size=64, **facts)


def test_a_run_is_shipped_and_loaded_as_pretrained(run, weights):
    root, recipe = run
    output = sima("ship", root / "run", "--size", "32", "--size", "96")
    path = weights / f"{NAME}.safetensors"
    assert path.stat().st_size < 12_000_000
    assert path.name in output
    model = timm.create_model(NAME, pretrained=True).eval()
    average = load_model(root / "run", branch="ema").model.eval()
    source, transform = open_data(root / "data", "val"), evaluation_transform(recipe.data.preprocessing)
    images = torch.stack([transform(source.read(i)) for i in range(len(source))])
    with torch.no_grad():
        error = (model(images) - average(images)).abs().max()
    assert error < 5e-3  # half precision
    assert timm.create_model(NAME, pretrained=True, num_classes=7)(images[:2]).shape == (2, 7)

    result = evaluate(load_model(path), root / "data")
    found = read_card(path)
    assert found.classes == list(CLASSES)
    assert (found.top1, found.top5, found.images) == (round(result.top1, 2), round(result.top5, 2), 6)
    sizes = {str(px): round(evaluate(load_model(path), root / "data", size=px).top1, 2) for px in (32, 96)}
    assert found.other_sizes == sizes
    assert found.recipe["name"] == "two_steps"
    assert found.recipe["data"]["path"] == "data"  # no path of this machine
    assert str(root) not in json.dumps(found.recipe)
    assert model.pretrained_cfg["label_names"] == CLASSES
    assert model.pretrained_cfg["label_descriptions"]["n01"] == "goldfish"
    with safe_open(path, "pt") as file:
        kinds = {file.get_tensor(key).dtype for key in file.keys() if file.get_tensor(key).dim() > 1}  # noqa: SIM118
    assert kinds == {torch.float16}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "softmax"}, "attention='sima', got 'softmax': .* pretrained=False"),
        ({"class_attention": "softmax"}, "class_attention='sima', got 'softmax'"),
        ({"attention_options": {"norm": "l2"}}, "norm='l1', got 'l2'"),
        ({"relu": False}, "activation='relu', got 'gelu'"),
        ({"act_layer": torch.nn.SiLU}, "activation='relu', got 'silu'"),
        ({"num_heads": 2}, "num_heads=4, got 2"),
        ({"tokens_norm": False}, "tokens_norm=True, got False"),
        ({"class_token_ref": 16}, "class_token_ref=None, got 16"),
        ({"token_ref": 50}, "token_ref=None, got 50"),
        ({"attention_options": {"token_ref": 50}}, "token_ref=None, got 50"),
        ({"attention_options": {"eps": 0.5}}, "eps=None, got 0.5"),
        ({"use_pos_embed": False}, "use_pos_embed=True, got False"),
        ({"global_pool": "avg"}, "global_pool='token', got 'avg'"),
        ({"norm_layer": torch.nn.LayerNorm}, "norm_layer=None, got <class"),
        ({"depth": 9}, "depth=10, got 9"),
    ],
)
def test_weights_do_not_load_into_another_function_than_they_were_trained_as(options, message):
    with pytest.raises(ValueError, match=f"the weights of {NAME} were trained with {message}"):
        timm.create_model(NAME, pretrained=True, **options)


def test_weights_load_with_what_leaves_the_function_as_it_is():
    plain = timm.create_model(NAME, pretrained=True).eval()
    options = {"attention": "sima", "attention_options": {"order": "kv", "norm": "l1"}, "act_layer": torch.nn.ReLU}
    options |= {"drop_rate": 0.1, "drop_path_rate": 0.1, "eta": 0.1, "img_size": 96, "use_pos_embed": True}
    same = timm.create_model(NAME, pretrained=True, token_ref="train", class_token_ref="train", **options)
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(same.eval()(images), plain(images), atol=1e-4)
    pooled = timm.create_model(NAME, pretrained=True, num_classes=0, global_pool="avg")  # features, by no trained head
    assert pooled(images).shape == (2, 192)
    overlay = {"file": str(weights_file(NAME)), "num_classes": 100}  # a file that is named may be of anything
    timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=overlay, attention="softmax")


def untrained_run(folder, recipe, name="sima_vit_mini_patch4_64", *, attention="sima", data=None, **kwargs):
    """A folder as `sima train` leaves it, with the weights that a model starts with."""
    model = Model(name, attention, kwargs=kwargs)
    recipe = replace(recipe, model=model, data=replace(recipe.data, **data or {}), run=replace(recipe.run, ema=None))
    RunFolder(folder).write_recipe(recipe)
    about = {"recipe": to_dict(recipe), "classes": list(CLASSES)}
    state = build_model(model, len(CLASSES)).state_dict()
    save_file(state, folder / "weights.safetensors", metadata={"about": json.dumps(about)})
    return recipe


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attention": "softmax"}, "attention=softmax"),
        ({"relu": True}, "relu=True"),
        ({"depth": 2, "num_heads": 3}, "depth=2, num_heads=3"),
    ],
)
def test_a_run_whose_model_is_not_the_one_of_the_name_is_not_shipped(run, weights, tmp_path, settings, named):
    untrained_run(tmp_path / "run", run[1], **settings)
    with pytest.raises(ValueError, match=rf"not sima_vit_mini_patch4_64 as pretrained=True builds it.*{named}\."):
        sima("ship", tmp_path / "run")
    assert not weights.exists()


def test_a_run_is_shipped_under_the_name_that_has_its_settings(run, weights, tmp_path):
    untrained_run(tmp_path / "run", run[1], relu=True)
    sima("ship", tmp_path / "run", "--name", "sima_vit_mini_patch4_64_relu", "--device", "auto")
    assert (weights / "sima_vit_mini_patch4_64_relu.safetensors").is_file()
    with pytest.raises(ValueError, match=r"The run has name=sima_vit_mini_patch4_64, attention=sima, relu=True\."):
        sima("ship", tmp_path / "run", "--name", "sima_vit_mini_patch4_64_1head")
    for unknown in ("foo", "vit_tiny_patch16_224"):  # timm knows the second, but its weights are not looked for here
        with pytest.raises(ValueError, match=f"unknown model of this package '{unknown}'; known: sima_cvt_13"):
            sima("ship", tmp_path / "run", "--name", unknown)


def test_the_card_has_the_epochs_of_the_checkpoint_and_not_of_the_log(run, weights, tmp_path):
    """The log goes on after a checkpoint, until the next one."""
    made = run[0] / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(made / "checkpoints")
    shutil.copy(made / "recipe.yaml", tmp_path / "run")
    header, row = (made / "train.csv").read_text().splitlines()
    step, epoch, rest = row.split(",", 2)
    assert (step, float(epoch)) == ("2", 1.0)
    (tmp_path / "run" / "train.csv").write_text(f"{header}\n{row}\n20,10.0,{rest}\n")
    sima("ship", tmp_path / "run")
    assert read_card(weights / f"{NAME}.safetensors").epochs == 1.0


def test_data_with_other_classes_than_the_shipped_models_are_refused(run, weights, tmp_path):
    sima("ship", run[0] / "run")
    shutil.copytree(run[0] / "data", tmp_path / "data")
    (tmp_path / "data" / "val" / "n03").rename(tmp_path / "data" / "val" / "n04")
    with pytest.raises(ValueError, match=r"only in the model: n03; only in the data: n04\."):
        sima("eval", NAME, "--data", tmp_path / "data")


def test_eval_says_so_where_a_model_has_no_weights(weights, tmp_path):
    for k in range(100):
        (tmp_path / "val" / f"{k:03}").mkdir(parents=True)
        noise(k, size=(8, 8)).save(tmp_path / "val" / f"{k:03}" / "0.png")
    output = sima("eval", "sima_vit_mini_patch4_64_1head", "--data", tmp_path, "--size", 8, "--no-token-ref")
    assert "sima_vit_mini_patch4_64_1head has no trained weights: this is the accuracy of random ones" in output


@pytest.mark.parametrize("name", ["img [copy].png", "a[/b].png"])
def test_a_broken_image_is_named_as_it_is(run, weights, tmp_path, monkeypatch, name):
    shutil.copytree(run[0] / "data", tmp_path / "data")
    (tmp_path / "data" / "val" / "n01" / name.replace("/", "-")).write_text("no image")
    monkeypatch.setattr("sima_attn.data.sources.ClassFolders.name", lambda self, index: name)
    assert name in sima("ship", run[0] / "run", "--data", tmp_path / "data")
    assert name in sima("eval", run[0] / "run", "--data", tmp_path / "data")


def test_without_a_file_there_is_an_error_that_says_what_there_is(run, weights):
    with pytest.raises(ValueError, match=rf"no published weights for {NAME} \(weights come .*for: none\)"):
        timm.create_model(NAME, pretrained=True)
    sima("ship", run[0] / "run", "--no-ema")
    with pytest.raises(ValueError, match=f"for sima_cvt_13 .*for: {NAME}"):
        timm.create_model("sima_cvt_13", pretrained=True)


def test_weights_of_another_shape_are_refused_and_leave_no_file(run, weights, card):
    state = load_model(run[0] / "run").model.state_dict()
    with pytest.raises(
        ValueError, match=r"not those of sima_vit_mini_patch4_64\. missing in the file: .* more; not in"
    ):
        save_shipped(state, "sima_vit_mini_patch4_64", card)
    with pytest.raises(ValueError, match=r"head.bias \(3,\), the model has \(2,\)"):
        save_shipped(state, NAME, replace(card, classes=["a", "b"]))
    assert not weights.exists()


def test_a_file_that_is_too_large_is_refused_and_not_left_behind(run, weights, card, monkeypatch):
    monkeypatch.setattr(pretrained, "MOST_BYTES", 1_000_000)
    with pytest.raises(ValueError, match=r"takes 11\.\d MB, a file may have 1 MB"):
        save_shipped(load_model(run[0] / "run").model.state_dict(), NAME, card)
    assert list(weights.iterdir()) == []


def test_half_precision_keeps_vectors_and_refuses_what_overflows():
    kept = in_half({"matrix": torch.ones(2, 2), "vector": torch.full((2,), 1e-9), "count": torch.tensor(7)})
    assert [kept[name].dtype for name in kept] == [torch.float16, torch.float32, torch.int64]
    with pytest.raises(ValueError, match="matrix does not fit float16: its greatest value is 1e"):
        in_half({"matrix": torch.full((2, 2), 1e6)})


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    noise(1).save(folder / "one.png")
    noise(2, size=(40, 90)).convert("L").save(folder / "two.jpg")
    (folder / "broken.png").write_text("no image")
    return folder


def test_classify_takes_files_folders_and_patterns_and_names_what_is_broken(run, photos):
    output = sima("classify", photos, "--model", run[0] / "run", "--top", 2)
    assert output.count(" %  ") == 4
    assert "skipped:" in output
    assert "broken.png" in output
    assert all(name in output for name in ("one.png", "two.jpg"))
    assert sima("classify", photos / "*.jpg", "--model", run[0] / "run").count(" %  ") == 3  # there are three classes
    with pytest.raises(ValueError, match=r"broken\.png cannot be read as an image"):
        sima("classify", photos / "broken.png", "--model", run[0] / "run")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        sima("classify", photos / "*.webp", "--model", run[0] / "run")


def test_classify_says_the_classes_a_plain_computation_finds_in_words(run, photos, weights):
    sima("ship", run[0] / "run")
    output = sima("classify", photos / "one.png")
    model = timm.create_model(NAME, pretrained=True).eval()
    with torch.no_grad():
        likely = model(evaluation_transform(run[1].data.preprocessing)(noise(1))[None])[0].softmax(0)
    words = ["goldfish", "box [turtle]", "owl"]
    lines = [line for line in output.splitlines() if " %" in line]
    assert [line.split(" %")[0].strip() for line in lines] == [
        f"{words[k]:<12}  {100 * likely[k]:5.1f}" for k in likely.argsort(descending=True).tolist()
    ]


def test_classify_prepares_photos_as_the_run_does(run, weights, tmp_path):
    data = {"crop_ratio": 0.5, "interpolation": "bilinear"}
    recipe = untrained_run(tmp_path / "run", run[1], data=data)
    photo = noise(1, size=(160, 128))
    found = dict(classify(load_model(tmp_path / "run"), photo, 3).classes)
    model = load_model(tmp_path / "run").model.eval()
    with torch.no_grad():
        likely = model(evaluation_transform(recipe.data.preprocessing)(photo)[None])[0].softmax(0)
    assert [found[name] for name in CLASSES] == pytest.approx(likely.tolist(), rel=1e-5)
    sima("ship", tmp_path / "run")  # and so does what is made of it
    shipped = load_model("sima_vit_mini_patch4_64").preprocessing
    assert (shipped.crop_ratio, shipped.interpolation) == (0.5, "bilinear")


def test_classify_names_a_file_that_holds_no_weights(photos, tmp_path):
    for name in ("text.txt", "junk.safetensors"):
        (tmp_path / name).write_text("no weights")
        with pytest.raises(ValueError, match=f"{name} cannot be read as weights: give"):
            sima("classify", photos, "--model", f"{NAME}={tmp_path / name}")


def test_classify_and_ship_know_the_devices_of_the_other_commands(run, photos):
    assert " %  " in sima("classify", photos / "one.png", "--model", run[0] / "run", "--device", "auto")
    for arguments in (("classify", photos), ("ship", run[0] / "run")):
        with pytest.raises(ValueError, match="device must be auto, cpu or cuda, got 'foo'"):
            sima(*arguments, "--device", "foo")


def test_classify_with_random_weights_is_an_error(photos, weights):
    with pytest.raises(ValueError, match=r"sima_xcit_mini_p4_64 has no trained weights: train a model"):
        sima("classify", photos, "--model", "sima_xcit_mini_p4_64")


def test_the_files_in_the_package_are_those_of_registered_models():
    for path in pretrained.WEIGHTS.glob("*"):
        assert path == weights_file(path.stem)
        assert path.stat().st_size <= pretrained.MOST_BYTES
        model = timm.create_model(path.stem, pretrained=True)
        assert model.num_classes == len(read_card(path).classes)
        assert path.stem in timm.list_models(pretrained=True)


def test_the_package_has_weights_that_need_no_exp():
    model = timm.create_model(NAME, pretrained=True).eval()
    card = read_card(weights_file(NAME))
    assert card.top1 > 58
    assert "research" in card.terms
    assert model.num_classes == len(card.classes) == len(card.words) == 100
    assert card.recipe["name"] == "shipped"
    assert "/" not in card.recipe["data"]["path"]
    assert weights_file(NAME).stat().st_size < 12_000_000
    assert_exp_free(model)


@pytest.mark.skipif(not TINY_IMAGENET.is_dir(), reason="Tiny ImageNet is not here")
def test_the_weights_know_what_their_card_says():
    """The first 200 val images hold the accuracy of all 5,000 within four deviations of such a sample."""
    card = read_card(weights_file(NAME))
    loaded = load_model(NAME)
    source = open_data(TINY_IMAGENET, "val")
    transform = evaluation_transform(loaded.preprocessing)
    chosen = range(0, len(source), len(source) // 200)
    images = torch.stack([transform(source.read(i)) for i in chosen])
    with torch.inference_mode():
        guesses = torch.cat([loaded.model.eval()(part).argmax(1) for part in images.split(50)])
    assert source.classes == card.classes
    top1 = 100 * (guesses.numpy() == source.labels[list(chosen)]).mean()
    assert abs(top1 - card.top1) < 4 * (card.top1 * (100 - card.top1) / len(chosen)) ** 0.5
