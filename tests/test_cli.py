"""The command line as a user types it."""

import ast
import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Annotated
from unittest.mock import Mock

import pytest
import timm
import torch
import typer
from packaging.requirements import Requirement
from PIL import Image
from typer.testing import CliRunner

from sima_attn import __version__, _examination, _install, cli
from sima_attn._install import install_command
from sima_attn.bench import cpu, demo, edge
from sima_attn.cli import _options as option
from sima_attn.cli import doctor
from sima_attn.cli._shared import console, note, print_table, progress_bar
from sima_attn.cli.classify import print_answer
from sima_attn.explain.answer import Answer
from sima_attn.models.names import takes_attention
from sima_attn.nn import ATTENTIONS
from sima_attn.ops import api
from sima_attn.report.figures import check_can_plot
from sima_attn.report.tables import TextTable

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
runner = CliRunner()


def sima(*arguments, code=0):
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == code, result.output
    return result.output


def test_help_names_every_command_and_version_prints_it():
    assert "demo" in sima("--help")
    assert "bench" in sima("--help")
    assert "cpu" in sima("bench", "--help")
    assert sima("--version").strip() == f"sima-attn {__version__}"


def test_without_arguments_it_shows_every_command_under_a_theme():
    output = sima()
    group = typer.main.get_command(cli.app)
    placed = [name for names in cli.THEMES.values() for name in names]
    assert sorted(placed) == sorted(group.commands)
    assert [name for name in (*cli.THEMES, *placed) if name not in output] == []
    assert " Commands " not in output  # the panel for what has no theme
    assert output.index("demo") < output.index("Train") < output.index("bench")


@pytest.mark.parametrize("arguments", [["--help"], ["models", "vit"]], ids=" ".join)
def test_help_and_names_need_neither_torch_nor_matplotlib(arguments):
    """What keeps these commands under a second."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from sima_attn.cli import app\n"
        f"assert CliRunner().invoke(app, {arguments}).exit_code == 0\n"
        "heavy = {'torch', 'timm', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def listed(*arguments):
    return [line.split()[0] for line in runner.invoke(cli.app, ["models", *arguments]).stdout.splitlines()]


def test_models_lists_the_names_that_timm_knows_and_filters_them():
    """All of them: those of timm are read from its source."""
    packages = ("timm.", "sima_attn.")  # other tests register models of their own
    registered = {
        name for name in timm.list_models() if timm.models.model_entrypoint(name).__module__.startswith(packages)
    }
    assert {*listed("*")} == registered
    ours = {name for name in registered if name.startswith("sima_")}
    assert {*listed()} == {*listed("sima_*")} == ours
    assert listed("--family", "sima_cvt") == ["sima_cvt_13", "sima_cvt_21"]
    assert listed("xcit_tiny", "--family", "xcit") == [n for n in listed("xcit_tiny") if not n.startswith("sima_")]
    for attention, rejected in {"softmax": set(), "linformer": {"sima_cvt_13", "sima_cvt_21"}}.items():
        assert {*listed("--attention", attention)} == ours - rejected


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["sima_deit_tiny_patch16_224", "sima_cvt_13", "sima_xcit_nano_12_p16_224"])
def test_models_knows_which_model_takes_which_attention(name, attention):
    small = {"depths": (1, 1, 1)} if "cvt" in name else {"depth": 1}
    with torch.device("meta"), suppress(ValueError):
        timm.create_model(name, attention=attention, **small)
        assert takes_attention(name, attention)
        return
    assert not takes_attention(name, attention)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnot50"], r"no name of a model fits.*did you mean .*resnet50"),
        (["--family", "deti"], r"unknown family 'deti'.*'deit'"),
        (["--attention", "smia"], "unknown attention 'smia'"),
        (["--out", "names"], "--out applies only with --paper"),
        (["vit", "--paper"], "omit the pattern"),
    ],
)
def test_models_says_which_filter_is_wrong(arguments, message):
    result = runner.invoke(cli.app, ["models", *arguments])
    assert isinstance(result.exception, ValueError)
    assert re.search(message, str(result.exception))


def test_demo_compares_the_twins_and_ends_with_photos(tmp_path, monkeypatch):
    brief = ("schedule.epochs=2", "schedule.warmup_epochs=1", "model.kwargs.depth=1")
    train = demo.train_twins
    monkeypatch.setattr(demo, "train_twins", lambda out, **options: train(out, changes=brief, quiet=True, **options))
    output = sima("demo", "--out", str(tmp_path))
    left = {"sima", "softmax", "twins.csv", "twins.png", "heatmap.png"}
    assert left == {path.name for path in tmp_path.iterdir()}
    assert "1,536" in output  # 6 heads, 16 tokens
    assert "chelsea (a cat)" in output


@pytest.mark.usefixtures("brief_timing")
def test_demo_attentions_prints_a_table_and_saves_rows_and_figure(tmp_path, monkeypatch):
    run = demo.run_demo
    monkeypatch.setattr(demo, "run_demo", lambda **options: run(tokens=(49, 196), **options))
    output = sima("demo", "--attentions", "--out", str(tmp_path), "--seconds", "0")
    assert "sima" in output
    assert "qk at N = 49, kv at N = 196" in output
    assert {p.name for p in tmp_path.iterdir()} == {"rows.csv", "time_against_tokens.png"}


def test_demo_takes_no_seconds_where_they_mean_nothing(tmp_path):
    result = runner.invoke(cli.app, ["demo", "--out", str(tmp_path), "--seconds", "1"])
    assert "--seconds applies only with --attentions" in str(result.exception)


def test_bench_table_prints_the_committed_rows():
    assert sima("bench", "table", str(RESULTS / "cpu.csv"), "--threads", "1").startswith("| B, H, N, D | order |")


def commands(group=None, name="sima"):
    """(name, command) of each command, those of groups included."""
    for part, command in (group or typer.main.get_command(cli.app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {part}")
        else:
            yield f"{name} {part}", command


def test_nothing_is_written_outside_runs_unless_it_is_asked_for():
    defaults = {
        f"{name} {parameter.name}": parameter.default
        for name, command in commands()
        for parameter in command.params
        if isinstance(parameter.default, Path)
    }
    assert len(defaults) > 10
    assert {key: path for key, path in defaults.items() if path.parts[0] != "runs"} == {}


def test_the_model_is_named_by_the_same_option_in_every_command():
    """A MODEL argument is short for it, and no other word stands for a model."""
    words = {"run", "checkpoint", "run_or_model", "name_or_file", "file_or_run"}
    about = [name for name, command in commands() if any(p.metavar == "MODEL" for p in command.params)]
    expected = ("audit", "eval", "export", "finetune", "quantize", "serve", "detect eval")
    assert {f"sima {name}" for name in expected} <= {*about}
    for name, command in commands():
        options = {option for parameter in command.params for option in parameter.opts}
        assert not words & {str(parameter.metavar or parameter.name).lower() for parameter in command.params}, name
        assert "--model" in options or name not in about


def test_a_model_may_be_an_argument_or_an_option_but_not_both(monkeypatch):
    given = []
    monkeypatch.setattr("sima_attn.auditing.model.audit_named", lambda name, size: given.append(name) or 1 / 0)
    for arguments in (["one"], ["--model", "one"], []):
        assert isinstance(runner.invoke(cli.app, ["audit", *arguments]).exception, ZeroDivisionError)
    assert given == ["one", "one", "sima_xcit_mini_p4_64_relu"]
    result = runner.invoke(cli.app, ["audit", "one", "--model", "two"])
    assert "the model is given twice, as one and as --model two" in str(result.exception)
    assert "no model was given" in str(runner.invoke(cli.app, ["quantize", "--data", "digits"]).exception)


def test_what_is_written_is_a_file_with_its_extension_or_a_folder():
    """`--out` says which: FILE or FOLDER, or both where the extension decides."""
    for name, command in commands():
        for parameter in command.params:
            assert parameter.name != "out" or parameter.metavar in ("FILE", "FOLDER", "FILE|FOLDER"), name


@pytest.mark.parametrize(
    ("kind", "given", "written"),
    [
        ("csv", "rows", "rows.csv"),
        ("csv", "rows.CSV", "rows.CSV"),
        ("png", "map", "map.png"),
        ("png", "map.pdf", "map.pdf"),
        ("onnx", "folder/model", "folder/model.onnx"),
    ],
)
def test_a_missing_extension_is_added(kind, given, written):
    app = typer.Typer()
    seen = []

    @app.command()
    def command(out: Annotated[Path | None, option.file(kind, "What is written.")] = None) -> None:
        seen.append(out)

    assert runner.invoke(app, ["--out", given]).exit_code == runner.invoke(app).exit_code == 0
    assert seen == [Path(written), None]


@pytest.mark.parametrize("command", ["explain effect photo.jpg --patch 1,1 --out", "eval --mistakes"])
def test_a_picture_of_photos_is_a_png(command):
    result = runner.invoke(cli.app, [*command.split(), "map.jpg"])
    assert "the file must end in .png, got map.jpg" in str(result.exception)


def test_a_folder_that_is_named_like_a_file_is_refused():
    result = runner.invoke(cli.app, ["explain", "statistics", "photo.jpg", "--out", "map.png"])
    assert "--out is a folder for this command, got map.png: omit the .png" in str(result.exception)
    result = runner.invoke(cli.app, ["heatmap", "photo.jpg", "--out", "map.csv"])
    assert "--out is a .png file or a folder for this command, got map.csv" in str(result.exception)


def test_the_map_of_one_photo_is_a_file_and_those_of_several_are_in_a_folder(tmp_path):
    for name in ("a", "b"):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{name}.png")
    photo, out = str(tmp_path / "a.png"), tmp_path / "maps" / "map.png"
    sima("heatmap", photo, "--out", str(out))
    assert Image.open(out).format == "PNG"
    assert [path.name for path in out.parent.iterdir()] == ["map.png"]
    for arguments, why in (
        ((photo, str(tmp_path / "b.png"), "--out", str(out)), "names one file, and there are 2 photos: give a folder"),
        ((photo, "--raw", "--out", str(out)), "names one file, and --raw writes a second one: give a folder"),
        ((photo, "--out", photo), "--out would overwrite the photo"),
    ):
        assert why in str(runner.invoke(cli.app, ["heatmap", *arguments]).exception)


def test_names_with_brackets_are_printed_as_they_are(capsys):
    """As markup, [edited] would disappear, and [/x] would be an error."""
    name = "IMG [edited][/x] :cat:.jpg"
    console.print(f"Written: {name}")
    note(name)
    print_table(TextTable([f"{name} heading"], [[f"{name} cell"]]), title=f"{name} title", caption=f"{name} caption")
    print_answer(f"{name} photo", Answer([(f"{name} class", 0.5)], unsure=True))
    with progress_bar() as bar:
        bar.add_task(f"{name} task")
    output = "".join(capsys.readouterr())
    for what in ("", " heading", " cell", " title", " caption", " photo", " class", " task"):
        assert name + what in output


def test_a_table_that_is_wider_than_the_terminal_loses_no_digit(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    shared = runpy.run_path(inspect.getfile(print_table))  # the width is read at import
    names = [f"sima_model_number_{i}_of_a_long_family" for i in range(3)]
    lines = [[name, *(str(10**7 + i * column) for column in range(1, 5))] for i, name in enumerate(names)]
    shared["print_table"](TextTable(["model", *["parameters of a column"] * 4], lines), title="narrow")
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 60
    assert "…" not in printed
    for _, *numbers in lines:
        assert all(number in printed for number in numbers)
    shared["print_table"](TextTable(["parameters of a column"] * 5, []), title="empty")
    assert "empty" in capsys.readouterr().out


def test_a_wide_table_is_whole_where_the_output_is_not_a_terminal(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS")
    shared = runpy.run_path(inspect.getfile(print_table))  # the width is read at import
    cells = [f"{number:014}" for number in range(13)]
    shared["print_table"](TextTable(cells, [cells]), title="wide")
    printed = capsys.readouterr().out
    assert all(printed.count(cell) == 2 for cell in cells)


def test_no_path_of_the_clone_is_built_into_the_package():
    """An installed package would create these folders wherever it runs, and in a clone overwrite what is committed."""
    found = [
        (path.name, node.value)
        for path in Path(cli.__file__).parents[1].rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and re.match(r"(benchmarks|docs)(/\S*)?$", str(node.value))
    ]
    assert found == []


def test_a_benchmark_writes_to_runs_bench_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sima("bench", "paper-edge", "--runs", "2")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["runs/bench/paper_edge.csv"]


def test_make_writes_the_committed_rows_of_every_benchmark():
    makefile = (RESULTS.parents[1] / "Makefile").read_text()
    pattern = r"^(bench-[a-z-]+): BENCH = (sima bench [a-z-]+|python \S+) .*--out \$\(RESULTS\)/(\w+\.csv)"
    targets = re.findall(pattern, makefile, re.M)
    measured = {name for name, _ in commands() if name.startswith("sima bench ")} - {"sima bench table"}
    scripts = {f"python benchmarks/{name}.py" for name in ("dino_step", "knn_search", "serve_load")}
    assert {command for _, command, _ in targets} == measured | scripts
    assert [file for _, _, file in targets if not (RESULTS / file).is_file()] == []
    benches = re.search(r"addprefix bench-,(.*)\)", makefile)[1].split()
    assert [f"bench-{name}" for name in benches] == [target for target, _, _ in targets]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cpu", "--threads", "1", "--threads", "0"), "greater than or equal to 1"),
        (("cpu", "--out", "."), "'.' is a directory"),
        (("edge", "--threads", "1", "--threads", "0"), "greater than or equal to 1"),
        (("edge", "--model", "xcit_mini", "--size", "64", "--size", "2"), "xcit_mini takes images of 4 px or more"),
        (("model", "--model", "deit", "--model", "cvt"), "the model 'cvt'; choose from: deit, xcit"),
        (("model", "--size", "224", "--size", "100"), "the image side 100; choose from: 224, 512"),
        (("gpu", "--shape", "1,2,3"), "the shape '1,2,3'; choose from: 256,196,6,64"),
    ],
)
def test_options_of_a_benchmark_are_checked_before_anything_is_measured(arguments, message, monkeypatch):
    def measure(*_, **__):
        raise AssertionError("it was measured")

    for module, name in ((cpu, "time_interleaved"), (edge, "_make_files")):
        monkeypatch.setattr(module, name, measure)
    result = runner.invoke(cli.app, ["bench", *arguments])
    assert message in f"{result.output} {result.exception}"


def test_an_error_of_the_user_is_one_line_without_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sima_attn.cli", "bench", "table", str(tmp_path / "none.csv")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert "none.csv" in done.stderr
    assert "Traceback" not in done.stderr


def test_too_little_memory_of_a_gpu_is_one_line_and_an_error_of_ours_is_a_traceback(monkeypatch, capsys):
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), RuntimeError("ours")):
        monkeypatch.setattr(cli, "app", Mock(side_effect=error))
        with pytest.raises(RuntimeError if str(error) == "ours" else SystemExit):
            cli.main()
    assert capsys.readouterr().err.splitlines() == ["error: CUDA out of memory. Tried to allocate 2 GiB"]


@pytest.mark.parametrize("started", ["in this process", "in its own"])
def test_no_message_wraps_however_long_a_path_is(tmp_path, started):
    """The terminal that conftest.py gives to all tests; without it they would depend on the machine's."""
    folder = tmp_path / "long" / ("er" * 100)
    folder.mkdir(parents=True)
    arguments = ["bench", "cpu", "--out", str(folder)]
    if started == "in this process":
        output = sima(*arguments, code=2)
    else:
        command = [sys.executable, "-m", "sima_attn.cli", *arguments]
        output = subprocess.run(command, capture_output=True, text=True).stderr
    assert f"'{folder}' is a directory" in output


def test_a_missing_matplotlib_is_named_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=re.escape(install_command("plots"))):
        check_can_plot()


def test_doctor_says_what_is_here_and_that_it_works():
    output = sima("doctor")
    assert f"sima-attn {__version__}" in output
    assert re.search(rf"torch\W+{re.escape(torch.__version__.split('+')[0])}", output)  # a line may end between them
    assert "All checks passed." in output


def test_doctor_in_json_holds_what_a_bug_report_needs(monkeypatch):
    monkeypatch.setenv("HOME", str(Path(torch.__file__).parents[1]))  # a home folder that would show in a message
    findings = json.loads(sima("doctor", "--json"))
    assert findings.keys() >= {
        "sima_attn",
        "python",
        "cpu",
        "cuda",
        "gpus",
        "packages",
        "checks",
        "weights",
        "problems",
    }
    assert {
        "torch",
        "triton",
        "timm",
        "torchvision",
        "lightning",
        "transformers",
        "onnx",
        "onnxruntime",
        "openvino",
    } <= {package["name"] for package in findings["packages"]}
    eager = {
        check["dtype"]: check for check in findings["checks"] if (check["device"], check["backend"]) == ("cpu", "eager")
    }
    assert eager.keys() == _examination.LARGEST_ERROR.keys()
    assert 0 < eager["float32"]["error"] < 1e-5
    assert 0 < eager["float32"]["gradient_error"] < 1e-5
    assert findings["problems"] == []


@pytest.mark.parametrize(
    ("wrong", "said"), [(lambda o: o * 1.001, "off by"), (lambda o: o * float("nan"), "numbers that are not finite")]
)
def test_a_backend_that_computes_something_else_is_found(monkeypatch, wrong, said):
    right = api.sima_eager
    monkeypatch.setattr(api, "sima_eager", lambda *args, **options: wrong(right(*args, **options)))
    assert f"eager on cpu, float32: {said}" in sima("doctor", code=1)
    assert json.loads(sima("doctor", "--json", code=1))["problems"]


def test_a_backend_with_wrong_gradients_is_found(monkeypatch):
    right = api.sima_eager
    monkeypatch.setattr(api, "sima_eager", lambda q, k, v, **options: right(q.detach() + 0 * q, k, v, **options))
    assert "eager on cpu, float32: off by" in sima("doctor", code=1)


def test_a_backend_that_crashes_is_found_and_its_message_does_not_tell_where_home_is(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError(f"no compiler in {Path.home() / 'bin'}\nand more")

    monkeypatch.setattr(api, "sima_eager", broken)
    output = sima("doctor", "--json", code=1)
    problems = json.loads(output)["problems"]
    assert f"eager on cpu, float32: RuntimeError: no compiler in {Path('~/bin')}" in problems
    assert str(Path.home()) not in output


def test_a_missing_extra_is_named_with_its_command_and_a_wrong_version_is_a_problem(monkeypatch):
    import importlib.metadata as metadata

    def version(name, real=metadata.version):
        if name == "openvino":
            raise PackageNotFoundError(name)
        return "0.9" if name == "timm" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = {package.name: package for package in _examination.installed_packages()}
    assert found["openvino"].verdict == "missing"
    assert _examination.how_to_install(found["openvino"].extras) == install_command("openvino")
    assert found["timm"].verdict == "wrong version"
    output = sima("doctor", code=1)
    assert "Problem: timm 0.9, but sima-attn needs timm" in output
    assert "openvino missing" in output


@pytest.mark.parametrize(
    ("origin", "with_extra", "alone"),
    [
        (None, "pip install 'sima-attn[hf]'", "pip install sima-attn"),
        (
            {"url": "file:///a%20b/sima", "dir_info": {"editable": True}},
            "pip install -e '/a b/sima[hf]'",
            "pip install -e '/a b/sima'",
        ),
        ({"url": "file:///src", "dir_info": {}}, "pip install '/src[hf]'", "pip install /src"),
        (
            {"url": "file:///s.whl", "archive_info": {}},
            "pip install 'sima-attn[hf] @ file:///s.whl'",
            "pip install 'sima-attn @ file:///s.whl'",
        ),
    ],
    ids=["by name", "editable", "folder", "wheel"],
)
def test_an_extra_is_installed_from_where_the_package_came_from(monkeypatch, origin, with_extra, alone):
    """Before the package is published its name is not known to pip."""
    installed = Mock(**{"read_text.return_value": origin and json.dumps(origin)})
    monkeypatch.setattr(_install, "distribution", lambda name: installed)
    monkeypatch.setattr(_install, "_is_installed", lambda name: True)
    assert (install_command("hf"), install_command()) == (with_extra, alone)
    monkeypatch.setattr(_install, "_is_installed", lambda name: False)
    monkeypatch.setattr(_install, "which", lambda name: "uv")
    assert install_command() == f"uv {alone}"
    monkeypatch.setattr(_install, "which", lambda name: None)
    assert shlex.split(install_command())[:4] == ["pip", "--python", sys.executable, "install"]


def test_an_install_command_does_not_break_setuptools():
    """torch.compile imports it, in the same process."""
    code = "from sima_attn._install import install_command; install_command(); import setuptools"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_source_tree_that_is_not_installed_is_installed_as_one(monkeypatch):
    monkeypatch.setattr(_install, "distribution", Mock(side_effect=PackageNotFoundError))
    assert shlex.split(install_command("hf"))[-1] == f"{RESULTS.parents[1]}[hf]"


def test_the_doctor_knows_every_extra():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert doctor.PURPOSES.keys() - {"", "cuda"} == project["optional-dependencies"].keys()
    found = {package.name: package for package in _examination.installed_packages()}
    assert {extra for package in found.values() for extra in package.extras} == doctor.PURPOSES.keys()
    torch_needs = next(need for need in map(Requirement, project["dependencies"]) if need.name == "torch")
    assert (found["torch"].extras, found["torch"].needs) == ([""], str(torch_needs.specifier))


def test_the_doctor_names_weights_that_cannot_be_read(monkeypatch, tmp_path):
    monkeypatch.setattr("sima_attn.models.pretrained.WEIGHTS", tmp_path)
    (tmp_path / "sima_broken.safetensors").write_bytes(b"nothing")
    assert "the weights of sima_broken cannot be read" in sima("doctor", code=1)


def test_the_doctor_shows_a_gpu_and_what_runs_there(capsys):
    gpu = _examination.Gpu("NVIDIA H200", "9.0", 139.8, "fused")
    checks = [_examination.Check("cuda:0", "triton", "bfloat16", 4e-3, 5e-3, "ok")]
    cpu = {"name": "a processor", "cores": 2, "threads": 2}
    doctor.show(_examination.Findings("0", "3.11", "Linux", cpu, "one device", [gpu], [], checks, {"sima_x": "9 MB"}))
    output = capsys.readouterr().out
    assert [word for word in ("H200", "140", "fused", "4e-03", "Weights: sima_x") if word not in output] == []


def test_the_doctor_asks_for_full_float32_and_leaves_the_setting_as_it_was():
    """A program that allows bfloat16 or tf32 for float32 products would find plain torch wrong."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert [check.reason for check in _examination.run_checks() if check.failed] == []
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_doctor_finds_the_kernels_of_a_gpu_right():
    findings = _examination.examine()
    assert findings.problems == []
    assert [gpu.kernels for gpu in findings.gpus] == ["fused"] * torch.cuda.device_count()
    kernels = [check for check in findings.checks if check.backend == "triton" and check.device.startswith("cuda")]
    assert [check.verdict for check in kernels] == ["ok"] * len(_examination.LARGEST_ERROR) * torch.cuda.device_count()
