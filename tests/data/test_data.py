"""Every format gives the same samples; order and augmentation are functions of (seed, step); mistakes are named."""

import gzip
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch import distributed

from sima_attn._settings import to_dict
from sima_attn.data import open_data
from sima_attn.data.augment import crop_and_flip, erase, jitter_colours
from sima_attn.data.cache import Cache, normalise
from sima_attn.data.loader import (
    BrokenImages,
    Share,
    batch_indices,
    epoch_order,
    evaluation_batches,
    training_batches,
    training_transform,
)
from sima_attn.data.settings import Augment
from sima_attn.data.sources import check_same_classes, class_words
from sima_attn.models.loading import load_model
from sima_attn.train.evaluate import evaluate
from sima_attn.train.logs import read_log
from small_runs import ALL_ON, class_folders, picture, small_recipe

CPU = torch.device("cpu")


def write_parquet(root, samples, names, split="train", row_group=3, metadata=None):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = pa.array([{"bytes": data, "path": f"{i}.png"} for i, (data, _) in enumerate(samples)])
    table = pa.table({"image": images, "label": pa.array([label for _, label in samples])})
    if names:
        features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        metadata = json.dumps(features).encode()
    if metadata is not None:
        table = table.replace_schema_metadata({b"huggingface": metadata})
    root.mkdir(exist_ok=True)
    pq.write_table(table, root / f"{split}-00000-of-00001.parquet", row_group_size=row_group)


def write_table(root, split="train", **columns):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), root / f"{split}.parquet")


def write_members(path, members, mode="w", **options):
    with tarfile.open(path, mode, **options) as tar:
        for name, content, *kind in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if kind:
                (member.type,), member.linkname = kind, "elsewhere"
            tar.addfile(member, io.BytesIO(content))


def write_tar(root, samples, split="train", shard=5):
    root.mkdir(exist_ok=True)
    for start in range(0, len(samples), shard):
        pairs = enumerate(samples[start : start + shard], start)
        members = [((f"{i:04d}.png", data), (f"{i:04d}.cls", str(label).encode())) for i, (data, label) in pairs]
        write_members(root / f"{split}-{start:04d}.tar", [member for pair in members for member in pair])


@pytest.fixture
def folders(tmp_path):
    return class_folders(tmp_path / "folders")


def encoded(folders, split):
    root = folders / split
    classes = sorted(p.name for p in root.iterdir())
    return [(p.read_bytes(), k) for k, name in enumerate(classes) for p in sorted((root / name).iterdir())]


@pytest.fixture(params=["folders", "parquet", "tar"])
def any_format(request, folders, tmp_path):
    if request.param == "folders":
        return folders
    for split in ("train", "val"):
        if request.param == "parquet":
            write_parquet(tmp_path / "parquet", encoded(folders, split), ["cat", "dog", "owl"], split)
        else:
            write_tar(tmp_path / "tar", encoded(folders, split), split)
    (tmp_path / request.param / "classes.txt").write_text("cat\ndog\nowl\n")
    return tmp_path / request.param


def test_classes_have_words_where_the_list_has_them(tmp_path):
    assert class_words(tmp_path) == {}
    (tmp_path / "classes.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\towl\nbare\n")
    assert class_words(str(tmp_path)) == {"n01": "goldfish", "n02": "owl"}


def test_every_format_holds_the_same_samples(any_format, folders):
    for split, count in (("train", 24), ("val", 12)):
        source, truth = open_data(any_format, split), open_data(folders, split)
        assert len(source) == len(truth) == count
        assert source.classes == ["cat", "dog", "owl"]
        assert source.labels.tolist() == truth.labels.tolist()
        for i in range(count):
            assert source.read(i).mode == "RGB"
            assert np.array_equal(np.array(source.read(i)), np.array(truth.read(i)))


def test_an_epoch_has_every_sample_once_and_another_order_each_time(any_format):
    source = open_data(any_format)
    first, second = epoch_order(source, 0, 0), epoch_order(source, 0, 1)
    assert sorted(first) == sorted(second) == list(range(len(source)))
    assert first.tolist() != second.tolist()
    assert first.tolist() == epoch_order(source, 0, 0).tolist()
    assert first.tolist() != epoch_order(source, 1, 0).tolist()


def test_repeats_come_in_a_row_and_keep_the_length(folders):
    order = epoch_order(open_data(folders), 0, 0, repeats=3)
    assert len(order) == 24
    assert len(set(order)) == 8
    assert (order.reshape(8, 3) == order.reshape(8, 3)[:, :1]).all()


def test_processes_and_parts_together_take_what_one_would(folders):
    source = open_data(folders)

    def steps(share):
        flat = [indices for *_, indices in batch_indices(source, share, 0, start=1, stop=7)]
        return [set(np.concatenate(flat[i : i + share.accumulate])) for i in range(0, len(flat), share.accumulate)]

    whole = steps(Share(8))
    assert len(whole) == 6
    assert steps(Share(8, accumulate=4)) == whole
    parts = [steps(Share(8, rank, world=2, accumulate=2)) for rank in (0, 1)]
    assert [a | b for a, b in zip(*parts, strict=True)] == whole
    assert all(not a & b for a, b in zip(*parts, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_a_step_on_are_those_of_the_whole_run(folders, workers):
    """Random augmentation and all: what a run that goes on sees, whatever the number of workers."""
    source, recipe = open_data(folders), small_recipe(augment=ALL_ON)

    def batches(start, workers):
        settings = small_recipe(augment=ALL_ON, data={"workers": workers}).data
        options = {"start": start, "stop": 5, "device": CPU, "broken": BrokenImages(source)}
        return list(training_batches(source, Share(8), settings, recipe.augment, 0, **options))

    whole = batches(0, 0)
    assert len(whole) == 5
    for (images, labels), (x, y) in zip(whole[3:], batches(3, workers), strict=True):
        assert torch.equal(images, x)
        assert torch.equal(labels, y)
    assert not torch.equal(whole[0].images, whole[3].images)


@pytest.mark.timeout(30)  # what used to happen is that nothing did
def test_workers_run_where_the_temporary_folder_has_a_long_path(folders, tmp_path, monkeypatch):
    long = tmp_path / ("long" * 40)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    source, data = open_data(folders, "val"), small_recipe(data={"workers": 1}).data
    batches = evaluation_batches(source, data, 5, device=CPU, broken=BrokenImages(source))
    assert sum(len(labels) for _, labels in batches) == 12
    assert tempfile.gettempdir() == str(long)  # of this process


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "rand-m0", "augmix-m10-mstd5", "v0-mstd5"])
def test_posterize_keeps_a_bit_whatever_the_noise(policy):
    """timm asks for 0 bits at either end of the magnitudes, Pillow takes 1 to 8."""
    step = training_transform(small_recipe().data, Augment(randaugment=policy)).transforms[1].transforms[0]
    several = getattr(step, "ops", None) or [op for ops in step.policy for op in ops]
    ops = [op for op in several if op.name.startswith("Posterize")]
    assert ops
    random.seed(0)
    grey = Image.linear_gradient("L").resize((16, 16))
    kept = {len(set(op(grey).tobytes())) for op in ops for _ in range(3000)}
    assert 2 in kept  # shades: one bit of them
    assert min(kept) == 2


@pytest.mark.parametrize("crop_ratio", [1.0, 0.875, 0.5])
@pytest.mark.parametrize("size", [12, 20])  # 20 / 0.875 = 22.9: timm rounds the shorter side down
def test_the_cache_holds_what_evaluation_reads(folders, size, crop_ratio):
    source = open_data(folders, "val")
    data = small_recipe(data={"size": size, "crop_ratio": crop_ratio}).data
    cache = Cache(source, data, CPU, broken=BrokenImages(source))
    cached = torch.cat([normalise(x.float() / 255, data) for x, _ in cache.evaluation_batches(5)])
    read = torch.cat([x for x, _ in evaluation_batches(source, data, 5, device=CPU, broken=BrokenImages(source))])
    assert len(read) == 12
    assert torch.allclose(cached, read, atol=1e-5)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "LA"])
def test_other_kinds_of_images_become_rgb(folders, mode):
    picture(99, mode=mode).save(folders / "train" / "cat" / "0.png")
    assert open_data(folders).read(0).mode == "RGB"


DEEP = np.linspace(0, 65535, 320).reshape(16, 20)


def deep_image(kind):
    """The same ramp from black to white, in more than 8 bits."""
    if kind in ("I;16", "I;16B"):
        return Image.frombytes(kind, (20, 16), DEEP.astype(">u2" if kind == "I;16B" else "<u2").tobytes())
    scaled = {"I": DEEP.astype(np.int32), "I, bytes": (DEEP / 257).astype(np.int32)}
    scaled |= {"F": (DEEP / 65535).astype(np.float32), "F, bytes": (DEEP / 257).astype(np.float32)}
    return Image.fromarray(scaled[kind])


@pytest.mark.parametrize("kind", ["I;16", "I;16B", "I", "I, bytes", "F", "F, bytes"])
def test_images_of_more_than_8_bits_are_scaled(folders, kind):
    """Not clipped, which would make them almost white."""
    for ending in (".tif", ".png") if kind == "I;16" else (".tif",):
        (folders / "train" / "cat" / "0.png").unlink(missing_ok=True)
        deep_image(kind).save(folders / "train" / "cat" / f"0{ending}")
        source = open_data(folders)
        assert source.name(0).endswith(f"0{ending}")
        image = source.read(0)
        assert image.mode == "RGB"
        assert np.abs(np.asarray(image) - (DEEP / 257)[..., None]).max() <= 1
        (folders / "train" / "cat" / f"0{ending}").unlink()


def break_images(folders, count, split="train"):
    files = sorted((folders / split).rglob("*.png"))[:count]
    for path in files:
        path.write_bytes(path.read_bytes()[:40])
    return files


@pytest.mark.parametrize("cached", [False, True])
def test_a_broken_image_is_named_once_and_another_takes_its_place(tmp_path, cached):
    folders = class_folders(tmp_path / "many", per_class=(101, 1), classes=("a", "b"))
    (path,) = break_images(folders, 1)
    source, said = open_data(folders), []
    broken = BrokenImages(source, said.append)
    settings = small_recipe().data
    if cached:
        batches = list(Cache(source, settings, CPU, broken=broken).batches(Share(50), 0, start=0, stop=12))
    else:
        options = {"start": 0, "stop": 12, "device": CPU, "broken": broken}
        batches = list(training_batches(source, Share(50), settings, Augment(crop="none"), 0, **options))
    assert all(len(labels) == 50 for _, labels in batches)
    assert len(said) == 1
    assert f"{path}: it is not an image, or its beginning is damaged" in said[0]


def test_evaluation_leaves_a_broken_image_out(tmp_path):
    folders = class_folders(tmp_path / "many", per_class=(1, 101), classes=("a",))
    break_images(folders, 1, "val")
    source = open_data(folders, "val")
    data, said = small_recipe().data, []
    read = evaluation_batches(source, data, 50, device=CPU, broken=BrokenImages(source, said.append))
    assert sum(len(labels) for _, labels in read) == 100
    cache = Cache(source, data, CPU, broken=BrokenImages(source, said.append))
    assert sum(len(labels) for _, labels in cache.evaluation_batches(50)) == 100


def test_too_many_broken_images_are_an_error(folders):
    break_images(folders, 2)
    source = open_data(folders)
    with pytest.raises(ValueError, match=r"of 24 images cannot be read, more than 1%"):
        Cache(source, small_recipe().data, CPU, broken=BrokenImages(source, lambda line: None))


TRAIN = """
import json, sys
from pathlib import Path
from sima_attn.train.classify import train_classifier
from sima_attn.train.recipes import Recipe
from sima_attn._settings import from_dict
train_classifier(from_dict(Recipe, json.loads(sys.argv[1])), sys.argv[2], device="cpu")
threads = [Path(task, "comm").read_text() for task in Path("/proc/self/task").glob("*")]
assert not [name for name in threads if "gloo" in name], threads  # one left now and again aborted the process at exit
"""


def test_two_processes_name_broken_images_and_evaluate_what_is_saved(tmp_path):
    """torchrun, gloo. The second process finds the images, and shows nothing itself; its BatchNorm has seen others."""
    folders = class_folders(tmp_path / "many", per_class=(52, 51), classes=("a", "b"))
    train, val = open_data(folders), open_data(folders, "val")
    _, _, second = next(batch_indices(train, Share(52, 1, 2), 0, start=0, stop=1))
    paths = [train.files[second[5]], val.files[1]]  # val images go to the processes in turn
    for path in paths:
        path.write_bytes(b"broken")
    xcit = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = {"name": "sima_xcit_nano_12_p16_224", "kwargs": xcit}
    recipe = small_recipe(folders, epochs=1, model=model, run={"batch": 52, "ema": 0.5})
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [str(tmp_path / "train.py"), json.dumps(to_dict(recipe)), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("broken image")]
    assert [line.split(": ")[1] for line in said] == [str(path) for path in paths], done.stderr
    logged = read_log(tmp_path / "run" / "eval.csv")[-1]
    for ema, name in ((False, "loss"), (True, "ema_loss")):
        alone = evaluate(load_model(tmp_path / "run", branch="ema" if ema else None), say=said.append)
        assert float(logged[name]) == pytest.approx(alone.loss, rel=2e-6)


def test_the_broken_images_of_all_processes_count_together(tmp_path, monkeypatch):
    """One in each half of 150 images is within 1 %, the two together are not."""
    source = open_data(class_folders(tmp_path / "many", per_class=(150, 1), classes=("a",)))
    said = []
    broken = BrokenImages(source, said.append)
    broken.add([3])
    broken.gather()  # alone

    def gather(parts, mine):
        parts[:] = [mine, theirs]

    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather_object", gather)
    theirs = [3]
    broken.gather()
    assert len(said) == 1
    theirs = [70]
    with pytest.raises(ValueError, match=r"2 of 150 images cannot be read, more than 1%"):
        broken.gather()
    assert [line.split(": ")[1] for line in said] == [source.name(3), source.name(70)]


def test_wrong_folders_are_named(tmp_path, folders):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_data(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no train images"):
        open_data(tmp_path / "empty")
    (tmp_path / "empty" / "train").mkdir()
    with pytest.raises(ValueError, match="holds no class folders"):
        open_data(tmp_path / "empty")
    (tmp_path / "empty" / "train" / "cat").mkdir()
    with pytest.raises(ValueError, match="holds no images"):
        open_data(tmp_path / "empty")
    with pytest.raises(ValueError, match="split is 'train' or 'val'"):
        open_data(folders, "tests")
    with pytest.raises(FileNotFoundError, match="is a file"):
        open_data(folders / "train" / "cat" / "0.png")


def test_hidden_folders_are_no_classes_and_hidden_files_no_images(folders):
    before = open_data(folders)
    for name in (".ipynb_checkpoints", "__MACOSX", "cat/.ipynb_checkpoints", "cat/folder.jpg"):
        (folders / "train" / name).mkdir()
    for name in (".ipynb_checkpoints/0.png", "__MACOSX/0.png", "cat/.ipynb_checkpoints/0.png", "cat/._0.png"):
        picture(0).save(folders / "train" / name)
    source = open_data(folders)
    assert source.classes == before.classes
    assert source.files == before.files


def test_images_of_a_class_may_lie_deeper_and_are_in_the_order_of_their_paths(folders):
    cat = folders / "train" / "cat"
    for name in ("a/b/x.png", "a-b/x.PNG", "a/x.jpg", "a.png", "folder.jpg/x.png"):
        (cat / name).parent.mkdir(parents=True, exist_ok=True)
        picture(0).save(cat / name)
    (cat / "gone.png").symlink_to(cat / "nowhere.png")  # named as a broken image when it is read
    source = open_data(folders)
    files = [path for path, label in zip(source.files, source.labels, strict=True) if label == 0]
    assert len(files) == 8 + 6
    assert files == sorted(files)


def test_classes_that_differ_between_train_and_val_are_named(folders):
    (folders / "val" / "owl").rename(folders / "val" / "elk")
    with pytest.raises(ValueError, match=r"only in train: owl; only in val: elk"):
        check_same_classes(open_data(folders), open_data(folders, "val"))


def test_labels_without_a_class_are_an_error(folders, tmp_path):
    write_parquet(tmp_path / "p", encoded(folders, "train"), ["cat", "dog"])
    with pytest.raises(ValueError, match=r"2 class names, but labels from 0 to 2: 8 labels have no class"):
        open_data(tmp_path / "p")
    write_tar(tmp_path / "t", encoded(folders, "train"))
    (tmp_path / "t" / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(ValueError, match=r"2 class names"):
        open_data(tmp_path / "t")


def test_a_tar_without_labels_and_one_that_is_none_are_named(tmp_path):
    write_members(tmp_path / "train-0.tar", [("a.png", b"")])
    with pytest.raises(ValueError, match=r"a in .*train-0\.tar has no label"):
        open_data(tmp_path)
    (tmp_path / "train-0.tar").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(ValueError, match="no readable tar file"):
        open_data(tmp_path)


@pytest.mark.parametrize(
    ("columns", "fields", "message"),
    [
        (("image", "image", "label"), ("bytes",), r"train\.parquet has 2 columns image; rename or remove all but one"),
        (("image", "label", "label"), ("bytes",), r"train\.parquet has 2 columns label"),
        (("image", "label"), ("bytes", "bytes"), r"the column image of \S+train\.parquet has several fields bytes"),
        (("image", "label"), ("bytes", "path", "path"), r"train\.parquet has several fields path"),
    ],
)
def test_a_parquet_column_that_occurs_twice_is_named(tmp_path, columns, fields, message):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = pa.StructArray.from_arrays([pa.array([b"x"])] * len(fields), names=fields)
    arrays = {"image": image, "label": pa.array([0])}
    table = pa.Table.from_arrays([arrays[name] for name in columns], names=columns)
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=message):
        open_data(tmp_path)


def test_images_without_labels_can_be_read_where_none_are_needed(folders, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    source = open_data(folders, "train")
    contents = [path.read_bytes() for path in source.files]
    for name in ("flat", "parquet", "tar"):
        (tmp_path / name / "train").mkdir(parents=True)
    for i, data in enumerate(contents):
        (tmp_path / "flat" / "train" / f"{i:03d}.png").write_bytes(data)
    pq.write_table(pa.table({"image": pa.array(contents)}), tmp_path / "parquet" / "train.parquet")
    write_members(tmp_path / "tar" / "train.tar", [(f"{i:03d}.png", data) for i, data in enumerate(contents)])
    for name in ("flat", "parquet", "tar"):
        with pytest.raises(ValueError, match=r"no class folders|no column label|has no label"):
            open_data(tmp_path / name)
        free = open_data(tmp_path / name, labelled=False)
        assert free.classes == []
        assert len(free) == len(source)
        assert free.labels.tolist() == [0] * len(source)
        assert all(np.array_equal(free.read(i), source.read(i)) for i in range(len(source)))
    assert open_data(folders, labelled=False).classes == source.classes
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no images"):
        open_data(tmp_path / "empty", labelled=False)


@pytest.mark.parametrize("opened", ["gz", "bz2", "xz"])
def test_a_compressed_tar_is_named(folders, tmp_path, opened):
    data = encoded(folders, "train")
    write_members(tmp_path / "train-0.tar", [("0.png", data[0][0]), ("0.cls", b"0")], f"w:{opened}")
    with pytest.raises(ValueError, match=r"train-0\.tar is compressed \(.*plain tar"):
        open_data(tmp_path)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_that_is_cut_off_anywhere_is_an_error(tmp_path, form):
    """In a header, between members, in the block that ends it; one such block is enough."""
    path = tmp_path / "train-0.tar"
    stem = "long" * (4 if form == tarfile.USTAR_FORMAT else 40)  # the others put a long name into a block of its own
    write_members(path, [(f"{stem}{i}.{ending}", b"0") for i in (0, 1) for ending in ("png", "cls")], format=form)
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    assert len(open_data(tmp_path)) == 2
    for cut in range(end + 512, len(whole), 512):
        path.write_bytes(whole[:cut])
        assert len(open_data(tmp_path)) == 2
    for cut in range(0, end + 512, 128):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"train-0\.tar is (cut off|no readable tar file)"):
            open_data(tmp_path)
    path.write_bytes(whole[:1024] + b"?" * 512 + whole[1536:])
    with pytest.raises(ValueError, match=r"train-0\.tar is (cut off or damaged|no readable tar file)"):
        open_data(tmp_path)


def test_members_of_a_tar_that_are_no_samples_are_passed_over(tmp_path):
    members = [("a.png", b""), ("a.json", b'{"label": 1}'), ("a.mask.png", b""), ("._a.png", b""), ("._a.cls", b"?")]
    folders = [(name, b"", tarfile.DIRTYPE) for name in ("a.cls", "b.png", "b.cls")]
    write_members(tmp_path / "train-0.tar", members + folders)
    source = open_data(tmp_path)
    assert [source.members[i][1] for i in range(len(source))] == ["a.png"]
    assert source.labels.tolist() == [1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("a.png", b""), r"a\.png in .*train-0\.tar is the second image of a;"),
        (("a.JPG", b""), r"a\.JPG in .* is the second image of a;"),
        (("a.cls", b"1"), r"a\.cls in .* is the second cls of a;"),
        (("a.json", b'{"label": 1}'), r"a in .* has one label in \.cls and another in \.json"),
        (("b.001.png", b""), r"b\.001\.png in .*train-0\.tar has dots in its name: .* b has no image"),
        (("b.png", b"", tarfile.SYMTYPE), r"b\.png in .* is a link"),
        (("b.cls", b"", tarfile.LNKTYPE), r"b\.cls in .* is a link"),
    ],
)
def test_members_of_a_tar_that_would_be_lost_are_named(tmp_path, more, message):
    write_members(tmp_path / "train-0.tar", [("a.png", b""), ("a.cls", b"0"), more])
    with pytest.raises(ValueError, match=message):
        open_data(tmp_path)


def test_tars_of_other_writers_are_whole(folders, tmp_path):
    """GNU tar, and a stream, as webdataset writes it."""
    content = encoded(folders, "train")[0][0]
    (tmp_path / "a.png").write_bytes(content)
    (tmp_path / "a.cls").write_text("0")
    write_members(tmp_path / "train-1.tar", [("a.png", content), ("a.cls", b"0")], "w|")
    if shutil.which("tar"):
        subprocess.run(["tar", "-cf", "train-0.tar", "./a.png", "./a.cls"], cwd=tmp_path, check=True)
    assert len(open_data(tmp_path)) == 1 + bool(shutil.which("tar"))


def test_a_parquet_file_that_is_none_or_cut_short_is_named(folders, tmp_path):
    write_parquet(tmp_path / "p", encoded(folders, "train"), ["cat", "dog", "owl"])
    (path,) = (tmp_path / "p").iterdir()
    whole = path.read_bytes()
    for content in (b"", b"nothing of the kind" * 100, whole[:-100], gzip.compress(whole)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"train-.*\.parquet is no readable parquet file"):
            open_data(tmp_path / "p")


def test_parquet_takes_plain_bytes_and_names_of_classes(folders, tmp_path):
    samples, names = encoded(folders, "train"), ["cat", "dog", "owl"]
    write_table(tmp_path / "p", image=[data for data, _ in samples], label=[names[label] for _, label in samples])
    with pytest.raises(ValueError, match=r"column label of .*parquet has strings \(cat, dog, owl\).*classes\.txt"):
        open_data(tmp_path / "p")
    (tmp_path / "p" / "classes.txt").write_text("owl\nelk\ncat\n")
    with pytest.raises(ValueError, match=r"none of the 3 classes \(owl, elk, cat\): dog"):
        open_data(tmp_path / "p")
    (tmp_path / "p" / "classes.txt").write_text("owl\nelk\ncat\ndog\n")
    source, truth = open_data(tmp_path / "p"), open_data(folders)
    assert [source.classes[label] for label in source.labels] == [truth.classes[label] for label in truth.labels]
    assert all(np.array_equal(np.array(source.read(i)), np.array(truth.read(i))) for i in range(len(truth)))


@pytest.mark.parametrize(
    "metadata",
    [
        "",
        "no JSON",
        "{}",
        '{"info": null}',
        '{"info": {"features": [{"name": "label"}]}}',
        '{"info": {"features": {"label": ["x"]}}}',
        '{"info": {"features": {"label": {"names": "xy"}}}}',
        '{"info": {"features": {"label": {"names": [1, 2, 3]}}}}',
    ],
)
def test_parquet_metadata_of_another_form_names_no_classes(tmp_path, metadata):
    write_parquet(tmp_path / "p", [(b"", 0), (b"", 2)], None, metadata=metadata.encode())
    assert open_data(tmp_path / "p").classes == ["0", "1", "2"]


def test_parquet_files_that_list_other_classes_are_named(tmp_path):
    samples, root = [(b"", 0), (b"", 1)], tmp_path / "p"
    write_parquet(root, samples, ["cat", "dog"], "train-a")
    write_parquet(root, samples, None, "train-b")  # lists none, and contradicts nothing
    assert open_data(root).classes == ["cat", "dog"]
    for names, what in ((["dog", "cat"], "same names in another order"), (["cat", "elk"], "only in .*: elk")):
        write_parquet(root, samples, names, "train-c")
        with pytest.raises(ValueError, match=rf"classes of .*train-a-.* and .*train-c-.* differ: .*{what}"):
            open_data(root)
        assert len(open_data(root, labelled=False)) == 6
    write_parquet(root, samples, ["cat", "cat"], "train-a")
    with pytest.raises(ValueError, match=r"train-a-.*\.parquet lists classes more than once: cat"):
        open_data(root)


def test_a_list_of_classes_that_contradicts_the_schema_or_itself_is_an_error(tmp_path):
    write_parquet(tmp_path, [(b"", 0), (b"", 1)], ["cat", "dog"])
    listing = tmp_path / "classes.txt"
    listing.write_text("cat\tcat, house cat\ndog\n")
    assert open_data(tmp_path).classes == ["cat", "dog"]
    for wrong in ("dog\ncat\n", "cat\ndog\nowl\n", "n01\tcat\nn02\tdog\n"):
        listing.write_text(wrong)
        with pytest.raises(ValueError, match=r"classes of .*\.parquet and .*classes\.txt differ"):
            open_data(tmp_path)
    write_tar(tmp_path / "t", [(b"", 0), (b"", 1)])
    for root in (tmp_path, tmp_path / "t"):
        (root / "classes.txt").write_text("cat\tone\ndog\ncat\tanother\n")
        with pytest.raises(ValueError, match=r"classes\.txt lists classes more than once: cat"):
            open_data(root)


def test_parquet_columns_of_another_kind_are_named(tmp_path):
    write_table(tmp_path / "p", image=["a.png"], label=[0])
    with pytest.raises(ValueError, match=r"column image of .* is of type string; encoded images are needed"):
        open_data(tmp_path / "p")
    write_table(tmp_path / "p", image=[b""], label=[0.5])
    with pytest.raises(ValueError, match=r"column label of .* is of type double"):
        open_data(tmp_path / "p")
    write_table(tmp_path / "p", image=[b"", b""], label=[1, None])
    with pytest.raises(ValueError, match=r"1 of 2 rows of .* have no label"):
        open_data(tmp_path / "p")


def test_a_batch_that_does_not_fit_is_an_error(folders):
    with pytest.raises(ValueError, match=r"make it a multiple of 6"):
        Share(8, world=3, accumulate=2)
    with pytest.raises(ValueError, match=r"24 training images, fewer than run\.batch=32"):
        next(batch_indices(open_data(folders), Share(32), 0, start=0, stop=1))


def test_a_shift_moves_whole_pixels_and_nothing_else():
    images = torch.rand(64, 3, 9, 9)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    shifts = set()
    for image, around, out in zip(
        images, padded, crop_and_flip(images, Augment(crop="padded", padding=2, flip=0.0)), strict=True
    ):
        found = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.allclose(around[:, y : y + 9, x : x + 9], out, atol=1e-4)
        ]
        assert len(found) == 1
        shifts |= set(found)
        assert image.shape == out.shape
    assert len(shifts) > 15


def test_a_certain_flip_is_the_mirror_image_and_no_crop_is_the_image():
    images = torch.rand(4, 3, 8, 8)
    assert torch.allclose(crop_and_flip(images, Augment(crop="none", flip=1.0)), images.flip(3), atol=1e-5)
    assert torch.equal(crop_and_flip(images, Augment(crop="none", flip=0.0)), images)
    whole = Augment(crop="resized", scale=(1.0, 1.0), flip=0.0)
    assert torch.allclose(crop_and_flip(torch.ones(4, 3, 8, 8), whole), torch.ones(4, 3, 8, 8), atol=1e-5)


def test_a_random_crop_of_a_ramp_stays_within_it():
    ramp = torch.linspace(0, 1, 16).expand(32, 3, 16, 16).contiguous()
    out = crop_and_flip(ramp, Augment(crop="resized", scale=(0.1, 0.5), flip=0.0))
    spread = out[:, 0, 8, -2] - out[:, 0, 8, 1]
    assert (spread > 0).all()
    assert (spread < 0.95).all()
    assert spread.std() > 0.01


def test_erasing_fills_one_box_an_image_with_noise():
    images = torch.full((200, 3, 16, 16), 7.0)
    changed = (erase(images, 1.0) != 7).all(1)  # [B, S, S]
    share = changed.float().mean((1, 2))
    assert share.min() > 0
    assert 0.1 < share.mean() < 0.3
    boxes = changed.any(2).sum(1) * changed.any(1).sum(1)
    assert torch.equal(boxes, changed.sum((1, 2)))
    assert torch.equal(erase(images, 0.0), images)


def test_jitter_leaves_the_range_and_no_strength_the_image():
    images = torch.rand(16, 3, 8, 8)
    out = jitter_colours(images, 0.4, 0.4, 0.4)
    assert (out >= 0).all()
    assert (out <= 1).all()
    assert not torch.allclose(out, images)
    assert torch.allclose(jitter_colours(images, 0.0, 0.0, 0.0), images, atol=1e-6)


def test_digits_are_split_by_class():
    train, val = open_data("digits"), open_data("digits", "val")
    assert len(train) + len(val) == 1797
    shares = np.bincount(val.labels) / (np.bincount(val.labels) + np.bincount(train.labels))
    assert np.all(np.abs(shares - 0.2) < 0.01)
