"""What the README and the docs say is true: their code runs, their links and files exist, their tables are the rows."""

import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import typer

from sima_attn import cli
from sima_attn.report.tables import TextTable
from test_architecture import PACKAGES

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
RESULTS = REPOSITORY / "benchmarks" / "results"
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *DOCS.glob("*.md")])
MUST_SHOW_CODE = {"README", "index", "start", "idea", "operator", "attentions", "add-an-attention", "convert", "faq"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_code_runs(page, tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)  # what an example writes does not stay
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    if page.stem in MUST_SHOW_CODE:
        assert blocks


def without_code(text: str) -> str:
    """Markdown without its code: what looks like a link there is none."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`|^    .*$", "", text, flags=re.MULTILINE)


def headings(page: Path) -> set[str]:
    """The anchors that git hosts and mkdocs give the headings of a page."""
    texts = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip()) for text in texts}


def dead_links(page: Path) -> list[str]:
    """Links and images of a page that lead nowhere: no such file, or no such heading in it."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue  # another host
        path, _, wanted = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (wanted and wanted not in headings(target)):
            dead.append(link)
    return dead


@every_page
def test_links_lead_somewhere(page):
    assert dead_links(page) == []


@every_page
def test_docs_link_to_no_page_that_the_site_does_not_have(page):
    if page.parent == DOCS:
        assert re.findall(r"\]\(\.\./[^)]*\)", page.read_text()) == []


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# Of `q`, k, v\n")
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#of-q-k-v) [c](#here) `[d](x.md)` [e](https://example.org)\n"
        "```\n[f](y.md)\n```\n    [g](z.md)\n"
    )
    assert dead_links(page) == []
    page.write_text("# Here\n[a](gone.md#x) ![b](images/gone.png) [c](other.md#gone) [d](#gone)\n")
    assert dead_links(page) == ["gone.md#x", "images/gone.png", "other.md#gone", "#gone"]


def commands_of(page: Path) -> list[list[str]]:
    """The `sima` commands that a page shows, as lists of words."""
    text = re.sub(r"^```python\n.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    shown = re.findall(r"`((?:sima|torchrun) [^`\n]+)`|^ *(?:\$ )?((?:sima|torchrun) .+)$", text, re.MULTILINE)
    commands = []
    for line in (inline or block for inline, block in shown):
        words = shlex.split(line, comments=True)
        if words[0] == "torchrun" and "sima_attn.cli" in words:
            words = words[words.index("sima_attn.cli") :]
        if words[0] != "torchrun":
            commands.append(words[1:])
    return commands


def what_is_wrong(words: list[str]) -> str | None:
    """What the command line does not know in a command; None where it knows everything."""
    command = typer.main.get_command(cli.app)
    rest = list(words)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0].isupper():
            return None  # `sima COMMAND --help`
        if rest[0] not in command.commands:
            return f"there is no command {rest[0]}"
        command = command.commands[rest.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    unknown = [word for word in rest if re.fullmatch(r"-[a-z]|--[a-z-]+", word) and word not in known]
    return f"{' '.join(words)}: no option {unknown[0]}" if unknown else None


@every_page
def test_the_commands_of_a_page_exist_with_their_options(page):
    assert [wrong for words in commands_of(page) if (wrong := what_is_wrong(words))] == []


def test_a_command_that_does_not_exist_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Run `sima dmo` or\n```bash\nsima train --recpe x  # no\n```\n    $ sima bench cpu --threads 1\n"
        "torchrun --nproc-per-node=8 -m sima_attn.cli detect train --recipe coco\n"
    )
    commands = commands_of(page)
    assert commands[-1] == ["detect", "train", "--recipe", "coco"]
    assert [what_is_wrong(words) for words in commands] == [
        "there is no command dmo",
        "train --recpe x: no option --recpe",
        None,
        None,
    ]


def test_every_attention_is_in_its_table():
    from sima_attn.nn import ATTENTIONS

    rows = re.findall(r"^\| `(\w+)` \|.*\| (\S+) \| [^|]+ \|$", (DOCS / "attentions.md").read_text(), re.M)
    assert dict(rows) == {name: cls.exps_in_paper or "-" for name, cls in ATTENTIONS.items()}


def test_every_make_target_that_is_named_exists():
    makefile = (REPOSITORY / "Makefile").read_text()
    named = {target for page in PAGES for target in re.findall(r"(?:`|^ *)make ([a-z-]+)", page.read_text(), re.M)}
    assert {"demo", "test", "docs"} <= named
    assert [target for target in named if f"\n{target}:" not in makefile] == []


def test_every_file_of_rows_is_on_the_page_of_benchmarks():
    page = (DOCS / "benchmarks.md").read_text()
    missing = [path.name for path in RESULTS.rglob("*.csv") if f"`{path.relative_to(RESULTS)}`" not in page]
    assert missing == [], "say in docs/benchmarks.md what made these rows and how to make them again"


def test_every_benchmark_is_on_the_page_of_benchmarks():
    commands = set(typer.main.get_command(cli.app).commands["bench"].commands) - {"table"}  # it measures nothing
    shown = {words[1] for words in commands_of(DOCS / "benchmarks.md") if words[:1] == ["bench"]}
    assert commands - shown == set()


def without(table: TextTable, *columns: str) -> TextTable:
    """The table without the first column of each of these names."""
    for column in columns:
        place = table.header.index(column)
        header, *lines = [[*line[:place], *line[place + 1 :]] for line in (table.header, *table.lines)]
        table = TextTable(header, lines, table.bold)
    return table


def with_columns(table: TextTable, *columns: str) -> TextTable:
    """The table with these columns only."""
    places = [table.header.index(column) for column in columns]
    return TextTable(list(columns), [[line[place] for place in places] for line in table.lines], table.bold)


def with_lines(table: TextTable, *starts: tuple[str, ...]) -> TextTable:
    """The table with only the lines that start with these cells, in this order."""
    found = {tuple(line[: len(start)]): line for start in starts for line in table.lines}
    return TextTable(table.header, [found[start] for start in starts])


# The cases of `model.csv` in the README: what a user meets first, and where SimA pays.
README_CASES = [
    ("eager", "inference", "224, 1"),
    ("compile", "inference", "224, 1"),
    ("eager", "training", "224, 256"),
    ("eager", "inference", "1024, 16"),
]


def test_the_two_front_pages_have_the_same_table():
    header = "| what | SimA against softmax | conditions |\n"
    tables = [
        (REPOSITORY / page).read_text().partition(header)[2].split("\n\n")[0] for page in ("README.md", "docs/index.md")
    ]
    assert tables[0]
    assert tables[0] == tables[1]


def test_the_layout_in_the_readme_lists_the_packages_in_their_order():
    listed = re.findall(r"^      (\w+)/ ", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    assert listed == [*PACKAGES, "weights"]


def tables_of_rows() -> list[tuple[str, str, str]]:
    """(page, file of rows, the table that the page has of them)."""
    from communication import CommunicationRow, bytes_table, scaling_table
    from dino_step import DinoStepRow, dino_step_table
    from finetune_cifar import CifarRow, cifar_table
    from gigapixel import GigapixelRow, gigapixel_table
    from knn_search import KnnSpeedRow, knn_speed_table
    from linearize_mini import MiniRow, mini_table
    from linearize_real import RealRow, SpeedRow, real_table, speed_table
    from sima_attn.bench.call_overhead import CallOverheadRow
    from sima_attn.bench.cores import FORWARD, TRAINING
    from sima_attn.bench.cpu import CpuRow
    from sima_attn.bench.demo import COUNTED_TOKENS, DemoRow, TwinRow, twins_table
    from sima_attn.bench.detect import DetectSpeedRow, detect_table
    from sima_attn.bench.edge import EdgeRow, edge_summary
    from sima_attn.bench.gpu import GpuRow
    from sima_attn.bench.model import ModelSpeedRow
    from sima_attn.bench.paper_edge import PaperEdgeRow, PaperGpuRow, paper_edge_table, paper_gpu_table
    from sima_attn.bench.tables import (
        call_overhead_table,
        cpu_table,
        demo_table,
        dtype_table,
        gpu_summary,
        gpu_table,
        model_table,
        step_table,
        targets_table,
    )
    from sima_attn.report.rows import read_rows
    from sima_attn.reproduce.dino import DinoCurveRow, DinoResultRow
    from sima_attn.reproduce.dino_report import dino_curve_table, dino_table
    from sima_attn.reproduce.fair import best_sizes_table, fair_table, sweep_table
    from sima_attn.reproduce.miniature import ResultRow, SizeRow
    from sima_attn.reproduce.miniature_report import results_table, sizes_table
    from sima_attn.reproduce.table_1 import ModelRow, table_1
    from unsure import UnsureRow, unsure_table
    from weak_scaling import WeakScalingRow, weak_scaling_table

    def rows(name: str, kind: type) -> list:
        return read_rows(RESULTS / name, kind)

    cpu, gpu, paper = rows("cpu.csv", CpuRow), rows("gpu.csv", GpuRow), rows("paper_edge.csv", PaperEdgeRow)
    calls, models = rows("call_overhead.csv", CallOverheadRow), rows("model.csv", ModelSpeedRow)
    cores = [gpu_table(gpu, direction) for direction in (FORWARD, TRAINING)]
    cpu_cores = [cpu_table(cpu, 1, direction) for direction in (FORWARD, TRAINING)]
    detect_cpu = detect_table(rows("detect_cpu.csv", DetectSpeedRow))
    linearized = real_table(rows("linearize_real.csv", RealRow))
    students = mini_table(rows("linearize_mini.csv", MiniRow))
    cifar = cifar_table(rows("finetune_cifar.csv", CifarRow))
    miniature = results_table(rows("miniature.csv", ResultRow))
    fair = rows("fair.csv", ResultRow)
    gigapixel = rows("gigapixel.csv", GigapixelRow)
    notes = "docs/engineering-notes.md"
    tables = [
        ("README.md", "model.csv", without(with_lines(step_table(models), *README_CASES), "target")),
        ("docs/benchmarks.md", "gpu.csv", gpu_summary(gpu)),
        ("docs/benchmarks.md", "cpu.csv", without(cpu_cores[0], "goal")),
        ("docs/cpu-speed.md", "cpu.csv", without(cpu_table(cpu, 2, FORWARD), "goal")),
        *(("docs/cpu-speed.md", "cpu.csv", without(cpu_table(cpu, n, TRAINING), "goal")) for n in (1, 2)),
        *((notes, "cpu.csv", with_columns(table, "B, H, N, D", "SimA", "goal")) for table in cpu_cores),
        ("docs/benchmarks.md", "demo.csv", demo_table(rows("demo.csv", DemoRow), COUNTED_TOKENS)),
        ("docs/benchmarks.md", "demo_twins.csv", twins_table(rows("demo_twins.csv", TwinRow))),
        ("docs/benchmarks.md", "table_1.csv", table_1(rows("table_1.csv", ModelRow))),
        ("docs/detection.md", "detect_cpu.csv", without(detect_cpu, "goal", "baseline, MiB", "SimA, MiB")),
        (
            "docs/detection.md",
            "detect_cuda.csv",
            without(detect_table(rows("detect_cuda.csv", DetectSpeedRow)), "goal"),
        ),
        ("docs/edge.md", "edge.csv", edge_summary(rows("edge.csv", EdgeRow))),
        *(
            ("docs/edge.md", "paper_edge.csv", without(paper_edge_table([r for r in paper if r.N == N]), "goal"))
            for N in (256, 64)
        ),
        ("docs/edge.md", "paper_gpu.csv", paper_gpu_table(rows("paper_gpu.csv", PaperGpuRow))),
        *(("docs/gpu.md", "gpu.csv", without(table, "goal")) for table in cores),
        ("docs/gpu.md", "gpu.csv", without(dtype_table(gpu), "goal")),
        *((notes, "gpu.csv", with_columns(table, "B, N, H, D", "SimA", "of the limit", "goal")) for table in cores),
        ("docs/gpu.md", "call_overhead.csv", call_overhead_table(calls)),
        ("docs/gpu.md", "model.csv", without(model_table(models), "target")),
        ("docs/gpu.md", "model.csv", without(step_table(models), "target")),
        (notes, "model.csv and call_overhead.csv", targets_table(models, calls)),
        ("docs/linearize.md", "linearize_real.csv", without(linearized, "target", "target")),
        *(
            ("docs/linearize.md", name, speed_table(rows(name, SpeedRow)))
            for name in ("linearize_speed.csv", "linearize_onnx.csv")
        ),
        (notes, "linearize_real.csv", linearized),
        ("docs/linearize.md", "linearize_mini.csv", without(students, "teacher", "target", "seconds")),
        (notes, "linearize_mini.csv", without(students, "teacher")),
        ("docs/finetune.md", "finetune_cifar.csv", without(cifar, "seconds")),
        *(
            ("docs/gigapixel.md", "gigapixel.csv", gigapixel_table([r for r in gigapixel if bool(r.threads) == on_cpu]))
            for on_cpu in (True, False)
        ),
        ("docs/miniature.md", "miniature.csv", without(miniature, "what it is", "heads", "params")),
        ("docs/miniature.md", "unsure.csv", unsure_table(rows("unsure.csv", UnsureRow))),
        ("docs/miniature.md", "miniature_sizes.csv", sizes_table(rows("miniature_sizes.csv", SizeRow))),
        ("docs/miniature.md", "fair_sizes.csv", best_sizes_table(fair, rows("fair_sizes.csv", SizeRow))),
        *(("docs/miniature.md", "fair.csv", table(fair)) for table in (fair_table, sweep_table)),
        *(
            ("docs/scale.md", "communication.csv", table(rows("communication.csv", CommunicationRow)))
            for table in (bytes_table, scaling_table)
        ),
        ("docs/scale.md", "weak_scaling.csv", weak_scaling_table(rows("weak_scaling.csv", WeakScalingRow))),
        ("docs/self-supervised.md", "dino.csv", dino_table(rows("dino.csv", DinoResultRow))),
        ("docs/self-supervised.md", "dino_curves.csv", dino_curve_table(rows("dino_curves.csv", DinoCurveRow), 40)),
        ("docs/self-supervised.md", "dino_step.csv", dino_step_table(rows("dino_step.csv", DinoStepRow))),
        ("docs/self-supervised.md", "knn_speed.csv", knn_speed_table(rows("knn_speed.csv", KnnSpeedRow))),
    ]
    return [(page, name, table.markdown()) for page, name, table in tables]


def replace_table(text: str, table: str, position: int) -> str:
    """The text of a page with `table` in the place of its table number `position` that has the same header."""
    header = "\n".join(table.splitlines()[:2])
    found = list(re.finditer(rf"^{re.escape(header)}$(?:\n\|.*$)*", text, re.MULTILINE))
    if position >= len(found):
        raise ValueError(
            f"the page has {len(found)} tables with the header\n{header}\nwrite it where the table belongs"
        )
    old = found[position]
    return text[: old.start()] + table + text[old.end() :]


def test_the_tables_of_the_pages_are_the_rows(request):
    """`make tables` runs this with --update-tables: then it writes the tables instead of comparing them."""
    seen: Counter = Counter()  # tables of one page with the same header stand in the order of the list
    for page, name, table in tables_of_rows():
        path, which = REPOSITORY / page, (page, table.splitlines()[0])
        text = path.read_text()
        updated = replace_table(text, table, seen[which])
        seen[which] += 1
        if request.config.getoption("--update-tables"):
            path.write_text(updated)
        else:
            assert text == updated, f"{page} has another table of {name} than the one below; run `make tables`\n{table}"


def test_a_table_is_replaced_in_its_place():
    page = "# A\n\n| a |\n| --- |\n| 1 |\n\n| a | b |\n| --- | --- |\n\nText\n\n| a |\n| --- |\n| 2 |\n"
    longer = "| a |\n| --- |\n| 8 |\n| 9 |"
    assert replace_table(page, longer, 0) == page.replace("| 1 |", "| 8 |\n| 9 |")
    assert replace_table(page, longer, 1) == page.replace("| 2 |", "| 8 |\n| 9 |")
    assert replace_table(page, "| a | b |\n| --- | --- |\n| 3 | 4 |", 0) == page.replace(
        "| --- | --- |", "| --- | --- |\n| 3 | 4 |"
    )
    with pytest.raises(ValueError, match=r"the page has 2 tables with the header\n\| a \|"):
        replace_table(page, longer, 2)


def test_columns_and_lines_of_a_table_are_selected():
    table = TextTable(["a", "b", "c"], [["1", "2", "3"], ["4", "5", "6"]], bold={1})
    assert without(table, "b") == TextTable(["a", "c"], [["1", "3"], ["4", "6"]], bold={1})
    assert with_columns(table, "c", "a") == TextTable(["c", "a"], [["3", "1"], ["6", "4"]], bold={1})
    assert with_lines(table, ("4", "5")).lines == [["4", "5", "6"]]
    with pytest.raises(KeyError):
        with_lines(table, ("4", "2"))


def test_every_public_name_is_in_the_reference_and_exists():
    names = set(re.findall(r"^\| `(sima_attn\.[\w.]+)` \|", (DOCS / "api.md").read_text(), re.MULTILINE))
    there = {name for name in names if hasattr(importlib.import_module(name.rpartition(".")[0]), name.split(".")[-1])}
    assert names - there == set()
    short = {name.split(".")[-1] for name in names}
    for package in ("", ".ops", ".nn", ".conversion", ".models", ".explain", ".auditing"):
        public = importlib.import_module(f"sima_attn{package}")
        missing = {
            name
            for name in public.__all__
            if name not in short and name != "__version__" and not inspect.ismodule(getattr(public, name))
        }
        assert missing == set(), package


def site_module():
    """docs/site.py, which mkdocs runs and which is no part of a package."""
    spec = importlib.util.spec_from_file_location("docs_site", DOCS / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w-]+\.md", (REPOSITORY / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def test_the_reference_follows_its_tables():
    markdown = "# API\n\n| name | gives |\n| --- | --- |\n| `a.b` | c |\n\nMore.\n"
    assert site_module().with_reference(markdown) == markdown.replace("c |\n", "c |\n\n::: a.b\n")


def test_what_a_page_would_fetch_from_another_host_is_found(tmp_path):
    (tmp_path / "page.html").write_text(
        '<a href="https://example.org">a link that one clicks</a><script src="assets/own.js"></script>'
        '<script src="https://example.org/x.js"></script><link rel="stylesheet" href="//example.org/x.css">'
        '<img src="x.png" srcset="own.png 1x, HTTPS://example.org/y.png 2x"><pre class="mermaid">a</pre>'
    )
    (tmp_path / "own.css").write_text("a { background: url(own.png) } @import 'http://example.org/z.css';")
    assert site_module().outside_requests(tmp_path) == [
        "page.html: https://example.org/x.js",
        "page.html: //example.org/x.css",
        "page.html: HTTPS://example.org/y.png 2x",
        "page.html: a mermaid diagram",
        "own.css: http://example.org/z.css",
    ]


@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="needs what `make docs` installs")
def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "api.html").read_text()
    assert "token_ref" in reference
    assert "shrinks as 1/N at other image sizes" in reference  # from the docstring of sima_attention
