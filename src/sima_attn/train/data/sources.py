"""Where images lie: class folders, parquet, tar shards, scikit-learn's digits. All are read by index.

An index is all that the rest needs to know of a sample: shuffling, sharding over processes and going on after
a crash are then the same for every format, and depend on no state of a reader.
"""

from __future__ import annotations

import io
import json
import tarfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test")}


class Source(ABC):
    """Samples by index: an RGB image and a label below the number of classes.

    Attributes:
        classes: Their names, in the order of the labels.
        labels: Of all samples [n].
        blocks: Sizes of neighbouring samples that are cheap to read together; None where every sample is.
    """

    classes: list[str]
    labels: np.ndarray
    blocks: list[int] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, index: int) -> str:
        """What to call a sample in a message."""

    @abstractmethod
    def read(self, index: int) -> Image:
        """The image, RGB. Whatever is wrong with it raises."""


def open_data(path: str | Path, split: str = "train") -> Source:
    """The images of a split ("train" or "val"), the format told from what is there.

    - "digits": scikit-learn's 1797 digits, a fifth of them val.
    - `train/CLASS/*.jpg`, `val/CLASS/*.jpg`: class folders.
    - `train-*.parquet`, `val-*.parquet` (or in folders train, val): Hugging Face's image and label columns.
    - `train-*.tar`, `val-*.tar` (or in folders): webdataset shards, members NAME.jpg with NAME.cls.

    val may also be called validation, valid or test.
    """
    if split not in SPLITS:
        raise ValueError(f"split is 'train' or 'val', got {split!r}")
    if str(path) == "digits":
        return Digits(split)
    root = Path(path)
    if not root.is_dir():
        what = "is a file; give the folder it lies in" if root.exists() else "does not exist"
        raise FileNotFoundError(f"the data folder {root} {what} (or use 'digits', which needs no files)")
    for alias in SPLITS[split]:
        for ending, kind in ((".parquet", Parquet), (".tar", TarShards)):
            files = sorted([*root.glob(f"{alias}[-_.]*{ending}"), *root.glob(f"{alias}{ending}")])
            files = files or sorted((root / alias).glob(f"*{ending}"))
            if files:
                return kind(files, root)
        if (root / alias).is_dir():
            return ClassFolders(root / alias)
    raise FileNotFoundError(
        f"{root} has no {split} images: neither a folder {split}/ with one folder a class, nor {split}-*.parquet, "
        f"nor {split}-*.tar"
    )


def check_same_classes(train: Source, val: Source) -> None:
    """Raise unless both splits have the same classes in the same order."""
    if train.classes == val.classes:
        return
    only_train = [c for c in train.classes if c not in set(val.classes)]
    only_val = [c for c in val.classes if c not in set(train.classes)]
    parts = [f"train has {len(train.classes)} classes, val {len(val.classes)}"]
    parts += [f"only in train: {_few(only_train)}"] * bool(only_train) + [f"only in val: {_few(only_val)}"] * bool(
        only_val
    )
    if not only_train and not only_val:
        parts.append("the same names in another order")
    raise ValueError(f"the classes of train and val differ: {'; '.join(parts)}")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_labels(labels: np.ndarray, classes: Sequence[str], where: str) -> None:
    wrong = (labels < 0) | (labels >= len(classes))
    if wrong.any():
        raise ValueError(
            f"{where} has {len(classes)} class names, but labels from {labels.min()} to {labels.max()}: "
            f"{int(wrong.sum())} labels have no class"
        )


def _class_names(root: Path, labels: np.ndarray) -> list[str]:
    """Lines of classes.txt, or the numbers up to the greatest label."""
    listing = root / "classes.txt"
    if listing.is_file():
        return [line.split("\t")[0].strip() for line in listing.read_text().splitlines() if line.strip()]
    return [str(k) for k in range(int(labels.max()) + 1)]


def class_words(root: Path | str) -> dict[str, str]:
    """Class -> the first of its names, from the lines `class<TAB>names with commas between them` of classes.txt."""
    listing = Path(root) / "classes.txt"
    if not listing.is_file():
        return {}
    pairs = (line.split("\t", 1) for line in listing.read_text().splitlines() if "\t" in line)
    return {key.strip(): names.split(",")[0].strip() for key, names in pairs}


def _decode(data: Any) -> Image:
    from PIL import Image

    with Image.open(data) as image:
        return image.convert("RGB")  # grey, palette and transparent ones too


class ClassFolders(Source):
    """One folder a class, images at any depth in it; classes in the order of their names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        if not self.classes:
            raise ValueError(f"{root} holds no class folders: put the images in {root}/CLASS/")
        self.files: list[Path] = []
        labels = []
        for label, name in enumerate(self.classes):
            found = sorted(p for p in (root / name).rglob("*") if p.suffix.lower() in IMAGE_ENDINGS)
            if not found:
                raise ValueError(f"the class folder {root / name} holds no images ({', '.join(IMAGE_ENDINGS)})")
            self.files += found
            labels += [label] * len(found)
        self.labels = np.array(labels)

    def name(self, index: int) -> str:
        return str(self.files[index])

    def read(self, index: int) -> Image:
        return _decode(self.files[index])


class Parquet(Source):
    """Hugging Face's columns: image (a struct of bytes and path) and label. Row groups are the blocks."""

    KEPT_BLOCKS = 16  # row groups in memory, in each process that reads

    def __init__(self, files: Sequence[Path], root: Path) -> None:
        try:
            import pyarrow.parquet as pq
        except ImportError:
            raise ValueError(
                "parquet files need pyarrow, which is not installed: pip install 'sima-attn[train]'"
            ) from None
        self.files = list(files)
        self.groups: list[tuple[int, int]] = []  # (file, row group) of each block
        self.blocks = []
        labels, names = [], None
        for i, path in enumerate(self.files):
            file = pq.ParquetFile(path)
            missing = {"image", "label"} - set(file.schema_arrow.names)
            if missing:
                raise ValueError(
                    f"{path} has no column {' or '.join(sorted(missing))}; it has {file.schema_arrow.names}"
                )
            names = names or _names_in_metadata(file.schema_arrow.metadata)
            labels.append(file.read(columns=["label"])["label"].to_numpy())
            for group in range(file.metadata.num_row_groups):
                self.groups.append((i, group))
                self.blocks.append(file.metadata.row_group(group).num_rows)
        self.labels = np.concatenate(labels).astype(np.int64)
        if not len(self.labels):
            raise ValueError(f"there are no rows in {', '.join(map(str, files))}")
        self.classes = names or _class_names(root, self.labels)
        _check_labels(self.labels, self.classes, str(root))
        self._starts = np.concatenate([[0], np.cumsum(self.blocks)])
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def _row(self, index: int) -> tuple[int, int]:
        block = int(np.searchsorted(self._starts, index, side="right")) - 1
        return block, index - int(self._starts[block])

    def name(self, index: int) -> str:
        block, row = self._row(index)
        file, group = self.groups[block]
        return f"{self.files[file]}, row group {group}, row {row}"

    def read(self, index: int) -> Image:
        import pyarrow.parquet as pq

        block, row = self._row(index)
        if block not in self._kept:
            file, group = self.groups[block]
            self._kept[block] = pq.ParquetFile(self.files[file]).read_row_group(
                group, columns=["image"], use_threads=False
            )["image"]
            if len(self._kept) > self.KEPT_BLOCKS:
                self._kept.popitem(last=False)
        return _decode(io.BytesIO(self._kept[block][row].as_py()["bytes"]))


def _names_in_metadata(metadata: dict[bytes, bytes] | None) -> list[str] | None:
    text = (metadata or {}).get(b"huggingface")
    return json.loads(text)["info"]["features"].get("label", {}).get("names") if text else None


class TarShards(Source):
    """webdataset shards, read in place: nothing is unpacked, so the data may be larger than the disk.

    Opening walks the headers once and keeps where each image lies; a read is then one seek. Shards are the
    blocks: an epoch goes through a few of them at a time. Labels are members NAME.cls (a number) or NAME.json
    ({"label": number}); class names are the lines of classes.txt beside the shards, where there is one.
    """

    def __init__(self, files: Sequence[Path], root: Path) -> None:
        self.files = list(files)
        self.blocks = []
        self.members: list[tuple[int, str, int, int]] = []  # shard, name, offset, size
        labels: list[int] = []
        for i, path in enumerate(self.files):
            before = len(labels)
            try:
                with tarfile.open(path) as shard:
                    self._index(i, shard, labels)
            except tarfile.TarError as error:
                raise ValueError(f"{path} is no readable tar file: {error}") from None
            self.blocks.append(len(labels) - before)
        if not labels:
            raise ValueError(
                f"there are no images with labels (NAME.jpg with NAME.cls) in {_few([str(f) for f in files])}"
            )
        self.labels = np.array(labels)
        self.classes = _class_names(root, self.labels)
        _check_labels(self.labels, self.classes, str(root))

    def _index(self, i: int, shard: tarfile.TarFile, labels: list[int]) -> None:
        found: dict[str, dict[str, Any]] = {}
        for member in shard:
            folder, _, base = member.name.rpartition("/")
            stem, _, ending = base.partition(".")  # webdataset's rule: the key ends at the first dot
            sample = found.setdefault(f"{folder}/{stem}", {})
            if f".{ending.lower()}" in IMAGE_ENDINGS:
                sample["image"] = (i, member.name, member.offset_data, member.size)
            elif ending in ("cls", "json"):
                text = shard.extractfile(member).read()  # type: ignore[union-attr]
                sample["label"] = _label(text, ending, f"{member.name} in {self.files[i]}")
        for key, sample in found.items():
            if "image" not in sample:
                continue
            if "label" not in sample:
                raise ValueError(
                    f"{key.lstrip('/')} in {self.files[i]} has no label: a member .cls or .json is missing"
                )
            self.members.append(sample["image"])
            labels.append(sample["label"])

    def name(self, index: int) -> str:
        shard, name, _, _ = self.members[index]
        return f"{name} in {self.files[shard]}"

    def read(self, index: int) -> Image:
        shard, _, offset, size = self.members[index]
        with open(self.files[shard], "rb") as file:
            file.seek(offset)
            return _decode(io.BytesIO(file.read(size)))


def _label(text: bytes, ending: str, where: str) -> int:
    try:
        return int(text) if ending == "cls" else int(json.loads(text)["label"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where} holds no label: {text[:40]!r}; a number is needed") from None


class Digits(Source):
    """scikit-learn's digits, 8 x 8, in RGB; every fifth sample of each class is val."""

    def __init__(self, split: str) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise ValueError(
                "the digits need scikit-learn, which is not installed: pip install 'sima-attn[data]'"
            ) from None
        images, labels = load_digits(return_X_y=True)
        rank = np.empty(len(labels), dtype=int)  # of each sample within its class
        for label in range(10):
            mine = np.flatnonzero(labels == label)
            rank[mine] = np.arange(len(mine))
        chosen = np.flatnonzero((rank % 5 == 4) == (split == "val"))
        self.images = (images[chosen] * (255 / 16)).round().astype(np.uint8).reshape(-1, 8, 8)
        self.labels = labels[chosen].astype(np.int64)
        self.classes = [str(k) for k in range(10)]

    def name(self, index: int) -> str:
        return f"digit {index}"

    def read(self, index: int) -> Image:
        from PIL import Image

        return Image.fromarray(self.images[index]).convert("RGB")
