"""`sima features`: the final tokens of a model for an image of any size."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from sima_attn._devices import resolve_device
from sima_attn._errors import check_known
from sima_attn.cli import _options as option
from sima_attn.cli._shared import console, note, print_table
from sima_attn.report.progress import RunProgress
from sima_attn.report.tables import TextTable

if TYPE_CHECKING:
    from sima_attn.gigapixel import FeatureGrid
    from sima_attn.models.loading import LoadedModel

app = typer.Typer()

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
SHOWN_CLASSES = 5
MANY_TOKENS = 2  # times those of the training size, from which on the scale of SimA's output matters


@app.command("features")
def features_command(
    image: Annotated[Path, Argument(help="A TIFF, .npy or image file, or a folder of zarr.")],
    model: option.Model = None,
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="FILE.zarr or FILE.npy for the features.", show_default="runs/features/IMAGE.zarr"),
    ] = None,
    pictures: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Folder for heat maps of q and k and the features as colors.", file_okay=False),
    ] = None,
    weights: option.Weights = None,
    dtype: Annotated[str, Option(help="Of the features: float32 or float16.")] = "float32",
    precision: Annotated[str, Option(help="Of the model and its tokens: fp32 or bf16.")] = "fp32",
    token_ref: Annotated[
        str | None,
        Option(help="train: scale the attentions to the number of tokens in training.", show_default="as the model is"),
    ] = None,
    tile: Annotated[
        int | None, Option(help="Side of a tile in tokens.", show_default="64, on a GPU 256", min=1)
    ] = None,
    store: Annotated[
        str, Option(help="Where the tokens are between the blocks: auto, disk, memory or device.")
    ] = "auto",
    device: option.Device = "auto",
) -> None:
    """Compute the features of an image that does not fit in memory, tile by tile, as if it ran at once."""
    check_known("precision", precision, PRECISIONS)
    target = out or Path("runs/features") / f"{image.stem}.zarr"
    with Console(stderr=True).status("loading"):
        import torch

        from sima_attn.gigapixel import features
        from sima_attn.models.loading import load_model

        loaded = load_model(model, weights=weights, features=None, device=resolve_device(device))
    if not loaded.trained:
        note(f"{loaded.name} has no trained weights: its features are chance")
    with RunProgress() as progress:
        task = progress.bar.add_task("opening the image", total=None, facts="")

        def on_step(what: str, done: int, total: int) -> None:
            progress.bar.update(task, description=what, completed=done, total=total)

        try:
            done = features(
                loaded.model.to(getattr(torch, PRECISIONS[precision])),
                image,
                target,
                preprocessing=loaded.preprocessing,
                dtype=dtype,
                tile=tile,
                store=store,
                token_ref=token_ref,
                pictures=pictures,
                on_step=on_step,
            )
        except KeyboardInterrupt:
            note("interrupted; where the tokens are on disk, the same command goes on from here")
            raise typer.Exit(130) from None
    _show(done, loaded, token_ref)


def _show(done: "FeatureGrid", loaded: "LoadedModel", token_ref: str | None) -> None:
    rows, columns, C = done.shape
    if done.resumed_at:
        console.print(f"Resumed after {done.resumed_at} of {done.tiles} tiles")
    console.print(f"{done.width} x {done.height} pixels, {rows} x {columns} tokens of {C} channels")
    gigabytes = done.store_bytes / 1e9
    console.print(
        f"{done.seconds:.1f} s, {done.sweeps} sweeps, {gigabytes:.2f} GB of tokens in the store '{done.store}', "
        f"peak memory of the process {done.peak_bytes / 1e9:.2f} GB"
    )
    trained = _trained_tokens(loaded, done)
    if token_ref is None and trained and rows * columns > MANY_TOKENS * trained:
        note(
            f"the image has {rows * columns / trained:.0f} times as many tokens as the images in training, and SimA's "
            "output is that much smaller; --token-ref train brings it back to its scale"
        )
    if done.logits is not None:
        shares = done.logits.float().softmax(0)
        best = shares.argsort(descending=True)[:SHOWN_CLASSES].tolist()
        lines = [[loaded.class_name(k), f"{shares[k]:.1%}"] for k in best]
        print_table(TextTable(["class", "probability"], lines), title="the whole image")
    for path in (done.path, *done.pictures):
        console.print(f"Written: {path}")


def _trained_tokens(loaded: "LoadedModel", done: "FeatureGrid") -> float | None:
    """Patch tokens at the training size; None where every attention has a scale of its own."""
    from sima_attn.nn.token_ref import sima_modules

    if all(module.token_ref is not None for module in sima_modules(loaded.model)):
        return None
    return (loaded.preprocessing.size / done.patch) ** 2
