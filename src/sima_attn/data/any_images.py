"""Images whose labels are optional: those of a split in any format, or all images of a folder."""

from sima_attn.data.sources import Source
from sima_attn.data.splits import open_data, whole_folder

REQUIRED, OPTIONAL, NONE = ("required", "optional", "none")


def open_any(path: str, split: str = "train", *, labels: str = OPTIONAL) -> Source:
    """The images of a split; "train" are all images in a folder without splits.

    Args:
        labels: "required" raises where there are no usable ones, "optional" then opens the images without labels, and
            "none" always does.
    """
    if labels != NONE:
        try:
            return _open(path, split, labeled=True)
        except ValueError:
            if labels == REQUIRED:
                raise
    return _open(path, split, labeled=False)


def _open(path: str, split: str, *, labeled: bool) -> Source:
    if path == "digits" or split != "train":
        return open_data(path, split, labeled=labeled)
    return whole_folder(path, labeled=labeled)
