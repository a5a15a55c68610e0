"""A folder -> the annotations and the images of one of its splits, as labeling tools write them.

COCO files in the folder, in annotations/ or beside the images (Roboflow: train/_annotations.coco.json), or YOLO labels
with a data.yaml. What was found is reported in one line. Where several files fit, none is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sima_attn.data.sources import few_of
from sima_attn.data.splits import SPLITS
from sima_attn.detect.coco import CocoData, read_json
from sima_attn.detect.yolo import WITHOUT_VAL, find_yaml, image_files, read_yolo

LOOKED_AT = 100  # images whose folder is looked for
LAYOUTS = (
    "COCO files such as annotations/instances_train.json, train/_annotations.coco.json or train.json, or a data.yaml "
    "with YOLO labels"
)


def open_split(
    path: str | Path,
    split: str,
    say: Callable[[str], None] = print,
    counter: Callable[[str], Callable[[int, int], None]] = lambda what: lambda done, total: None,
    *,
    masks: bool | None = True,
) -> CocoData:
    """The images of a split and their objects.

    Args:
        path: The folder.
        split: "train", "val" (or validation, valid, and test without any of them), another word in the names of its
            files, or the path of a COCO file in the folder.
        say: Gets a line on what was found, and a line for each reason to skip records.
        counter: Makes a progress bar, a function of (done, total), for reading YOLO labels and the sizes of images.
        masks: Read masks where the annotations have any, with None where at least half of them do; otherwise their
            boxes only.
    """
    root = Path(path)
    yaml, file, word = _annotations_of(root, split)
    if file is None:
        assert yaml is not None  # or there is no annotation at all, which is an error
        content, folder, skipped = read_yolo(yaml, split, counter(f"reading the labels of {split}"))
        data = CocoData.from_content(content, yaml, folder, say, masks=masks, skipped=skipped)
    else:
        content = read_json(file)
        folder = _image_folder(root, file, word, [str(image.get("file_name")) for image in content["images"]])
        data = CocoData.from_content(content, file, folder, say, masks=masks)
    say(f"{split}: {data.summary()} in {_shown(data.file, root)}, images in {_shown(data.folder, root)}")
    return data


def count_images(path: str | Path, split: str) -> int:
    """Number of images in the annotations of a split, before any is skipped."""
    yaml, file, _ = _annotations_of(Path(path), split)
    if file is None:
        assert yaml is not None  # or there is no annotation at all, which is an error
        return len(image_files(yaml, split))
    return len(read_json(file)["images"])


def _annotations_of(root: Path, split: str) -> tuple[Path | None, Path | None, str]:
    """(the data.yaml, the COCO file of a split, the word that its images' folder may have as its name)."""
    if root.is_file():
        raise NotADirectoryError(f"{root} is a file; give the folder of the images with --data: {root.parent}")
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; give the folder of the images with --data")
    yaml = None if split.endswith(".json") else find_yaml(root)
    return yaml, *_coco_file(root, split, yaml)


def _coco_file(root: Path, split: str, yaml: Path | None) -> tuple[Path | None, str]:
    """The COCO file of a split and the word that its images' folder may have as its name; None: use the data.yaml."""
    if split.endswith(".json"):
        return root / split, _own_word(root / split)
    files = sorted([*root.glob("*.json"), *root.glob("*/*.json")])
    for word in SPLITS.get(split, (split,)):
        found = [file for file in files if _is_of(word, file, root)]
        # COCO itself has captions_ and person_keypoints_ beside instances_.
        found = [file for file in found if file.name.startswith("instances_")] or found
        if len(found) > 1 or (found and yaml):
            listed = ", ".join(_shown(one, root) for one in (*found, *([yaml] if yaml else [])))
            raise ValueError(
                f"{root} has several annotations for the split {split!r}: {listed}. Move others elsewhere, or give "
                "a COCO file as the split: data.train_split and data.eval_split of `sima detect train --set`, or "
                f"`sima detect eval --split {_shown(found[0], root)}`"
            )
        if found:
            return found[0], word
    if yaml:
        return None, ""
    listed = few_of([_shown(file, root) for file in files])
    setting, hint = ("data.eval_split", WITHOUT_VAL) if split == "val" else ("data.train_split", "")
    raise FileNotFoundError(
        f"{root} has no annotations for the split {split!r}. It needs {LAYOUTS}. A COCO file of another name can be "
        f"given as the split, e.g. --set {setting}=FILE; the JSON files here: {listed or 'none'}{hint}"
    )


def _is_of(word: str, file: Path, root: Path) -> bool:
    """Whether the name of a file, or of its folder, has the word, alone or with a year: instances_train2017.json."""
    names = [file.stem] if file.parent == root else [file.stem, file.parent.name]
    return any(re.search(rf"(?<![a-z]){re.escape(word)}\d*(?![a-z])", name.lower()) for name in names)


def _own_word(file: Path) -> str:
    """What comes after "instances_": CVAT writes annotations/instances_default.json and images/default/."""
    return file.stem.removeprefix("instances_")


def _image_folder(root: Path, file: Path, word: str, names: Sequence[str]) -> Path:
    """The folder of the images: one with the word as its name, or else that of the file, images/, or the root."""
    above = [folder for folder in (root, root / "images") if folder.is_dir()]
    named = [
        folder
        for parent in above
        for folder in sorted(parent.iterdir())
        if folder.is_dir() and re.fullmatch(rf"{re.escape(word)}\d*", folder.name.lower())
    ]
    named += [folder / "images" for folder in named]
    for folders in (named, [file.parent, root / "images", root]):
        found = _with_any(folders, names[:LOOKED_AT])
        if len(found) > 1:
            listed = ", ".join(_shown(folder, root) for folder in found)
            raise ValueError(
                f"{root}: images of {_shown(file, root)} are in several folders: {listed}. Move all but one elsewhere"
            )
        if found:
            return found[0]
    if not names:
        return root  # an error that the reader of the file reports
    tried = ", ".join(dict.fromkeys(_shown(folder, root) for folder in (*named, file.parent, root / "images", root)))
    raise FileNotFoundError(f"{root}: the first images of {file.name}, e.g. {names[0]}, are not in any of {tried}")


def _with_any(folders: Iterable[Path], names: Sequence[str]) -> list[Path]:
    """The folders with any of the images; a link to one of them is the same folder."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if any((folder / name).is_file() for name in names):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _shown(path: Path, root: Path) -> str:
    """A path as seen from the folder of the data."""
    if not path.is_relative_to(root):
        return str(path)
    shown = str(path.relative_to(root))
    return "the folder itself" if shown == "." else shown + "/" * path.is_dir()
