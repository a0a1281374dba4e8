"""Runs the code of the documentation: the blocks of a page, in order, are one program."""

from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(page for page in DOCS.glob("*.md") if "```python" in page.read_text())


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may write files, into a folder of the test, and set the time limit of collectives."""
    monkeypatch.chdir(tmp_path)
    for example in Sybil([PythonCodeBlockParser()]).parse(page).examples():
        example.evaluate()
