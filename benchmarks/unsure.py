"""From which probability on an answer of the shipped model is to be trusted, measured on photos of other classes.

    python benchmarks/unsure.py --known tiny-imagenet-100 --others imagenet-samples --more cifar10 --out unsure.csv

Known images are the val images of the model's classes; `--others` is a folder of photos named WNID_NAME.jpg, of which
those of its classes are left out; `--more` is labeled data of other classes, such as CIFAR-10, whose classes are near
some of the model's (cat, automobile). Three scores are compared. The threshold is chosen on `--others`, and with
`--store` written into the card of the model: `sima classify` and the pages then say "unsure" below it.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL.Image import Image
from safetensors.torch import load_file
from torch import Tensor

from sima_attn.cli._shared import progress_bar
from sima_attn.data.images import images_in, open_photo
from sima_attn.data.loader import evaluation_transform
from sima_attn.data.splits import open_data
from sima_attn.models.loading import DEFAULT, LoadedModel, load_model
from sima_attn.models.pretrained import read_card, save_shipped, weights_file
from sima_attn.report.rows import provenance_columns, write_rows
from sima_attn.report.tables import TextTable

BATCH = 64
REFUSED = [share / 100 for share in range(5, 100, 5)]  # of the known images; each gives a threshold
SCORES: dict[str, Callable[[Tensor], Tensor]] = {  # logits [n, K] -> [n], higher is surer
    "probability": lambda logits: logits.softmax(1).amax(1),
    "margin": lambda logits: logits.softmax(1).topk(2).values @ torch.tensor([1.0, -1.0]),
    "energy": lambda logits: logits.logsumexp(1),
}


@dataclass(frozen=True)
class UnsureRow:
    """What a threshold of a score accepts, in percent.

    Attributes:
        auroc: Probability that a known image has a higher score than a photo of `others`; the same for all thresholds.
        known, others, more: Images of these kinds that are accepted.
        top1: Accuracy on the accepted known images.
        gain: Share of the rightly classified known images that are accepted, minus `others`; highest where chosen.
    """

    model: str
    score: str
    auroc: float
    threshold: float
    known: float
    top1: float
    others: float
    more: float
    gain: float
    known_images: int
    other_images: int
    more_images: int
    device: str
    torch: str
    date: str


@torch.inference_mode()
def logits_of(loaded: LoadedModel, count: int, read: Callable[[int], Image], what: str) -> Tensor:
    """Logits [count, K] of images, prepared as `sima classify` does."""
    transform = evaluation_transform(loaded.preprocessing)
    with progress_bar() as bar:
        starts = bar.track(range(0, count, BATCH), description=what)
        batches = (torch.stack([transform(read(i)) for i in range(s, min(count, s + BATCH))]) for s in starts)
        return torch.cat([loaded.model(batch) for batch in batches])


def measure(loaded: LoadedModel, known: Tensor, labels: Tensor, others: Tensor, more: Tensor) -> list[UnsureRow]:
    """Rows of all scores and thresholds, from logits [n, K]."""
    right = known.argmax(1) == labels
    rows = []
    for name, score in SCORES.items():
        of_known, of_others, of_more = score(known), score(others), score(more)
        above = (of_known[:, None] > of_others).float().mean().item()
        for refused in REFUSED:
            threshold = of_known.quantile(refused).item()
            accepted = of_known >= threshold
            rows.append(
                UnsureRow(
                    model=loaded.name,
                    score=name,
                    auroc=round(above, 4),
                    threshold=round(threshold, 4),
                    known=_percent(accepted),
                    top1=_percent(right[accepted]),
                    others=_percent(of_others >= threshold),
                    more=_percent(of_more >= threshold),
                    gain=round(_percent(accepted[right]) - _percent(of_others >= threshold), 2),
                    known_images=len(known),
                    other_images=len(others),
                    more_images=len(more),
                    **provenance_columns("cpu"),
                )
            )
    return rows


def _percent(chosen: Tensor) -> float:
    return round(100 * chosen.float().mean().item(), 2)


def best(rows: Sequence[UnsureRow], score: str) -> UnsureRow:
    """The row with the largest gain of a score."""
    return max((row for row in rows if row.score == score), key=lambda row: row.gain)


def unsure_table(rows: Sequence[UnsureRow]) -> TextTable:
    """The best threshold of each score."""
    header = ["score", "AUROC", "threshold", "known accepted", "top-1 of these", "others accepted", "more accepted"]
    lines = [
        [row.score, f"{row.auroc:.3f}", f"{row.threshold:.2f}"]
        + [f"{value:.1f} %" for value in (row.known, row.top1, row.others, row.more)]
        for row in (best(rows, score) for score in SCORES)
    ]
    return TextTable(header, lines)


def store(name: str, threshold: float) -> None:
    """Write the threshold into the card of a shipped model; its weights stay as they are."""
    path = weights_file(name)
    save_shipped(load_file(path), name, replace(read_card(path), unsure_below=threshold))


def main(arguments: list[str] | None = None) -> None:
    """Measure, write rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", required=True, help="data with val images of the classes of the model")
    parser.add_argument("--others", type=Path, required=True, help="folder of photos named WNID_NAME.jpg")
    parser.add_argument("--more", required=True, help="data of other classes; its first 2000 val images are used")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/unsure.csv"), help="CSV file for the rows")
    parser.add_argument("--store", action="store_true", help="write the threshold into the card of the model")
    given = parser.parse_args(arguments)
    loaded = load_model(DEFAULT)
    known, more = open_data(given.known, "val"), open_data(given.more, "val")
    if known.classes != loaded.classes:
        raise ValueError(f"{given.known} does not have the classes of {loaded.name}")
    others = [path for path in images_in(given.others) if path.name.split("_")[0] not in known.classes]
    rows = measure(
        loaded,
        logits_of(loaded, len(known), known.read, "known images"),
        torch.as_tensor(known.labels),
        logits_of(loaded, len(others), lambda i: open_photo(others[i]), "photos of other classes"),
        logits_of(loaded, min(2000, len(more)), more.read, "more of other classes"),
    )
    write_rows(given.out, rows)
    print(unsure_table(rows).markdown())
    threshold = round(best(rows, "probability").threshold, 2)
    print(f"\nunsure below {threshold}\nRows: {given.out}")
    if given.store:
        store(loaded.name, threshold)


if __name__ == "__main__":
    main()
