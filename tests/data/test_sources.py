"""Each format gives the same samples; files that cannot be used are errors that name them."""

import gzip
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from formats import encoded, write_members, write_parquet, write_table, write_tar

from sima_attn.data.settings import Data
from sima_attn.data.sources import check_same_classes, class_words
from sima_attn.data.splits import open_data, open_split, open_trained_split
from small_runs import picture


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


def test_wrong_folders_are_named(tmp_path, folders):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_data(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no train images"):
        open_data(tmp_path / "empty")
    (tmp_path / "empty" / "train").mkdir()
    with pytest.raises(ValueError, match="contains no class folders"):
        open_data(tmp_path / "empty")
    (tmp_path / "empty" / "train" / "cat").mkdir()
    with pytest.raises(ValueError, match="contains no images"):
        open_data(tmp_path / "empty")
    with pytest.raises(ValueError, match="split must be 'train', 'val' or 'test'"):
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


def test_linked_subfolders_of_a_class_are_followed_and_a_loop_is_named(folders, tmp_path):
    cat = folders / "train" / "cat"
    (tmp_path / "elsewhere" / "deeper").mkdir(parents=True)
    picture(0).save(tmp_path / "elsewhere" / "deeper" / "x.png")
    (cat / "more").symlink_to(tmp_path / "elsewhere")
    assert cat / "more" / "deeper" / "x.png" in open_data(folders).files
    (tmp_path / "elsewhere" / "back").symlink_to(cat)
    with pytest.raises(ValueError, match=r"more/back is a link to a folder that contains it; remove the link"):
        open_data(folders)


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
    with pytest.raises(ValueError, match="not a readable tar file"):
        open_data(tmp_path)


def test_a_parquet_label_that_occurs_twice_is_named(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.Table.from_arrays([pa.array([b"x"]), pa.array([0]), pa.array([0])], names=["image", "label", "label"])
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"train\.parquet .*label.* exists 2 times"):
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
        with pytest.raises(ValueError, match=r"no class folders|no column 'label'|has no label"):
            open_data(tmp_path / name)
        free = open_data(tmp_path / name, labeled=False)
        assert free.classes == []
        assert len(free) == len(source)
        assert free.labels.tolist() == [0] * len(source)
        assert all(np.array_equal(free.read(i), source.read(i)) for i in range(len(source)))
    assert open_data(folders, labeled=False).classes == source.classes
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="contains no images"):
        open_data(tmp_path / "empty", labeled=False)


@pytest.mark.parametrize("opened", ["gz", "bz2", "xz"])
def test_a_compressed_tar_is_named(folders, tmp_path, opened):
    data = encoded(folders, "train")
    write_members(tmp_path / "train-0.tar", [("0.png", data[0][0]), ("0.cls", b"0")], f"w:{opened}")
    with pytest.raises(ValueError, match=r"train-0\.tar is not a readable tar file, or it is compressed"):
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
        with pytest.raises(ValueError, match=r"train-0\.tar is (cut off|not a readable tar file)"):
            open_data(tmp_path)
    path.write_bytes(whole[:1024] + b"?" * 512 + whole[1536:])
    with pytest.raises(ValueError, match=r"train-0\.tar is (cut off or damaged|not a readable tar file)"):
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
        (("b.001.png", b""), r"b\.001\.png in .*train-0\.tar is a link, or has dots in its name: .* b has no image"),
        (("b.png", b"", tarfile.SYMTYPE), r"b\.png in .* is a link"),
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
        with pytest.raises(ValueError, match=r"train-.*\.parquet is not a readable parquet file"):
            open_data(tmp_path / "p")


def test_parquet_takes_plain_bytes_and_names_of_classes(folders, tmp_path):
    samples, names = encoded(folders, "train"), ["cat", "dog", "owl"]
    write_table(tmp_path / "p", image=[data for data, _ in samples], label=[names[label] for _, label in samples])
    with pytest.raises(ValueError, match=r"column label of .*parquet contains strings \(cat, dog, owl\).*classes\.txt"):
        open_data(tmp_path / "p")
    (tmp_path / "p" / "classes.txt").write_text("owl\nelk\ncat\n")
    with pytest.raises(ValueError, match=r"not among the 3 classes \(owl, elk, cat\): dog"):
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
        assert len(open_data(root, labeled=False)) == 6


def test_a_list_of_classes_that_contradicts_the_schema_is_an_error(tmp_path):
    write_parquet(tmp_path, [(b"", 0), (b"", 1)], ["cat", "dog"])
    listing = tmp_path / "classes.txt"
    listing.write_text("cat\tcat, house cat\ndog\n")
    assert open_data(tmp_path).classes == ["cat", "dog"]
    for wrong in ("dog\ncat\n", "cat\ndog\nowl\n", "n01\tcat\nn02\tdog\n"):
        listing.write_text(wrong)
        with pytest.raises(ValueError, match=r"classes of .*classes\.txt .* and .*\.parquet .* differ"):
            open_data(tmp_path)


def test_parquet_labels_of_another_kind_are_named(tmp_path):
    write_table(tmp_path / "p", image=[b""], label=[0.5])
    with pytest.raises(ValueError, match=r"train\.parquet is not a readable parquet file: .*0\.5.*int64"):
        open_data(tmp_path / "p")
    write_table(tmp_path / "p", image=[b"", b""], label=[1, None])
    with pytest.raises(ValueError, match=r"1 of 2 rows of .* have no label"):
        open_data(tmp_path / "p")


def test_parquet_images_must_be_bytes(tmp_path):
    for wrong in (["cat/0.png"], [{"path": "cat/0.png"}], [[0, 255]]):
        write_table(tmp_path, image=wrong, label=[0])
        with pytest.raises(ValueError, match=r"column image of .*train\.parquet must contain encoded images as bytes"):
            open_data(tmp_path)
    for right in ([b""], [{"bytes": b"", "path": "cat/0.png"}]):
        write_table(tmp_path, image=right, label=[0])
        assert len(open_data(tmp_path)) == 1


def test_labels_that_are_ids_are_named_before_they_are_counted(tmp_path):
    """A class for each number up to an id of 13 digits would take all memory."""
    write_table(tmp_path / "p", image=[b""], label=[1_700_000_000_000])
    (tmp_path / "t").mkdir()
    write_members(tmp_path / "t" / "train-0.tar", [("a.png", b""), ("a.cls", b"1700000000000")])
    for root in (tmp_path / "p", tmp_path / "t"):
        with pytest.raises(ValueError, match=r"has the label 1700000000000: number the classes from 0"):
            open_data(root)


def test_digits_are_split_by_class():
    train, val = open_data("digits"), open_data("digits", "val")
    assert len(train) + len(val) == 1797
    shares = np.bincount(val.labels) / (np.bincount(val.labels) + np.bincount(train.labels))
    assert np.all(np.abs(shares - 0.2) < 0.01)


def unsplit(root, counts):
    """CLASS/n.png without a split."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            picture(i).save(root / name / f"{i}.png")
    return root


def names_of(source):
    return [source.name(i) for i in range(len(source))]


def test_a_part_of_each_class_is_held_out(tmp_path):
    root = unsplit(tmp_path / "photos", {"cat": 20, "dog": 10, "owl": 2})
    data = Data(str(root), val=0.2)
    train, val = open_split(data, "train"), open_split(data, "val")
    assert np.bincount(val.labels).tolist() == [4, 2, 1]  # at least one of each class
    assert np.bincount(train.labels).tolist() == [16, 8, 1]
    assert train.classes == val.classes == ["cat", "dog", "owl"]
    assert sorted(names_of(train) + names_of(val)) == sorted(str(path) for path in root.rglob("*.png"))
    assert names_of(open_split(data, "val")) == names_of(val)
    assert names_of(open_split(replace(data, split_seed=1), "val")) != names_of(val)
    moved = root.rename(tmp_path / "moved")
    found = names_of(open_trained_split(data, "val", moved))
    assert [Path(name).relative_to(moved) for name in found] == [Path(name).relative_to(root) for name in names_of(val)]


def test_train_images_without_val_images_can_be_split_too(tmp_path):
    unsplit(tmp_path / "train", {"cat": 5, "dog": 5})
    with pytest.raises(FileNotFoundError, match=r"has no val images: .*--val 0\.2"):
        open_data(tmp_path, "val")
    assert len(open_split(Data(str(tmp_path), val=0.4), "val")) == 4


def test_a_split_that_is_there_is_not_replaced(tmp_path):
    unsplit(tmp_path / "train", {"cat": 2})
    unsplit(tmp_path / "val", {"cat": 1})
    data = Data(str(tmp_path), val=0.5)
    with pytest.raises(ValueError, match=r"has val images of its own, and data\.val=0\.5"):
        open_split(data, "val")
    assert len(open_trained_split(data, "val")) == 1
    with pytest.raises(ValueError, match="the class cat has 1 images: at least 2 are needed"):
        open_split(Data(str(tmp_path / "val"), val=0.5), "val")
