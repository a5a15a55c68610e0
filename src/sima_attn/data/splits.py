"""A data folder -> the images of its splits: finding their files, and holding out a part as val."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sima_attn.data.sources import ClassFolders, Digits, Parquet, Source, Subset, TarShards

if TYPE_CHECKING:
    from sima_attn.data.settings import Data

# Names of the folders and files of each split, in the order in which they are looked for.
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "test", "testing"),
    "test": ("test", "testing"),
}

DEFAULT_VAL = 0.2  # the part of each class that is held out where there are no val images


def open_data(path: str | Path, split: str = "train", *, labeled: bool = True) -> Source:
    """The images of a split ("train", "val" or "test"); the format is detected from the files.

    - "digits": scikit-learn's 1797 digits; a fifth of them is val.
    - `train/CLASS/*.jpg`, `val/CLASS/*.jpg`: class folders.
    - `train-*.parquet`, `val-*.parquet` (or inside folders train, val): Hugging Face's image and label columns.
    - `train-*.tar`, `val-*.tar` (or inside folders): webdataset shards with members NAME.jpg and NAME.cls.

    val may also be named validation, valid, test or testing, and folders in any case. With labeled=False, for
    self-supervised learning, labels are optional: images directly in train/, no label column, no .cls members. Then
    there are no classes, and all labels are 0.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be 'train', 'val' or 'test', got {split!r}")
    if str(path) == "digits":
        return Digits(split)
    root = _folder(path)
    files = _files_of(root, split, labeled)
    if files is None:
        hint = f"put them into {root}/{split}/CLASS/"
        if split != "test":
            hint += "; `sima train` and `sima finetune` hold out a part of train/CLASS/ or CLASS/ with --val 0.2"
        raise FileNotFoundError(
            f"{root} has no {split} images: neither a folder {split}/ with one folder per class, nor "
            f"{split}-*.parquet, nor {split}-*.tar; {hint}"
        )
    return _opened(files, root)


def _opened(files: SplitFiles, root: Path) -> Source:
    """The images; the error says so where they have boxes instead of classes."""
    try:
        return files.open()
    except ValueError as error:
        if hint := _hint_of_boxes(root):
            raise ValueError(f"{error}{hint}") from None
        raise


def _hint_of_boxes(root: Path) -> str:
    """What to use for the images in a folder where it has annotations of boxes; empty where it has none."""
    found = [*root.glob("*.yaml"), *root.glob("*.yml"), *root.glob("*.json"), *root.glob("*/*.json")]
    if not found:
        return ""
    return f". {found[0].relative_to(root)} looks like annotations of boxes: for these, use `sima detect train`"


def check_classes(source: Source, path: str | Path) -> None:
    """Raise if a classifier cannot be trained on the images of `path`, because they are of one class."""
    if len(source.classes) < 2:
        raise ValueError(
            f"{path} has one class ({source.classes[0]}), and a classifier needs at least two: put the images of each "
            f"class into a folder of its own{_hint_of_boxes(Path(path))}"
        )


def _folder(path: str | Path) -> Path:
    root = Path(path)
    if not root.is_dir():
        what = "is a file; pass the folder that contains it" if root.exists() else "does not exist; set it with --data"
        raise FileNotFoundError(f"the data folder {root} {what} (or use 'digits', which needs no files)")
    return root


class SplitFiles(NamedTuple):
    """Where the images of a split lie, for messages, and how to open them."""

    place: str
    make: Callable[[], Source]

    def open(self) -> Source:
        """The images."""
        source = self.make()
        source.place = self.place
        return source


def _files_of(root: Path, split: str, labeled: bool = True) -> SplitFiles | None:
    """The files of a split; None where the folder has none."""
    with os.scandir(root) as listing:  # sorted: train comes after Train, and is taken if there are both
        folders = {name.lower(): root / name for name in sorted(entry.name for entry in listing if entry.is_dir())}
    for alias in SPLITS[split]:
        folder = folders.get(alias)
        for ending, kind in ((".parquet", Parquet), (".tar", TarShards)):
            files = sorted([*root.glob(f"{alias}[-_.]*{ending}"), *root.glob(f"{alias}{ending}")])
            files = files or (sorted(folder.glob(f"*{ending}")) if folder else [])
            if files:
                return SplitFiles(_range_of(files, root), partial(kind, files, root, labeled))
        if folder:
            return SplitFiles(f"{folder.name}/", partial(ClassFolders, folder, labeled))
    return None


def _range_of(files: Sequence[Path], root: Path) -> str:
    """The name of a file, or those of the first and the last one."""
    names = [str(path.relative_to(root)) for path in files]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def whole_folder(path: str | Path, *, labeled: bool = True) -> Source:
    """The train images or, in a folder without splits, all images."""
    root = _folder(path)
    files = _files_of(root, "train", labeled)
    return _opened(files or SplitFiles(f"{root.name}/", partial(ClassFolders, root, labeled)), root)


def has_val_images(path: str | Path) -> bool:
    """Whether the data have val images of their own."""
    return str(path) == "digits" or _files_of(_folder(path), "val") is not None


def default_val(path: str | Path) -> float | None:
    """The part of each class to hold out as val images if no other is given: none if the data have val images."""
    return None if has_val_images(path) else DEFAULT_VAL


def with_val_images(data: Data) -> tuple[Data, list[str]]:
    """The settings with a part of each class held out where there are no val images, and what to print about it."""
    part = default_val(data.path) if data.val is None else None
    if part is None:
        return data, []
    return replace(data, val=part), [f"{data.path} has no val images: {part:.0%} of each class are held out (--val)"]


def open_split(data: Data, split: str) -> Source:
    """The images of a split, as the settings say: with `data.val`, that part of each class is held out as val.

    These are parts of the train images, or of `CLASS/*.jpg` in a folder without any split.
    """
    if data.val is None or split == "test":
        return open_data(data.path, split)
    if has_val_images(data.path):
        raise ValueError(
            f"{data.path} has val images of its own, and data.val={data.val} would hold out others; omit it"
        )
    whole = whole_folder(data.path)
    held_out = held_out_indices(whole, data.val, data.split_seed)
    if split != "val":
        return Subset(whole, np.setdiff1d(np.arange(len(whole)), held_out), whole.place)
    return Subset(whole, held_out, f"{whole.place}, {data.val:.0%} of each class")


def open_trained_split(data: Data, split: str, path: str | Path | None = None) -> Source:
    """The images of a split of the data of a run, or of other data; held out as in the run if they have no val images.

    Data that were moved are other data, and have the same images held out.
    """
    where = data.path if path is None else str(path)
    return open_split(replace(data, path=where, val=None if has_val_images(where) else data.val), split)


def held_out_indices(source: Source, part: float, seed: int) -> np.ndarray:
    """Indices of a part of the images of each class, sorted: at least one image, and not all of them."""
    held_out = []
    for label, name in enumerate(source.classes):
        images = np.flatnonzero(source.labels == label)
        if len(images) < 2:
            raise ValueError(
                f"the class {name} has {len(images)} images: at least 2 are needed to hold out a part of them; add "
                "images, or remove the class"
            )
        count = min(max(1, round(part * len(images))), len(images) - 1)
        held_out.append(np.random.default_rng([seed, label]).permutation(images)[:count])
    return np.sort(np.concatenate(held_out))
