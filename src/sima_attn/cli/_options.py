"""Options that several commands share, as types of their parameters."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

from typer import Argument, Option

from sima_attn.report.figures import FIGURES

# Where benchmarks write unless they are told where. The rows and figures that are committed are written by `make`.
BENCH_FOLDER = Path("runs/bench")

# What a command writes: a FILE if it writes one, with the extension added where it is missing, else a FOLDER. Where the
# arguments decide whether it is one file, the extension says so. All are checked before anything is computed: what was
# computed until then would be lost.
EXTENSIONS = (".csv", ".onnx", *FIGURES)


def file(kind: str, help: str, *names: str, only: bool = False, **options: Any) -> Any:
    """An option for a file: "csv", "png" or "onnx"; with `only`, another extension is an error."""

    def with_extension(path: Path | None) -> Path | None:
        if only and path is not None and path.suffix.lower() not in ("", f".{kind}"):
            raise ValueError(f"the file must end in .{kind}, got {path}: omit {path.suffix} or use .{kind}")
        return path if path is None or path.suffix else path.with_suffix(f".{kind}")

    return Option(*names, metavar="FILE", help=help, dir_okay=False, callback=with_extension, **options)


def folder(help: str, **options: Any) -> Any:
    """An option for a folder."""

    def without_extension(path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() in EXTENSIONS:
            raise ValueError(f"--out is a folder for this command, got {path}: omit the {path.suffix}")
        return path

    return Option(metavar="FOLDER", help=help, file_okay=False, callback=without_extension, **options)


def file_or_folder(kind: str, help: str, **options: Any) -> Any:
    """An option for a folder, or for the one file of a command that may write several: it has the extension."""

    def with_known_extension(path: Path) -> Path:
        if path.suffix.lower() in EXTENSIONS and path.suffix.lower() != f".{kind}":
            raise ValueError(f"--out is a .{kind} file or a folder for this command, got {path}: use another extension")
        if path.is_dir() if path.suffix.lower() == f".{kind}" else path.is_file():
            raise ValueError(f"--out is a .{kind} file or a folder for this command: {path} exists and is the other")
        return path

    return Option(metavar="FILE|FOLDER", help=help, callback=with_known_extension, **options)


RowsFile = Annotated[Path, file("csv", "CSV file for the rows.")]
FigureFile = Annotated[Path, file("png", "PNG file for the figure.")]
Threads = Annotated[list[int], Option(help="Thread counts; repeat for several.", min=1)]
Sizes = Annotated[list[int] | None, Option(help="Image sides; repeat for several. Default: all.", min=1)]
Seconds = Annotated[float, Option(help="Time for each group of measurements.", min=0.0)]

Device = Annotated[str, Option(help="auto, cpu or cuda.")]
BatchSize = Annotated[int, Option(help="Batch size.", min=1)]
Workers = Annotated[int | None, Option(help="Worker processes that decode images.", min=0)]
# Of the commands that train with a recipe.
RecipeName = Annotated[
    str | None, Option(help="Name of a recipe, see `sima recipes`. Default: by the images; without --data, digits.")
]
RunFolder = Annotated[Path | None, folder("Folder of the run.", show_default="runs/RECIPE")]
Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="NAME=VALUE", help="A setting of the recipe, e.g. schedule.epochs=10."),
]
Resume = Annotated[bool, Option("--resume", help="Resume the run in the folder.")]
Precision = Annotated[str | None, Option(help="fp32, bf16 or fp16. Default: the recipe's.")]
Strategy = Annotated[
    str | None, Option(help="Of the processes of torchrun: ddp, or fsdp, which shards the parameters. Default: ddp.")
]
# The model, as `load_model` takes it: `--model` in every command.
MODEL = "A model name, NAME=WEIGHTS, the folder of a run, a checkpoint or weights."
Model = Annotated[str | None, Option(help=MODEL, show_default="the model in the package")]
ModelOrRun = Annotated[str, Option(help=MODEL)]  # for commands with a default of their own, or none
Detector = Annotated[str, Option(help="The folder of a run of `sima detect train`, a checkpoint or weights.")]
Weights = Annotated[Path | None, Option(help="File of weights for a model name: .safetensors or .pth.")]
Data = Annotated[str | None, Option(help="Folder of the images, or digits. Default: the recipe's.")]
Teacher = Annotated[
    str | None, Option(metavar="TEACHER", help="Also learn from this trained classifier of the same classes.")
]
HeldOut = Annotated[
    float | None, Option("--val", metavar="PART", help="Hold out this part of each class as val images, e.g. 0.2.")
]
Reference = Annotated[
    str | None, Option("--data", help="Folder of labeled images, CLASS/*.jpg: classify by the nearest of them.")
]
DataOfRun = Annotated[str | None, Option(help="Folder of the images, or digits. Default: the run's.")]


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """A command that is about a model: `sima COMMAND MODEL` is short for `sima COMMAND --model MODEL`.

    For commands without other arguments. A `model` without a default must be given.
    """
    signature = inspect.signature(command, eval_str=True)
    option = signature.parameters["model"]
    required = option.default is inspect.Parameter.empty
    default = None if required else option.default
    kind = get_args(option.annotation)[0]

    @wraps(command)
    def with_argument(argument: Any, model: Any, **others: Any) -> None:
        if argument and model != default:
            raise ValueError(f"the model is given twice, as {argument} and as --model {model}: omit one of them")
        if required and not (argument or model):
            raise ValueError("no model was given: name it as the argument MODEL, or with --model")
        command(model=argument or model, **others)

    short = inspect.Parameter(
        "argument",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, Argument(metavar="MODEL", help="Short for --model.", show_default=False)],
    )
    parameters = {"argument": short, **signature.parameters, "model": option.replace(default=default)}
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
    with_argument.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
    with_argument.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    return with_argument
