"""`sima heatmap` and `sima explain`: what a model looks at, in pictures and numbers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from sima_attn._devices import resolve_device
from sima_attn.cli import _options as option
from sima_attn.cli._next import after_heatmap, say_next
from sima_attn.cli._shared import console, note, print_table, progress_bar, teller
from sima_attn.data.images import check_not_over, find_photos, open_photo, open_photos, unique_name
from sima_attn.report.figures import check_can_plot
from sima_attn.report.rows import write_rows
from sima_attn.report.tables import TextTable

if TYPE_CHECKING:
    from sima_attn.explain import PhotoModel

app = typer.Typer()
group = typer.Typer(help="Look inside a model: effect of one token, attention statistics, deletion test.")

Photos = Annotated[list[Path], Argument(metavar="PHOTO", help="Image files, or folders of them.")]
Compare = Annotated[list[str] | None, Option(help="A model to compare with; repeat for several.")]
SizeOption = Annotated[
    int | None,
    Option(help="Side in pixels; a photo enters with the area of that square.", show_default="as trained", min=1),
]
LAYER = "A number from 0 (layer 1 in captions), or from the end if negative"
LayersOption = Annotated[str, Option(help=f"{LAYER}; or all.")]
PartsOption = Annotated[list[str] | None, Option(help="q (queries) or k (keys); repeat for both.", show_default="both")]


@app.command("heatmap")
def heatmap_command(
    photos: Photos,
    model: option.Model = None,
    compare: Compare = None,
    layer: LayersOption = "-1",
    of: PartsOption = None,
    out: Annotated[Path, option.file_or_folder("png", "Folder for the pictures, or PNG file for one photo.")] = Path(
        "runs/heatmaps"
    ),
    size: SizeOption = None,
    opacity: Annotated[float, Option(help="Opacity of the map over the photo.", min=0.0, max=1.0)] = 0.55,
    cell: Annotated[int, Option(help="Side in pixels of a picture in the sheets.", min=80)] = 240,
    raw: Annotated[bool, Option("--raw", help="Write the token scores too (.npz).")] = False,
    device: option.Device = "auto",
) -> None:
    """Draw heat maps: the norms of the queries and keys over the photo."""
    layers = _layers(layer)
    files = find_photos(photos)
    one_file = out.suffix.lower() == ".png"
    if one_file:
        check_not_over(files, out)
        if len(files) > 1 or raw:
            why = "--raw writes a second one" if raw else f"there are {len(files)} photos"
            raise ValueError(f"--out {out} names one file, and {why}: give a folder")
    loaded = load_models([model, *(compare or [])], device)
    from sima_attn.explain.gallery import Gallery

    gallery = Gallery(loaded, layers, of or ("q", "k"), size, opacity, cell)
    if one_file:
        _say_written([gallery.write_one(open_photo(files[0]), files[0].stem, out)])
        say_next(after_heatmap(files[0], model, layer))
        return
    with progress_bar() as progress:
        task = progress.add_task("reading", total=len(files))
        written = gallery.write(
            files,
            out,
            raw=raw,
            say=teller(progress.console),
            on_photo=lambda path: progress.update(task, advance=1, description=path.name),
        )
    _say_written(written)
    readable, _ = next(open_photos(files, say=lambda line: None))
    say_next(after_heatmap(readable, model, layer))


@group.command("effect")
def effect_command(
    photo: Annotated[Path, Argument(help="An image file.")],
    patch: Annotated[str, Option(metavar="ROW,COLUMN", help="The patch, counted from 0,0 at the top left.")],
    model: option.Model = None,
    compare: Compare = None,
    layer: Annotated[int, Option(help=f"{LAYER}.")] = -1,
    out: Annotated[
        Path | None, option.file("png", "The picture.", only=True, show_default="runs/heatmaps/PHOTO_effect.png")
    ] = None,
    size: SizeOption = None,
    cell: Annotated[int, Option(help="Side in pixels of a picture.", min=80)] = 420,
    device: option.Device = "auto",
) -> None:
    """Draw the contribution of every patch to one patch: red is positive, blue is negative."""
    place = _patch(patch)
    loaded = load_models([model, *(compare or [])], device)
    from sima_attn.explain.gallery import write_effect

    target = out or Path("runs/heatmaps") / f"{photo.stem}_effect.png"
    _say_written([write_effect(loaded, photo, target, patch=place, layer=layer, size=size, cell=cell)])


@group.command("statistics")
def statistics_command(
    photos: Photos,
    model: option.Model = None,
    compare: Compare = None,
    out: Annotated[Path, option.folder("Folder for the rows and the plot.")] = Path("runs/attention"),
    size: SizeOption = None,
    device: option.Device = "auto",
) -> None:
    """Per layer, the share of negative attention entries and of the largest channel."""
    check_can_plot()
    loaded = load_models([model, *(compare or [])], device)
    from sima_attn.explain.effects import AttentionRow, attention_statistics
    from sima_attn.explain.figures import plot_statistics

    files = find_photos(photos)
    rows: list[AttentionRow] = []
    names: list[str] = []
    with progress_bar() as progress:
        task = progress.add_task("reading", total=len(files) * len(loaded))
        for one in loaded:
            say = (lambda line: None) if rows else teller(progress.console)  # report broken photos once
            opened = open_photos(files, say=say, on_photo=lambda path: progress.advance(task))
            readings = (one.read(photo, size) for _, photo in opened)
            rows += attention_statistics(readings, unique_name(one.name, names))
    write_rows(out / "statistics.csv", rows)
    plot_statistics(rows, out / "statistics.png")
    header = ["model", "layer", "negative", "largest channel", "1/D"]
    lines = [
        [r.model, str(r.layer + 1), f"{r.negative_share:.1%}", f"{r.largest_channel_share:.1%}", f"{1 / r.D:.1%}"]
        for r in rows
    ]
    print_table(TextTable(header, lines), title=f"attention over {rows[0].images} photos")
    _say_written([out / "statistics.csv", out / "statistics.png"])


@group.command("deletion")
def deletion_command(
    data: Annotated[str, Option(help="Folder of the images, or digits; their val split is used.")],
    model: option.Model = None,
    images: Annotated[int, Option(help="How many images.", min=1)] = 200,
    of: PartsOption = None,
    layer: LayersOption = "-1",
    steps: Annotated[int, Option(help="From no patch hidden to all.", min=1)] = 10,
    batch: option.BatchSize = 32,
    out: Annotated[Path, option.folder("Folder for the rows and the curve.")] = Path("runs/deletion"),
    device: option.Device = "auto",
) -> None:
    """Deletion test: hide the highest, lowest or random patches and measure the right class."""
    check_can_plot()
    layers = _layers(layer)
    (loaded,) = load_models([model], device)
    from sima_attn.explain.deletion import deletion_test, validation_batches
    from sima_attn.explain.figures import plot_deletion
    from sima_attn.explain.reading import PARTS, read_attention

    parts = of or PARTS
    with progress_bar() as progress:
        task = progress.add_task("opening the data", total=None)
        batches = validation_batches(loaded, data, images=images, batch=batch, say=teller(progress.console))
        maps = len(parts) * (len(read_attention(loaded.model, batches[0][0][:1]).layers) if layers is None else 1)
        progress.update(task, description="hiding patches", total=maps * sum(len(labels) for _, labels in batches))
        rows = deletion_test(
            loaded.model,
            batches,
            of=parts,
            layers=layers,
            steps=steps,
            name=loaded.name,
            on_map=lambda count: progress.advance(task, count),
        )
    write_rows(out / "deletion.csv", rows)
    plot_deletion(rows, out / "deletion.png")
    lines = [
        [f"{r.of}, layer {r.layer + 1}", r.mode, r.order, f"{r.area:.3f}", f"{r.over_random:+.3f} ± {r.error:.3f}"]
        for r in rows
        if r.fraction == 0
    ]
    print_table(
        TextTable(["map", "mode", "order", "area", "over random"], lines),
        title=f"mean probability of the right class, {rows[0].images} images",
        caption="deletion: lower falls faster; insertion: higher rises faster; ± is one standard error",
    )
    _say_written([out / "deletion.csv", out / "deletion.png"])


def load_models(models: list[str | None], device: str) -> list["PhotoModel"]:
    """Load the models by name, run or file; warns about a model without trained weights."""
    with Console(stderr=True).status("loading"):
        from sima_attn.explain.photo_model import UNTRAINED, load_photo_model

        device = resolve_device(device)
        loaded = [load_photo_model(name, device=device) for name in models]
    for one in loaded:
        if not one.trained:
            note(f"{one.name} {UNTRAINED}")
    return loaded


def _layers(text: str) -> list[int] | None:
    try:
        return None if text == "all" else [int(text)]
    except ValueError:
        raise ValueError(f"--layer is a whole number or all, got {text!r}") from None


def _patch(text: str) -> tuple[int, int]:
    try:
        row, column = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--patch is ROW,COLUMN, two whole numbers such as 3,5, got {text!r}") from None
    return row, column


def _say_written(paths: list[Path]) -> None:
    for path in paths[-6:]:
        console.print(f"Written: {path}")
    if len(paths) > 6:
        console.print(f"and {len(paths) - 6} more in the same folder")
