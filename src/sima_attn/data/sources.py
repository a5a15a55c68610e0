"""Image sources: class folders, parquet files, tar shards, scikit-learn's digits. All are read by index.

Because a sample is identified by its index alone, shuffling, sharding and resuming work the same for each format and
need no reader state.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sima_attn._errors import check_installed
from sima_attn._install import install_command
from sima_attn.data.images import ENDINGS, images_in, is_hidden, read_image

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_UNLISTED_CLASSES = 100_000  # more are not numbers of classes but other ids; ImageNet-21k has 21,841 classes


class ImageSource(ABC):
    """Images by index.

    Attributes:
        blocks: Numbers of consecutive samples that are cheap to read together; None if the order does not matter.
    """

    blocks: list[int] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Number of images."""

    @abstractmethod
    def name(self, index: int) -> str:
        """The name of an image in messages."""

    @abstractmethod
    def read(self, index: int) -> Image:
        """The image, RGB and upright. Raises if it cannot be read; the message gives the reason without the name."""


class Source(ImageSource):
    """Images with one label each.

    Attributes:
        classes: Class names, in the order of the labels.
        labels: Labels of all samples [n].
        place: Where the images lie, for messages.
    """

    place: str = ""
    classes: list[str]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


class Subset(Source):
    """Some images of a source."""

    def __init__(self, source: Source, indices: np.ndarray, place: str = "") -> None:
        self.source, self.indices, self.place = source, indices, place
        self.classes, self.labels = source.classes, source.labels[indices]

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    def read(self, index: int) -> Image:
        return self.source.read(int(self.indices[index]))


def check_same_classes(train: Source, val: Source) -> None:
    """Raise ValueError unless both splits have the same classes in the same order."""
    check_same_names("train", train.classes, "val", val.classes)


def check_same_names(one: str | Path, names: Sequence[str], other: str | Path, others: Sequence[str]) -> None:
    """Raise ValueError unless two lists of classes, of `one` and of `other`, are the same."""
    if list(names) == list(others):
        return
    parts = []
    for place, mine, theirs in ((one, names, set(others)), (other, others, set(names))):
        only = [name for name in mine if name not in theirs]
        parts += [f"only in {place}: {few_of(only)}"] * bool(only)
    raise ValueError(
        f"the classes of {one} ({len(names)}) and {other} ({len(others)}) differ: "
        f"{'; '.join(parts) or 'the same names in another order'}. They must be the same"
    )


def few_of(names: Sequence[str]) -> str:
    """The first five names, and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _class_names(listed: list[str] | None, labels: np.ndarray, root: Path) -> list[str]:
    """The listed names, or the numbers up to the largest label. Raises if a label has no class."""
    if listed is None and labels.max() >= MAX_UNLISTED_CLASSES:
        raise ValueError(f"{root} has the label {labels.max()}: number the classes from 0, or list them in classes.txt")
    classes = [str(k) for k in range(labels.max() + 1)] if listed is None else listed
    wrong = (labels < 0) | (labels >= len(classes))
    if wrong.any():
        raise ValueError(
            f"{root} has {len(classes)} class names, but labels from {labels.min()} to {labels.max()}: "
            f"{wrong.sum()} labels have no class"
        )
    return classes


def _class_list(root: Path) -> list[tuple[str, str]]:
    """The lines of classes.txt, each split at its first tab into a class and its words."""
    listing = root / "classes.txt"
    lines = listing.read_text().splitlines() if listing.is_file() else []
    parts = (line.partition("\t") for line in lines if line.strip())
    return [(name.strip(), words.strip()) for name, _, words in parts]


def class_words(root: Path | str) -> dict[str, str]:
    """Class -> its first word, from the lines `class<TAB>word, word, ...` of classes.txt."""
    return {name: words.split(",")[0].strip() for name, words in _class_list(Path(root)) if words}


class ClassFolders(Source):
    """One folder per class, sorted by name, with images at any depth. Hidden files and folders are ignored.

    With labeled=False a folder of images, or one in which not every folder has images, has no classes.
    """

    def __init__(self, root: Path, labeled: bool = True) -> None:
        with os.scandir(root) as listing:
            names = sorted(entry.name for entry in listing if entry.is_dir() and not is_hidden(entry.name))
        images = {name: images_in(root / name, deep=True) for name in names}
        endings = f"({', '.join(ENDINGS)})"
        if labeled:
            if not names:
                raise ValueError(f"{root} contains no class folders: put the images in {root}/CLASS/")
            for name in names:
                if not images[name]:
                    raise ValueError(f"the class folder {root / name} contains no images {endings}")
        elif (loose := images_in(root)) or not all(images.values()):
            names, images = [], {"": sorted([*loose, *chain(*images.values())])}
        self.classes, self.files = names, list(chain(*images.values()))
        if not self.files:
            raise ValueError(f"{root} contains no images {endings}")
        self.labels = np.repeat(np.arange(len(images)), [len(found) for found in images.values()])

    def name(self, index: int) -> str:
        return str(self.files[index])

    def read(self, index: int) -> Image:
        return read_image(self.files[index])


class Parquet(Source):
    """Hugging Face's columns: image (a struct of bytes and path, or plain bytes) and label. Row groups are the blocks.

    Labels are numbers, or names of classes listed in the schema or in classes.txt. All lists must be the same.
    """

    KEPT_BLOCKS = 16  # row groups kept in memory, per process

    def __init__(self, files: Sequence[Path], root: Path, labeled: bool = True) -> None:
        check_installed("reading parquet files", "pyarrow", extra="train")
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.files = list(files)
        self.groups: list[tuple[int, int]] = []  # (file, row group) of each block
        self.blocks = []
        names = [name for name, _ in _class_list(root)] or None
        listing = root / "classes.txt"
        labels = []
        for i, path in enumerate(self.files):
            try:
                file = pq.ParquetFile(path)
                present, wanted = file.schema_arrow.names, ["image", "label"] if labeled else ["image"]
                if missing := [column for column in wanted if column not in present]:
                    raise ValueError(f"{path} has no column {missing[0]!r}; its columns are {present}")
                kind = str(file.schema_arrow.field("image").type)
                if not re.search(r"^(large_)?binary|bytes: (large_)?binary", kind):
                    raise ValueError(f"the column image of {path} must contain encoded images as bytes, got {kind}")
                if labeled:
                    found = _names_in_metadata(file.schema_arrow.metadata)
                    if names and found:
                        check_same_names(listing, names, path, found)
                    elif found:
                        names, listing = found, path
                    labels.append(_numbers(file.read(columns=["label"])["label"], names, path, root))
            except (pa.ArrowException, OSError, KeyError) as error:  # KeyError: a column that occurs twice
                raise ValueError(f"{path} is not a readable parquet file: {error}") from None
            for group in range(file.metadata.num_row_groups):
                self.groups.append((i, group))
                self.blocks.append(file.metadata.row_group(group).num_rows)
        if not sum(self.blocks):
            raise ValueError(f"there are no rows in {few_of([str(path) for path in files])}")
        self._starts = np.concatenate([[0], np.cumsum(self.blocks)])
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self.labels = np.concatenate(labels) if labeled else np.zeros(sum(self.blocks), dtype=np.int64)
        self.classes = _class_names(names, self.labels, root) if labeled else []

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
            table = pq.ParquetFile(self.files[file]).read_row_group(group, columns=["image"], use_threads=False)
            self._kept[block] = table["image"]
            if len(self._kept) > self.KEPT_BLOCKS:
                self._kept.popitem(last=False)
        cell = self._kept[block][row].as_py()
        return read_image(io.BytesIO(cell["bytes"] if isinstance(cell, dict) else cell))


def _numbers(column: Any, names: list[str] | None, path: Path, root: Path) -> np.ndarray:
    """A label column as numbers [n]; strings are looked up in the class names."""
    import pyarrow as pa

    if column.null_count:
        raise ValueError(f"{column.null_count} of {len(column)} rows of {path} have no label; remove them")
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return column.cast(pa.int64()).to_numpy()
    words = column.to_pylist()
    if names is None:
        raise ValueError(
            f"the column label of {path} contains strings ({few_of(sorted(set(words)))}), and there is no list of "
            f"classes; write the class names to {root / 'classes.txt'}, one per line"
        )
    known = {name: k for k, name in enumerate(names)}
    unknown = sorted(set(words) - known.keys())
    if unknown:
        raise ValueError(
            f"the column label of {path} contains strings that are not among the {len(names)} classes "
            f"({few_of(names)}): {few_of(unknown)}"
        )
    return np.array([known[word] for word in words], dtype=np.int64)


def _names_in_metadata(metadata: dict[bytes, bytes] | None) -> list[str] | None:
    """The class names in Hugging Face's metadata; None if there are none in that format."""
    try:
        names = json.loads((metadata or {})[b"huggingface"])["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError):  # missing, not a dict, not JSON
        return None
    return names if isinstance(names, list) and names and all(isinstance(name, str) for name in names) else None


class TarShards(Source):
    """webdataset shards, read in place without unpacking.

    Opening reads all headers once and stores the offset of each image; a read is then one seek. Shards are the blocks:
    an epoch goes through a few of them at a time. Labels are members NAME.cls (a number) or NAME.json
    ({"label": number}); class names are the lines of an optional classes.txt beside the shards.
    """

    def __init__(self, files: Sequence[Path], root: Path, labeled: bool = True) -> None:
        self.files, self.labeled = list(files), labeled
        self.blocks = []
        self.members: list[tuple[int, str, int, int]] = []  # shard, name, offset, size
        labels: list[int] = []
        for i, path in enumerate(self.files):
            before = len(labels)
            try:
                with tarfile.open(path, "r:") as shard:
                    self._index(i, shard, labels)
            except tarfile.TarError as error:
                raise ValueError(f"{path} is not a readable tar file, or it is compressed: {error}") from None
            self.blocks.append(len(labels) - before)
        if not labels:
            kind = "images with labels (NAME.jpg with NAME.cls)" if labeled else "images"
            raise ValueError(f"there are no {kind} in {few_of([str(f) for f in files])}")
        self.labels = np.array(labels)
        names = [name for name, _ in _class_list(root)] or None
        self.classes = _class_names(names, self.labels, root) if labeled else []

    def _index(self, i: int, shard: tarfile.TarFile, labels: list[int]) -> None:
        path = self.files[i]
        images: dict[str, tuple[int, str, int, int]] = {}
        found: dict[str, int] = {}  # labels
        others: dict[str, str] = {}  # links, and images like NAME.mask.png beside NAME.jpg
        for member in shard:
            folder, _, base = member.name.rpartition("/")
            stem, _, ending = base.partition(".")  # webdataset's rule: the key ends at the first dot
            if not stem or member.isdir():  # no stem: ._NAME.jpg of macOS
                continue
            key = f"{folder}/{stem}".lstrip("/")
            if member.isfile() and f".{ending.lower()}" in ENDINGS:
                if key in images:
                    raise ValueError(f"{member.name} in {path} is the second image of {key}; rename or remove it")
                images[key] = (i, member.name, member.offset_data, member.size)
            elif member.isfile() and ending in ("cls", "json") and self.labeled:
                where = f"{member.name} in {path}"
                found[key] = _label(shard.extractfile(member).read(), ending, where)  # type: ignore[union-attr]
            elif base.lower().endswith(ENDINGS):
                others[key] = member.name
        _check_end(shard, path)
        for key in others.keys() - images.keys():
            raise ValueError(
                f"{others[key]} in {path} is a link, or has dots in its name: the key of a sample ends at the first "
                f"dot, and {key} has no image; pack the file itself, or rename it"
            )
        if self.labeled and (missing := images.keys() - found.keys()):
            raise ValueError(f"{min(missing)} in {path} has no label: add a member .cls or .json")
        self.members += images.values()
        labels += [found.get(key, 0) for key in images]

    def name(self, index: int) -> str:
        shard, name, _, _ = self.members[index]
        return f"{name} in {self.files[shard]}"

    def read(self, index: int) -> Image:
        shard, _, offset, size = self.members[index]
        with open(self.files[shard], "rb") as file:
            file.seek(offset)
            return read_image(io.BytesIO(file.read(size)))


def _check_end(shard: tarfile.TarFile, path: Path) -> None:
    """Raise unless reading stopped at a block of zeros: tarfile also accepts a missing or partial header as the end."""
    with open(path, "rb") as file:
        file.seek(shard.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ValueError(
                f"{path} is cut off or damaged at byte {shard.offset}: there is neither a member nor the end of the "
                "archive; copy or pack it again"
            )


def _label(text: bytes, ending: str, where: str) -> int:
    try:
        return int(text) if ending == "cls" else int(json.loads(text)["label"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where} contains {text[:40]!r} instead of a label; it must be a whole number") from None


class Digits(Source):
    """scikit-learn's digits, 8 x 8, as RGB; every fifth sample of each class is val."""

    place = "scikit-learn's digits"

    def __init__(self, split: str) -> None:
        if split == "test":
            raise FileNotFoundError("the digits have train and val images, and no test images")
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise ValueError(f"the digits need scikit-learn: install it with {install_command('data')}") from None
        images, labels = load_digits(return_X_y=True)
        rank = np.array([np.count_nonzero(labels[:i] == label) for i, label in enumerate(labels)])  # within its class
        chosen = np.flatnonzero((rank % 5 == 4) == (split == "val"))
        self.images = (images[chosen] * (255 / 16)).round().astype(np.uint8).reshape(-1, 8, 8)
        self.labels = labels[chosen].astype(np.int64)
        self.classes = [str(k) for k in range(10)]

    def name(self, index: int) -> str:
        return f"digit {index}"

    def read(self, index: int) -> Image:
        from PIL import Image

        return Image.fromarray(self.images[index]).convert("RGB")
