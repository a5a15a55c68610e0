"""What the README and the docs say is true: their code runs, their files exist."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    if page.name in ("README.md", "operator.md", "attentions.md"):
        assert blocks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_attention_is_in_its_table():
    from sima_attn.nn import ATTENTIONS

    rows = re.findall(
        r"^\| `(\w+)` \|.*\| (\S+) \| [^|]+ \|$", (REPOSITORY / "docs" / "attentions.md").read_text(), re.M
    )
    assert dict(rows) == {name: cls.exps_in_paper or "-" for name, cls in ATTENTIONS.items()}


def test_every_make_target_of_the_readme_exists():
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"make ([a-z-]+)", (REPOSITORY / "README.md").read_text()))
    assert {"demo", "test"} <= targets
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
