"""Image sources: class folders, parquet files, tar shards, scikit-learn's digits. All are read by index.

Because a sample is identified by its index alone, shuffling, sharding and resuming work the same for each format and
need no reader state.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sima_attn.data.images import ENDINGS, images_in, is_hidden, read_image

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_UNLISTED_CLASSES = 100_000  # without class names; ImageNet-21k has 21,841 classes
SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test")}
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}  # by first bytes


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
    """

    classes: list[str]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def open_data(path: str | Path, split: str = "train", *, labelled: bool = True) -> Source:
    """The images of a split ("train" or "val"); the format is detected from the files.

    - "digits": scikit-learn's 1797 digits; a fifth of them is val.
    - `train/CLASS/*.jpg`, `val/CLASS/*.jpg`: class folders.
    - `train-*.parquet`, `val-*.parquet` (or inside folders train, val): Hugging Face's image and label columns.
    - `train-*.tar`, `val-*.tar` (or inside folders): webdataset shards with members NAME.jpg and NAME.cls.

    val may also be named validation, valid or test. With labelled=False, for self-supervised learning, labels are
    optional: images directly in train/, no label column, no .cls members. Then there are no classes, and all labels
    are 0.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'val', got {split!r}")
    if str(path) == "digits":
        return Digits(split)
    root = Path(path)
    if not root.is_dir():
        what = "is a file; pass the folder that contains it" if root.exists() else "does not exist; set it with --data"
        raise FileNotFoundError(f"the data folder {root} {what} (or use 'digits', which needs no files)")
    for alias in SPLITS[split]:
        for ending, kind in ((".parquet", Parquet), (".tar", TarShards)):
            files = sorted([*root.glob(f"{alias}[-_.]*{ending}"), *root.glob(f"{alias}{ending}")])
            files = files or sorted((root / alias).glob(f"*{ending}"))
            if files:
                _check_regular(files)
                return kind(files, root, labelled)
        if (root / alias).is_dir():
            return ClassFolders(root / alias, labelled)
    raise FileNotFoundError(
        f"{root} has no {split} images: neither a folder {split}/ with one folder per class, nor {split}-*.parquet, "
        f"nor {split}-*.tar"
    )


def _check_regular(files: Sequence[Path]) -> None:
    wrong = [path for path in files if not path.is_file()]
    if wrong:  # opening a pipe would block
        raise ValueError(f"{few_of([str(path) for path in wrong])}: not a regular file; remove or rename it")


def check_same_classes(train: Source, val: Source) -> None:
    """Raise ValueError unless both splits have the same classes in the same order."""
    _check_same_names("train", train.classes, "val", val.classes)


def _check_same_names(one: str | Path, names: list[str], other: str | Path, others: list[str]) -> None:
    if names == others:
        return
    parts = [f"{one} has {len(names)} classes, {other} {len(others)}"]
    for place, mine, theirs in ((one, names, set(others)), (other, others, set(names))):
        only = [name for name in mine if name not in theirs]
        parts += [f"only in {place}: {few_of(only)}"] * bool(only)
    if len(parts) == 1:
        parts.append("the same names in another order")
    raise ValueError(f"the classes of {one} and {other} differ: {'; '.join(parts)}; make them the same")


def few_of(names: Sequence[str]) -> str:
    """The first five names, and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _class_names(listed: list[str] | None, source: Source, root: Path) -> list[str]:
    """The listed names, or the numbers up to the largest label. Raises if a label has no class."""
    labels, last = source.labels, int(source.labels.max())
    if listed is None and last >= MAX_UNLISTED_CLASSES:
        raise ValueError(
            f"{source.name(int(labels.argmax()))} has the label {last}, and there are no class names. Number the "
            f"classes from 0 (up to {MAX_UNLISTED_CLASSES} are allowed), or list their names in {root / 'classes.txt'}"
        )
    classes = [str(k) for k in range(last + 1)] if listed is None else listed
    wrong = (labels < 0) | (labels >= len(classes))
    if wrong.any():
        raise ValueError(
            f"{root} has {len(classes)} class names, but labels from {labels.min()} to {last}: "
            f"{int(wrong.sum())} labels have no class"
        )
    return classes


def _listed_classes(root: Path) -> list[str] | None:
    """The names in classes.txt: each line up to its first tab."""
    listing = root / "classes.txt"
    if not listing.is_file():
        return None
    names = [line.split("\t")[0].strip() for line in listing.read_text().splitlines() if line.strip()]
    _check_once(names, listing)
    return names


def _check_once(names: Sequence[str], path: Path) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{path} lists classes more than once: {few_of(twice)}; rename or merge them")


def class_words(root: Path | str) -> dict[str, str]:
    """Class -> its first word, from the lines `class<TAB>word, word, ...` of classes.txt."""
    listing = Path(root) / "classes.txt"
    if not listing.is_file():
        return {}
    pairs = (line.split("\t", 1) for line in listing.read_text().splitlines() if "\t" in line)
    return {key.strip(): names.split(",")[0].strip() for key, names in pairs}


class ClassFolders(Source):
    """One folder per class, sorted by name, with images at any depth. Hidden files and folders are ignored."""

    def __init__(self, root: Path, labelled: bool = True) -> None:
        self.root = root
        with os.scandir(root) as listing:
            self.classes = sorted(entry.name for entry in listing if entry.is_dir() and not is_hidden(entry.name))
        self.files: list[Path] = []
        if not self.classes and not labelled:
            self.files = images_in(root)
        if not self.classes and not self.files:
            if not labelled:
                raise ValueError(f"{root} contains no images ({', '.join(ENDINGS)})")
            raise ValueError(f"{root} contains no class folders: put the images in {root}/CLASS/")
        labels = [0] * len(self.files)
        for label, name in enumerate(self.classes):
            found = images_in(root / name, deep=True)
            if not found:
                raise ValueError(f"the class folder {root / name} contains no images ({', '.join(ENDINGS)})")
            self.files += found
            labels += [label] * len(found)
        self.labels = np.array(labels)

    def name(self, index: int) -> str:
        return str(self.files[index])

    def read(self, index: int) -> Image:
        return read_image(self.files[index])


class Parquet(Source):
    """Hugging Face's columns: image (a struct of bytes and path, or plain bytes) and label. Row groups are the blocks.

    Labels are numbers, or names of classes listed in the schema or in classes.txt. All lists must be the same.
    """

    KEPT_BLOCKS = 16  # row groups kept in memory, per process

    def __init__(self, files: Sequence[Path], root: Path, labelled: bool = True) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise ValueError(
                "parquet files need pyarrow, which is not installed: pip install 'sima-attn[train]'"
            ) from None
        self.files = list(files)
        self.groups: list[tuple[int, int]] = []  # (file, row group) of each block
        self.blocks = []
        columns, listed = [], None
        for i, path in enumerate(self.files):
            try:
                file = pq.ParquetFile(path)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{path} is not a readable parquet file: {error}") from None
            for column in ["image", *(["label"] if labelled else [])]:
                _check_one_column(file.schema_arrow.names, column, path)
            _check_image_column(file.schema_arrow.field("image").type, path)
            if labelled:
                listed = _agreed(listed, _names_in_metadata(file.schema_arrow.metadata), path)
            try:
                columns += [file.read(columns=["label"])["label"]] if labelled else []
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"the labels in {path} cannot be read: {error}") from None
            for group in range(file.metadata.num_row_groups):
                self.groups.append((i, group))
                self.blocks.append(file.metadata.row_group(group).num_rows)
        if not sum(self.blocks):
            raise ValueError(f"there are no rows in {few_of([str(path) for path in files])}")
        self._starts = np.concatenate([[0], np.cumsum(self.blocks)])
        self._kept: OrderedDict[int, Any] = OrderedDict()
        if not labelled:
            self.labels, self.classes = np.zeros(sum(self.blocks), dtype=np.int64), []
            return
        listed = _agreed(listed, _listed_classes(root), root / "classes.txt")
        names = None if listed is None else listed[1]
        labels = [_numbers(column, names, path, root) for column, path in zip(columns, self.files, strict=True)]
        self.labels = np.concatenate(labels)
        self.classes = _class_names(names, self, root)

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
        cell = self._kept[block][row].as_py()
        return read_image(io.BytesIO(cell["bytes"] if isinstance(cell, dict) else cell))


def _check_one_column(names: list[str], column: str, path: Path) -> None:
    if column not in names:
        raise ValueError(f"{path} has no column {column!r}; its columns are {names}")
    if names.count(column) > 1:
        raise ValueError(f"{path} has {names.count(column)} columns {column!r}; rename or remove all but one")


def _check_image_column(kind: Any, path: Path) -> None:
    from pyarrow import types

    fields = [kind.field(i) for i in range(kind.num_fields)] if types.is_struct(kind) else []
    twice = [name for name, count in Counter(field.name for field in fields).items() if count > 1]
    if twice:  # pyarrow cannot convert such a struct to a dict
        raise ValueError(f"the column image of {path} has several fields {few_of(twice)}; rename or remove all but one")
    stored = next((field.type for field in fields if field.name == "bytes"), kind)
    if not (types.is_binary(stored) or types.is_large_binary(stored)):
        raise ValueError(
            f"the column image of {path} has the type {kind}; it must contain encoded images, as binary or as a struct "
            "with a binary field 'bytes'"
        )


def _numbers(column: Any, names: list[str] | None, path: Path, root: Path) -> np.ndarray:
    """A label column as numbers [n]; strings are looked up in the class names."""
    import pyarrow as pa

    if column.null_count:
        raise ValueError(f"{column.null_count} of {len(column)} rows of {path} have no label; remove them")
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        try:
            return column.cast(pa.int64()).to_numpy()
        except pa.ArrowException:  # fractions, lists
            raise ValueError(
                f"the column label of {path} has the type {column.type}; it must contain class numbers or class names"
            ) from None
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


def _agreed(
    listed: tuple[Path, list[str]] | None, names: list[str] | None, path: Path
) -> tuple[Path, list[str]] | None:
    """The first file that lists classes, and its list; raises if `path` lists different classes."""
    if names is None:
        return listed
    _check_once(names, path)
    if listed is not None:
        _check_same_names(*listed, path, names)
    return listed or (path, names)


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

    def __init__(self, files: Sequence[Path], root: Path, labelled: bool = True) -> None:
        self.files, self.labelled = list(files), labelled
        self.blocks = []
        self.members: list[tuple[int, str, int, int]] = []  # shard, name, offset, size
        labels: list[int] = []
        for i, path in enumerate(self.files):
            before = len(labels)
            try:
                with tarfile.open(path, "r:") as shard:
                    self._index(i, shard, labels)
            except tarfile.TarError as error:
                packed = _compression(path)
                if packed:
                    raise ValueError(
                        f"{path} is compressed ({packed}); images are read in place, which needs a plain tar file: "
                        "decompress it"
                    ) from None
                raise ValueError(f"{path} is not a readable tar file: {error}") from None
            self.blocks.append(len(labels) - before)
        if not labels:
            kind = "images with labels (NAME.jpg with NAME.cls)" if labelled else "images"
            raise ValueError(f"there are no {kind} in {few_of([str(f) for f in files])}")
        self.labels = np.array(labels)
        if not labelled:
            self.classes = []
            return
        self.classes = _class_names(_listed_classes(root), self, root)

    def _index(self, i: int, shard: tarfile.TarFile, labels: list[int]) -> None:
        found: dict[str, dict[str, Any]] = {}
        for member in shard:
            folder, _, base = member.name.rpartition("/")
            stem, _, ending = base.partition(".")  # webdataset's rule: the key ends at the first dot
            part = _part(ending, self.labelled)
            if part is None or not stem or not (member.isfile() or member.islnk() or member.issym()):
                continue  # no stem: ._NAME.jpg of macOS; not a file: a folder with such a name
            where = f"{member.name} in {self.files[i]}"
            sample = found.setdefault(f"{folder}/{stem}", {})
            if part == "more":
                sample[part] = where
                continue
            if part in sample:
                raise ValueError(
                    f"{where} is the second {part} of {stem}; a sample has one image and one label: rename or remove it"
                )
            if not member.isfile():
                raise ValueError(f"{where} is a link; images are read in place: pack the file itself")
            if part == "image":
                sample[part] = (i, member.name, member.offset_data, member.size)
            else:
                sample[part] = _label(shard.extractfile(member).read(), part, where)  # type: ignore[union-attr]
        _check_end(shard, self.files[i])
        for key, sample in found.items():
            key = key.lstrip("/")
            if "image" not in sample:
                if "more" in sample:
                    raise ValueError(
                        f"{sample['more']} has dots in its name: the key of a sample ends at the first dot, and {key} "
                        "has no image; rename it"
                    )
                continue
            given = {sample[part] for part in ("cls", "json") if part in sample}
            if self.labelled and not given:
                raise ValueError(f"{key} in {self.files[i]} has no label: add a member .cls or .json")
            if len(given) > 1:
                raise ValueError(f"{key} in {self.files[i]} has different labels in .cls and .json; remove one")
            self.members.append(sample["image"])
            labels.append(given.pop() if given else 0)

    def name(self, index: int) -> str:
        shard, name, _, _ = self.members[index]
        return f"{name} in {self.files[shard]}"

    def read(self, index: int) -> Image:
        shard, _, offset, size = self.members[index]
        with open(self.files[shard], "rb") as file:
            file.seek(offset)
            return read_image(io.BytesIO(file.read(size)))


def _part(ending: str, labelled: bool) -> str | None:
    """The role of a member in its sample: image, cls, json, more (NAME.mask.png beside NAME.jpg), or None."""
    if ending in ("cls", "json"):
        return ending if labelled else None
    _, dot, last = ending.lower().rpartition(".")
    return ("more" if dot else "image") if f".{last}" in ENDINGS else None


def _check_end(shard: tarfile.TarFile, path: Path) -> None:
    """Raise unless reading stopped at a block of zeros: tarfile also accepts a missing or partial header as the end."""
    with open(path, "rb") as file:
        file.seek(shard.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ValueError(
                f"{path} is cut off or damaged at byte {shard.offset}: there is neither a member nor the end of the "
                "archive; copy or pack it again"
            )


def _compression(path: Path) -> str | None:
    with open(path, "rb") as file:
        first = file.read(8)
    return next((name for start, name in COMPRESSED.items() if first.startswith(start)), None)


def _label(text: bytes, ending: str, where: str) -> int:
    try:
        return int(text) if ending == "cls" else int(json.loads(text)["label"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where} contains {text[:40]!r} instead of a label; it must be a whole number") from None


class Digits(Source):
    """scikit-learn's digits, 8 x 8, as RGB; every fifth sample of each class is val."""

    def __init__(self, split: str) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise ValueError(
                "the digits need scikit-learn, which is not installed: pip install 'sima-attn[data]'"
            ) from None
        images, labels = load_digits(return_X_y=True)
        rank = np.empty(len(labels), dtype=int)  # position of each sample within its class
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
