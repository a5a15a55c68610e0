"""`sima train`, `sima eval` and `sima recipes`."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer import Option

from sima_attn import _errors
from sima_attn._devices import resolve_device
from sima_attn._settings import with_overrides
from sima_attn.cli import _options as option
from sima_attn.cli._next import Command, after_eval, after_run, say_next
from sima_attn.cli._shared import console, is_first_process, print_recipes, print_table, teller
from sima_attn.report.figures import check_can_plot
from sima_attn.report.rows import processor_name, write_rows
from sima_attn.report.tables import TextTable

if TYPE_CHECKING:
    from sima_attn.data.settings import Data
    from sima_attn.train.recipe_choice import Choice
    from sima_attn.train.task import RunSummary

app = typer.Typer()
MOST_SHOWN = 12  # a confusion matrix of more classes does not fit a screen
CompileOption = Annotated[bool, Option("--compile", help="Compile the model with torch.compile.")]
MeshOption = Annotated[
    str | None, Option(metavar="SIZES", help="Processes that share a batch, and an image: data=2,sequence=2.")
]
CudaGraphOption = Annotated[bool, Option("--cuda-graph", help="Record a step once and replay it, on one GPU.")]


def check_installed() -> None:
    """Raise unless lightning is installed; everything else that training needs comes with timm."""
    _errors.check_installed("training", "lightning", extra="train")


def resolved(
    named: Callable[[str], Any],
    recipe: str | None,
    default: str,
    folder: Path,
    resume: bool,
    overrides: list[str] | None,
    options: Mapping[str, str | float | bool | None],
    choose: "Callable[[Data], Choice] | None" = None,
) -> Any:
    """The recipe of a run, with the settings of --set and of the options that have a name of their own.

    An option that is None or False was not given. Where no recipe is named for data other than those of the default
    recipe, `choose` chooses one, and its notes are printed.
    """
    from sima_attn.train.run import RunFolder

    base = named(recipe or default)
    given = [
        f"{name}={'true' if value is True else value}"
        for name, value in options.items()
        if value is not None and value is not False
    ]
    given = [*(overrides or []), *given]
    if resume and recipe is None:  # it is in the folder; one that is given is compared with it
        base = RunFolder(folder).read_recipe(type(base))
    elif recipe is None and choose is not None and (data := with_overrides(base, given).data).path != base.data.path:
        base, notes = choose(data)
        for line in notes if is_first_process() else []:
            teller(Console(stderr=True))(line)
    return with_overrides(base, given)


def check_resumable(out: Path | None, recipe: str | None, resume: bool, data: str | None) -> None:
    """Raise where a run on own images is to be resumed without its folder: the default is that of another recipe."""
    if resume and out is None and recipe is None and data not in (None, "digits"):
        raise ValueError(f"--resume needs the folder of the run on {data}: add --out FOLDER")


def say_finished(
    finished: "RunSummary",
    folder: Path,
    what: str,
    form: str = ".4g",
    commands: Callable[[Path, Mapping[str, float]], list[Command]] = after_run,
) -> None:
    """Print the summary of a run and the commands that lead on, in the first process of torchrun only."""
    if not is_first_process():
        return
    numbers = ", ".join(f"{name} {value:{form}}" for name, value in finished.metrics.items()) or "done"
    console.print(Text.assemble((numbers, "bold"), f" after {finished.steps} steps, {finished.seconds:.0f} s"))
    console.print(f"Run: {folder} {what}")
    say_next(commands(folder, finished.metrics))


@app.command("train")
def train_command(
    recipe: option.RecipeName = None,
    data: option.Data = None,
    val: option.HeldOut = None,
    out: option.RunFolder = None,
    teacher: option.Teacher = None,
    overrides: option.Settings = None,
    resume: option.Resume = False,
    device: option.Device = "auto",
    precision: option.Precision = None,
    compile_: CompileOption = False,
    cuda_graph: CudaGraphOption = False,
    mesh: MeshOption = None,
    strategy: option.Strategy = None,
) -> None:
    """Train a model with a recipe. Runs on all processes of torchrun; after an interruption, add --resume."""
    check_installed()
    from sima_attn.train.recipe_choice import choose_classifier
    from sima_attn.train.recipes import named_recipe

    check_resumable(out, recipe, resume, data)
    folder = out or Path("runs") / (recipe or "digits")
    options: dict[str, Any] = {"data.path": data, "data.val": val, "run.precision": precision, "teacher.path": teacher}
    options |= {"run.compile": compile_, "run.cuda_graph": cuda_graph, "run.mesh": mesh, "run.strategy": strategy}
    choose = partial(choose_classifier, device=resolve_device(device))
    chosen = resolved(named_recipe, recipe, "digits", folder, resume, overrides, options, choose)
    folder = out or Path("runs") / (recipe or chosen.name)
    from sima_attn.train.classify import train_classifier  # slow to import: after the settings are checked

    finished = train_classifier(chosen, folder, resume=resume, device=device)
    say_finished(finished, folder, "(weights.safetensors, eval.csv, learning_curve.png, batch.png)")


@app.command("eval")
@option.takes_model
def eval_command(
    model: option.Model = None,
    data: option.DataOfRun = None,
    size: Annotated[
        list[int] | None, Option(help="Image side in pixels; repeat for several. Default: the training size.", min=1)
    ] = None,
    token_ref: Annotated[
        bool | None,
        Option("--token-ref/--no-token-ref", help="Compensate for other sizes. Default: both, if they differ."),
    ] = None,
    ema: Annotated[bool, Option("--ema", help="Evaluate the average weights of a checkpoint.")] = False,
    out: Annotated[Path | None, option.file("csv", "CSV file with one row per class, for the last size.")] = None,
    confusion: Annotated[
        Path | None, option.file("csv", "CSV file with the confusion matrix, for the last size.")
    ] = None,
    rows: Annotated[Path | None, option.file("csv", "CSV file with one row per size.")] = None,
    mistakes: Annotated[
        Path | None, option.file("png", "PNG of the most confident mistakes, for the last size.", only=True)
    ] = None,
    figure: Annotated[
        Path | None, option.file("png", "Figure of the accuracy of each class, for the last size.")
    ] = None,
    split: Annotated[str, Option(help="The images: train, val or test.")] = "val",
    batch: option.BatchSize = 256,
    workers: option.Workers = None,
    device: option.Device = "auto",
) -> None:
    """Top-1 and top-5 of a model on the val images, at any size, with and without token_ref."""
    from sima_attn.data.settings import Data
    from sima_attn.data.sources import class_words
    from sima_attn.models.loading import load_model
    from sima_attn.train.evaluate import evaluate
    from sima_attn.train.mistakes import draw_mistakes, plot_classes

    if figure is not None:
        check_can_plot(figure)
    device = resolve_device(device)
    loaded = load_model(model, branch="ema" if ema else None)
    trained = Data.of_model(loaded)
    if data is None and not trained.path:
        raise ValueError(f"{loaded.name} is a registered model: give the images to evaluate it on with --data")
    has_sima = any(hasattr(module, "token_ref") for module in loaded.model.modules())
    say = console.print
    results = []
    for side in dict.fromkeys(size or [trained.size]):
        both = has_sima and side != trained.size
        for use in [token_ref] if token_ref is not None else [False, True] if both else [False]:
            options = {"size": side, "token_ref": use, "batch": batch, "workers": workers, "device": device}
            with Console(stderr=True).status(f"{side} px"):
                results.append(evaluate(loaded, data, split=split, say=say, **options))  # type: ignore[arg-type]
    lines = [
        [str(r.size), "yes" if r.token_ref else "no", f"{r.top1:.2f}", f"{r.top5:.2f}", f"{r.loss:.4f}", f"{r.images}"]
        for r in results
    ]
    table = TextTable(["px", "token_ref", "top-1", "top-5", "loss", "images"], lines)
    print_table(table, title=f"{model or loaded.name} on {results[-1].place}")
    if not loaded.trained:
        say(f"{loaded.name} has no trained weights: this is the accuracy of random ones")
    last = results[-1]
    if len(last.rows) <= MOST_SHOWN:
        names = [row.name for row in last.rows]
        counts = [[name, *map(str, line)] for name, line in zip(names, last.confusion.tolist(), strict=True)]
        print_table(TextTable(["true", *names], counts), "confusion matrix: rows are true classes, columns predictions")
    for name, other, count in last.most_confused():
        say(f"  {name} classified as {other}: {count}")
    if last.broken:
        say(f"{last.broken} broken images were skipped")
    if out is not None:
        write_rows(out, last.rows)
        say(f"Classes: {out}")
    if confusion is not None:
        last.write_confusion(confusion)
        say(f"Confusions: {confusion}")
    words = class_words(data or trained.path)
    names = [words.get(row.name, row.name) for row in last.rows]
    if mistakes is not None and last.mistakes:
        title = f"{loaded.name}: the most confident mistakes on {last.images} images"
        draw_mistakes(mistakes, last.mistakes, names, trained, title)
        say(f"Mistakes: {mistakes}")
    elif mistakes is not None:
        say("the model makes no mistake on these images: there is nothing to draw")
    if figure is not None:
        plot_classes(figure, last.rows, names, f"{loaded.name}: accuracy of each class")
        say(f"Figure: {figure}")
    if rows is not None:
        write_rows(rows, [result.as_row(loaded.name, processor_name(device)) for result in results])
        say(f"Rows: {rows}")
    if mistakes is None and last.mistakes:
        say_next(after_eval(model, data, split))


@app.command("recipes")
def recipes_command() -> None:
    """List the recipes of `sima train` and `sima dino`."""
    from sima_attn.dino.recipes import DINO_RECIPES
    from sima_attn.train.recipes import RECIPES

    for command, recipes in (("sima train", RECIPES), ("sima dino", DINO_RECIPES)):
        console.print(f"{command} --recipe")
        print_recipes(recipes)
