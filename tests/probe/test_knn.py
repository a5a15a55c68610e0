"""k-NN equals a plain computation, whatever the blocks; features are taken once; wrong input is named."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from full_disk import no_file_above
from sima_attn import cli
from sima_attn._files import DiskFullError
from sima_attn._settings import with_overrides
from sima_attn.data.settings import Data
from sima_attn.data.sources import Subset
from sima_attn.data.splits import open_data
from sima_attn.dino.recipes import named_dino_recipe
from sima_attn.dino.task import train_dino
from sima_attn.models.weight_files import read_weights
from sima_attn.probe import feature_map as map_module
from sima_attn.probe import features as features_module
from sima_attn.probe import knn as knn_module
from sima_attn.probe.feature_map import plot_feature_map, principal_components, two_dimensions
from sima_attn.probe.features import evenly, extract, key_of, load_backbone
from sima_attn.probe.knn import KnnRow, knn_accuracy, nearest, plot_neighbors, votes
from sima_attn.report.rows import read_rows
from small_runs import class_folders

N, M, W, K = 37, 101, 8, 7


@pytest.fixture
def sides():
    """Queries, their labels, bank, its labels: clusters that overlap, so that the vote matters."""
    generator = np.random.default_rng(0)
    centers = generator.normal(size=(K, W))

    def draw(count):
        labels = generator.integers(0, K, count)
        return (centers[labels] + 1.2 * generator.normal(size=(count, W))).astype(np.float32), labels

    return *draw(N), *draw(M)


def plain_knn(queries, labels, bank, bank_labels, k, temperature):
    """By definition, in float64, query by query."""
    unit = [x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) for x in (queries, bank)]
    top1 = top5 = 0
    for q, label in zip(unit[0], labels, strict=True):
        cosines = unit[1] @ q
        order = np.argsort(-cosines)[:k]
        scores = np.zeros(K)
        for i in order:
            scores[bank_labels[i]] += np.exp(cosines[i] / temperature)
        ranking = np.argsort(-scores, kind="stable")
        top1 += ranking[0] == label
        top5 += label in ranking[:5]
    return 100 * top1 / len(labels), 100 * top5 / len(labels)


@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_it_equals_the_definition(sides, temperature):
    ks = [1, 5, 20, M]
    rows = knn_accuracy(*sides, classes=K, k=ks, temperature=temperature)
    assert [row.k for row in rows] == ks
    for row in rows:
        top1, top5 = plain_knn(*sides, row.k, temperature)
        assert row.top1 == pytest.approx(top1)
        # Classes that no neighbor has tie at zero: only with all of the bank is the fifth place one class's.
        if row.k == M:
            assert row.top5 == pytest.approx(top5)
        if row.k == 1:
            assert row.top5 == row.top1
        assert (row.images, row.bank) == (N, M)
    assert len({row.top1 for row in rows}) > 1


@pytest.mark.parametrize(("query_block", "bank_block"), [(1, 1), (5, 7), (N, M), (1000, 3)])
def test_blocks_change_nothing(sides, query_block, bank_block):
    queries, _, bank, _ = sides
    whole = nearest(queries, bank, 9)
    cosines, indices = nearest(queries, bank, 9, query_block=query_block, bank_block=bank_block)
    assert torch.equal(indices, whole[1])
    assert torch.allclose(cosines, whole[0], atol=1e-6)
    unit = torch.nn.functional.normalize(torch.tensor(bank), dim=1)
    assert torch.allclose(
        (torch.nn.functional.normalize(torch.tensor(queries), dim=1)[:, None] * unit[indices]).sum(2),
        cosines,
        atol=1e-6,
    )


def test_neither_side_is_ever_read_whole(sides, tmp_path):
    """Both lie in files; what is read at a time is a block."""
    queries, labels, bank, bank_labels = sides

    class Watched:
        def __init__(self, values, name):
            np.save(tmp_path / name, values.astype(np.float16))
            self.values, self.most = np.load(tmp_path / name, mmap_mode="r"), 0
            self.shape, self.ndim = values.shape, values.ndim

        def __len__(self):
            return len(self.values)

        def __getitem__(self, rows):
            part = self.values[rows]
            self.most = max(self.most, len(part))
            return part

    both = Watched(queries, "queries.npy"), Watched(bank, "bank.npy")
    nearest(*both, 20, query_block=10, bank_block=16)
    assert [side.most for side in both] == [10, 16]
    row = knn_accuracy(both[0], labels, both[1], bank_labels, classes=K, k=[20])[0]
    halves = [x.astype(np.float16) for x in (queries, bank)]
    assert row.top1 == pytest.approx(plain_knn(halves[0], labels, halves[1], bank_labels, 20, 0.07)[0])


def test_lengths_of_features_do_not_matter(sides):
    queries, labels, bank, bank_labels = sides
    scaled = bank * np.random.default_rng(1).uniform(0.1, 10, (M, 1)).astype(np.float32)
    assert knn_accuracy(queries, labels, bank, bank_labels, classes=K) == knn_accuracy(
        3 * queries, labels, scaled, bank_labels, classes=K
    )


def test_a_k_that_is_given_twice_counts_once(sides):
    assert knn_accuracy(*sides, classes=K, k=[5, 5, 1]) == knn_accuracy(*sides, classes=K, k=[5, 1])


def test_a_low_temperature_does_not_overflow():
    """exp(0.99 / 0.01) is more than float32 holds; the nearest of class 1 outweighs two of class 0."""
    scores = votes(torch.tensor([[0.99, 0.97, 0.96]]), torch.tensor([[1, 0, 0]]), 2, 0.01)
    assert scores.isfinite().all()
    assert scores.argmax() == 1
    assert scores[0, 1] / scores[0, 0] == pytest.approx(1 / (math.exp(-2) + math.exp(-3)), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": [20, 102]}, "k must be between 1 and the 101 images of the bank, got 102"),
        ({"k": [0, 0]}, "k must be between 1 and the 101 images"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": math.nan}, "temperature must be above 0, got nan"),
        ({"bank_labels": np.zeros(5, dtype=int)}, r"the 101 bank images need one label each.* got .* \(5,\)"),
        ({"bank_labels": np.full(M, -1)}, r"the 101 bank images need one label each, from 0 to 6; got .* from -1"),
    ],
)
def test_wrong_input_says_what_is_wrong(sides, change, message):
    given = dict(zip(("queries", "labels", "bank", "bank_labels"), sides, strict=True))
    with pytest.raises(ValueError, match=message):
        knn_accuracy(**{**given, "classes": K, **change})


# Features


class Counting(nn.Module):
    """Mean colors, and how many images went through."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.images = 0

    def forward(self, x):
        self.images += len(x)
        return x.mean((2, 3)) * self.gain


DATA = Data("", size=8, workers=0)


def test_features_are_taken_once_and_again_when_weights_or_images_change(tmp_path):
    root = class_folders(tmp_path / "data", per_class=(5, 1))
    model, kept = Counting(), tmp_path / "features"
    steps = []
    source = open_data(root, "train")
    first = extract(model, source, DATA, kept, batch=4, on_step=lambda done, total: steps.append((done, total)))
    assert model.images == 15
    assert steps[-1] == (15, 15)
    assert first.values.shape == (15, 3)
    assert first.values.dtype == np.float16
    again = extract(model, open_data(root, "train"), DATA, kept)
    assert model.images == 15
    assert np.array_equal(first.values, again.values)
    assert np.array_equal(again.labels, source.labels)
    assert np.array_equal(again.indices, np.arange(15))
    for change in (
        {"model": nn.Sequential(Counting())},
        {"source": open_data(root, "val")},
        {"source": Subset(source, np.arange(4))},
        {"data": replace(DATA, size=9)},
        {"about": "x"},
    ):
        given = {"model": model, "source": source, "data": DATA, "about": "", **change}
        assert key_of(**given) != key_of(model, source, DATA)
    keys = set()
    for model.global_pool in ("avg", "max"):  # not among the words of the model
        keys.add(key_of(model, source, DATA))
    assert len(keys) == 2
    del model.global_pool
    with torch.no_grad():
        model.gain[1] = 2
    extract(model, source, DATA, kept)
    assert model.images == 30
    (root / "train" / "cat" / "0.png").unlink()
    assert len(extract(model, open_data(root, "train"), DATA, kept).values) == 14
    assert not [path for path in kept.iterdir() if path.name.startswith(".")]


def test_features_say_what_stands_in_their_way(tmp_path):
    source = open_data(class_folders(tmp_path / "data", per_class=(2, 1)), "train")
    broken = Counting()
    broken.gain.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite in float32; the weights or the images are not"):
        extract(broken, source, DATA, tmp_path / "features", dtype="float32")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotADirectoryError, match=r"file/features"):
        extract(Counting(), source, DATA, tmp_path / "file" / "features")


def test_features_on_a_full_disk_are_named_and_leave_nothing_behind(tmp_path):
    source = open_data(class_folders(tmp_path / "data", per_class=(5, 1)), "train")
    with (
        no_file_above(150),
        pytest.raises(DiskFullError, match=r"features/\w+\.npy cannot be written"),
    ):
        extract(Counting(), source, DATA, tmp_path / "features", batch=4)
    assert list((tmp_path / "features").iterdir()) == []


def test_features_have_the_permissions_of_any_new_file(tmp_path):
    source = open_data(class_folders(tmp_path / "data", per_class=(2, 1)), "train")
    extract(Counting(), source, DATA, tmp_path / "features")
    (tmp_path / "plain").touch()
    for kept in (tmp_path / "features").iterdir():
        assert kept.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_features_of_broken_images_are_left_out_and_the_others_stay_in_order(tmp_path):
    root = class_folders(tmp_path / "data", per_class=(40, 1))
    (root / "train" / "cat" / "3.png").write_bytes(b"broken")
    source = open_data(root, "train")
    found = extract(Counting(), source, DATA, tmp_path / "features", batch=7, dtype="float32", say=lambda line: None)
    assert len(found.values) == len(found.indices) == len(found.labels) == 119
    (place,) = set(range(120)) - set(found.indices.tolist())
    assert source.name(place).endswith("3.png")
    alone = extract(Counting(), Subset(source, found.indices), DATA, tmp_path / "alone", batch=7, dtype="float32")
    assert np.array_equal(found.values, alone.values)


def test_features_that_fail_leave_nothing_behind(tmp_path):
    source = open_data(class_folders(tmp_path / "data", per_class=(2, 1)), "train")

    class Large(Counting):
        def forward(self, x):
            return torch.full((len(x), 2), 1e6)

    with pytest.raises(ValueError, match=r"not finite in float16; use --dtype float32"):
        extract(Large(), source, DATA, tmp_path / "features")
    assert list((tmp_path / "features").iterdir()) == []
    assert extract(Large(), source, DATA, tmp_path / "features", dtype="float32").values[0, 0] == 1e6
    with pytest.raises(ValueError, match=r"unknown dtype of features 'float8'"):
        extract(Large(), source, DATA, tmp_path / "features", dtype="float8")


def test_two_commands_may_take_the_same_features(tmp_path, monkeypatch):
    source = open_data(class_folders(tmp_path / "data", per_class=(2, 1)), "train")
    kept, rows = tmp_path / "features", features_module._rows

    def another_is_faster(*arguments):
        monkeypatch.setattr(features_module, "_rows", rows)
        extract(Counting(), source, DATA, kept)
        return rows(*arguments)

    monkeypatch.setattr(features_module, "_rows", another_is_faster)
    assert len(extract(Counting(), source, DATA, kept).values) == 6
    assert not list(kept.glob(".*"))


def test_a_broken_image_is_left_out_and_the_others_keep_their_place(tmp_path):
    root = class_folders(tmp_path / "data", per_class=(40, 1))
    (root / "train" / "dog" / "0.png").write_bytes(b"no image")
    source, said = open_data(root, "train"), []
    taken = extract(Counting(), source, DATA, tmp_path / "features", say=said.append, dtype="float32")
    assert len(said) == 1
    assert len(taken.values) == len(taken.labels) == 119
    assert 40 not in taken.indices
    assert np.array_equal(taken.labels, source.labels[taken.indices])
    last = np.asarray(source.read(119).resize((8, 8)))  # not exactly the same resize, but the same image
    mean = (last / 255 - np.array(DATA.mean)) / np.array(DATA.std)
    assert np.allclose(taken.values[-1], mean.mean((0, 1)), atol=0.1)


def test_principal_components_are_those_of_the_covariance():
    generator = np.random.default_rng(0)
    values = generator.normal(size=(200, 5)) * np.array([1, 5, 0.1, 3, 0.5]) + 7
    points = principal_components(values)
    assert np.allclose(points.mean(0), 0, atol=1e-9)
    assert np.allclose(points.T @ points, np.diag(np.linalg.svd(values - values.mean(0))[1][:2] ** 2), atol=1e-6)
    assert abs(np.corrcoef(points[:, 0], values[:, 1])[0, 1]) > 0.99
    assert two_dimensions(values, "tsne").shape == (200, 2)
    with pytest.raises(ValueError, match="unknown map 'umap'"):
        two_dimensions(values, "umap")


def test_evenly_chosen_numbers_are_different_and_reach_both_ends():
    assert evenly(100, 6) == [0, 20, 40, 59, 79, 99]
    assert evenly(3, 6) == [0, 1, 2]


def test_pictures(tmp_path):
    root = class_folders(tmp_path / "data", per_class=(6, 3))
    sources = {split: open_data(root, split) for split in ("train", "val")}
    taken = {split: extract(Counting(), source, DATA, tmp_path / "features") for split, source in sources.items()}
    plot_neighbors(taken["val"], sources["val"], taken["train"], sources["train"], tmp_path / "near.png")
    plot_feature_map(taken["val"], tmp_path / "map.png")
    for name in ("near.png", "map.png"):
        picture = np.asarray(Image.open(tmp_path / name).convert("RGB"))
        assert min(picture.shape[:2]) > 200
        assert picture.std() > 5


# The commands


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the digits, too short to be good."""
    out = tmp_path_factory.mktemp("runs") / "dino"
    changes = [
        "schedule.epochs=1",
        "schedule.warmup_epochs=0",
        "crops.local_count=2",
        "run.batch=288",
        "probe.epochs=3",
    ]
    train_dino(with_overrides(named_dino_recipe("digits"), changes), out, device="cpu", quiet=True)
    return out


def sima(*arguments, code=0):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def test_the_command_prints_rows_and_draws(run, tmp_path, monkeypatch):
    titles = []

    def noting_the_title(plot):
        def noted(*arguments, title, **options):
            titles.append(title)
            plot(*arguments, title=title, **options)

        return noted

    monkeypatch.setattr(knn_module, "plot_neighbors", noting_the_title(plot_neighbors))
    monkeypatch.setattr(map_module, "plot_feature_map", noting_the_title(plot_feature_map))
    pictures = "--picture", tmp_path / "near.png", "--map", tmp_path / "map.png"
    kept = "--cache", tmp_path / "features"  # of this test alone
    output = sima("knn", run, "-k", 5, "-k", 20, "--out", tmp_path / "rows.csv", *kept, *pictures).output
    assert "k-NN of" in output
    rows = read_rows(tmp_path / "rows.csv", KnnRow)
    assert [row.k for row in rows] == [5, 20]
    assert 30 < rows[0].top1 <= 100
    assert rows[0].bank + rows[0].images == 1797
    assert (tmp_path / "near.png").is_file()
    assert (tmp_path / "map.png").is_file()
    assert titles == [f"Nearest neighbors under {run.name}", f"Features of {run.name}, pca"], "no path of a machine"
    monkeypatch.setattr(features_module, "_rows", None)  # a second time nothing is taken
    assert "100" in sima("knn", run, *kept).output
    assert len(list((tmp_path / "features").iterdir())) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-k", 5000), r"k must be between 1 and the \d+ images of the bank, got 5000"),
        (("--device", "tpu"), "device must be auto, cpu or cuda"),
        (("--branch", "pupil"), "unknown branch"),
        (("--data", "nowhere"), "does not exist"),
        (("--map-method", "foo"), "unknown map 'foo'"),
        (("--picture", "p.xyz"), r"a figure must be a file that ends in .*got p\.xyz"),
        (("--temperature", "nan"), "temperature must be above 0, got nan"),
    ],
)
def test_the_command_refuses(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["knn", str(run), *[str(a) for a in arguments]])
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        raise result.exception


def test_each_k_is_at_least_1():
    output = CliRunner().invoke(cli.app, ["knn", "-k", "0", "-k", "20"]).output
    assert "Invalid value for '-k'" in output


def test_a_fifth_of_class_folders_without_a_split_is_held_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = class_folders(tmp_path / "data", per_class=(10, 1)) / "train"
    model = ["sima_vit_mini_patch4_64", "--data", str(data), "--device", "cpu"]
    for command in (["knn", *model, "-k", "3"], ["linear", *model, "--epochs", "1"]):
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0, (result.output, result.exception)
        assert f"{data} has no val images: 20% of each class are held out" in result.output
        assert re.search(r"top-1 [\d.]+, top-5 [\d.]+ of 6 images|│ +6 │ +24 │", result.output)


@pytest.mark.parametrize("command", ["knn", "linear"])
def test_other_classes_in_val_are_named(run, command, tmp_path):
    root = class_folders(tmp_path / "data", per_class=(2, 2))
    (root / "val" / "cat").rename(root / "val" / "cow")
    result = CliRunner().invoke(cli.app, [command, str(run), "--data", str(root)])
    assert "only in train: cat; only in val: cow" in str(result.exception)


def test_features_of_a_checkpoint_lie_with_those_of_its_run(run):
    (newest, *_) = sorted((run / "checkpoints").glob("*.pt"), reverse=True)
    sima("knn", newest, "-k", 5)
    assert not (run / "checkpoints" / "features").exists()


def test_files_of_other_kinds_are_named(tmp_path):
    torch.save({"model": {}}, tmp_path / "odd.pt")
    torch.save([1], tmp_path / "list.pt")
    (tmp_path / "text.safetensors").write_text("text")
    for file in ("odd.pt", "list.pt", "text.safetensors"):
        result = CliRunner().invoke(cli.app, ["knn", str(tmp_path / file), "--data", "digits"])
        assert isinstance(result.exception, ValueError), result.exception
        assert file in str(result.exception)


def test_weights_that_do_not_fit_their_recipe_are_named(run, tmp_path):
    about, weights = read_weights(run / "weights.safetensors")
    name = next(iter(weights))
    wrong = {
        "shape": ({**weights, name: torch.zeros(3)}, about, "do not fit the model of its recipe"),
        "recipe": (weights, {"task": "dino"}, "was not written by `sima train`"),
    }
    for file, (tensors, said, message) in wrong.items():
        save_file(tensors, tmp_path / f"{file}.safetensors", metadata={"about": json.dumps(said)})
        with pytest.raises(ValueError, match=message):
            load_backbone(tmp_path / f"{file}.safetensors")
    torch.save({"about": about}, tmp_path / "empty.pt")
    for branch, missing in (("teacher", "trained"), ("student", "student")):
        with pytest.raises(ValueError, match=f"holds no {missing} weights"):
            load_backbone(tmp_path / "empty.pt", branch=branch)


def test_a_name_says_whose_weights_it_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = class_folders(tmp_path / "data", per_class=(2, 1))
    said = "has no trained weights: these are the features of random ones"
    assert said in sima("knn", "sima_xcit_nano_12_p16_224", "--data", root, "--size", 32, "-k", 1).output
    assert said not in sima("knn", "sima_xcit_mini_p4_64_relu", "--data", root, "--size", 32, "-k", 1).output


def test_a_model_by_name_needs_data_and_a_missing_run_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["knn", "sima_xcit_nano_12_p16_224"])
    assert "give the images with --data" in str(result.exception)
    for command in ("knn", "linear"):
        result = CliRunner().invoke(cli.app, [command])
        assert "no run in runs/dino-digits, the default: make it with `sima dino`" in str(result.exception)
