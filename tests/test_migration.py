"""What the migration page shows runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parent.parent / "docs" / "migration.md").read_text()


def test_the_python_on_the_page_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/migration.md", "exec"), names)


def test_every_function_that_the_table_names_exists() -> None:
    import analysis
    from circuits import pretrained, processing, residual

    here = " ".join(line.split("|")[2] for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") == 4)
    called = set(re.findall(r"(?<![.\w])([a-z_]+)\(", here)) - {"model", "diag"}
    assert {"decompose", "activation_patch", "head_scores", "logit_lens"} <= called
    places = (analysis, processing, residual, pretrained)
    assert [name for name in called if not any(hasattr(place, name) for place in places)] == []
