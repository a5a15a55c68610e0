"""`sima demo`: the twins on the digits, trained for a moment."""

from pathlib import Path

import pytest
from PIL import Image

from sima_attn._settings import differences
from sima_attn.bench.demo import TWINS, TwinRow, train_twins, twins_table
from sima_attn.bench.figures import plot_twins
from sima_attn.cli.demo import show_photos
from sima_attn.models.pretrained import shipped_models
from sima_attn.report.rows import read_rows, write_rows
from sima_attn.train.recipes import named_recipe
from sima_attn.train.run import RunFolder

BRIEF = ("schedule.epochs=2", "schedule.warmup_epochs=1")


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, train_twins(out, changes=BRIEF, quiet=True)


def test_the_twins_differ_in_one_word(twins):
    out, _ = twins
    sima, softmax = (RunFolder(out / name).read_recipe() for name in TWINS)
    assert differences(sima, softmax) == ["model.attention: sima -> softmax"]
    assert differences(named_recipe("digits"), sima) == ["schedule.epochs: 30 -> 2", "schedule.warmup_epochs: 5 -> 1"]


def test_one_has_no_exp_and_the_other_one_for_each_pair_of_tokens(twins):
    _, rows = twins
    kwargs = named_recipe("digits").model.kwargs
    tokens = (kwargs["img_size"] // kwargs["patch_size"]) ** 2
    pairs = kwargs["depth"] * kwargs["num_heads"] * tokens**2
    assert [(row.attention, row.attention_exps, row.other_exps) for row in rows] == [
        ("sima", 0, 0),
        ("softmax", pairs, 0),
    ]
    assert rows[0].params == rows[1].params
    assert all(20 < row.top1 <= 100 for row in rows)  # two epochs: above chance, no more


def test_rows_table_curves_and_figure(twins, tmp_path):
    out, rows = twins
    write_rows(tmp_path / "twins.csv", rows)
    assert read_rows(tmp_path / "twins.csv", TwinRow) == rows
    table = twins_table(rows)
    assert table.bold == {0}
    assert table.lines[1][3] == f"{rows[1].attention_exps:,}"
    plot_twins(rows, out, tmp_path / "twins.png")
    for figure in (tmp_path / "twins.png", out / "sima" / "learning_curve.png"):
        assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_demo_of_before_is_replaced_and_gives_the_same_accuracy(twins):
    out, rows = twins
    seen = []
    again = train_twins(out, changes=BRIEF, quiet=True, on_twin=seen.append)
    assert seen == list(TWINS)
    assert [row.top1 for row in again] == [row.top1 for row in rows]


def test_it_ends_with_photos_and_a_heat_map(tmp_path, capsys):
    pytest.importorskip("skimage")
    show_photos(tmp_path)
    said = capsys.readouterr().out
    if not shipped_models():
        assert "No trained weights come with this version" in said
        return
    lines = said.splitlines()
    assert lines[1] == "chelsea (a cat)"
    assert "cat" in lines[2]  # its most likely class
    assert said.count(" %") == 10
    assert "heatmap.png" in said.replace("\n", "")
    width, height = Image.open(tmp_path / "heatmap.png").size
    assert width > 3 * 240 > height


def test_the_readme_shows_the_committed_rows():
    root = Path(__file__).parents[2]
    readme = (root / "README.md").read_text()
    shown = {
        tuple(cell.strip() for cell in line.strip().strip("│").split("│"))
        for line in readme.splitlines()
        if line.strip().startswith("│")
    }
    table = twins_table(read_rows(root / "benchmarks" / "results" / "demo_twins.csv", TwinRow))
    assert {tuple(line) for line in table.lines} <= shown


def test_the_demo_keeps_runs_that_are_not_its_own(tmp_path):
    from dataclasses import replace

    from sima_attn.bench.demo import _remove_old_twin
    from sima_attn.train.recipes import named_recipe
    from sima_attn.train.run import RunFolder

    recipe = named_recipe("digits")
    for name, own in (("demo", recipe), ("mine", replace(recipe, data=replace(recipe.data, path="photos")))):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.write_recipe(own)
    _remove_old_twin(tmp_path / "demo", recipe)
    assert not (tmp_path / "demo").exists()
    with pytest.raises(ValueError, match="holds another run"):
        _remove_old_twin(tmp_path / "mine", recipe)
    assert (tmp_path / "mine" / "recipe.yaml").exists()
