"""The README tells the truth: its tables of settings and models, its commands, its Python.

`python tests/test_readme.py` writes the tables anew.
"""

import ast
import re
from pathlib import Path

import pytest

from stoker.backends import labels
from stoker.engine import support
from stoker.http.cli import _parser, main
from stoker.http.settings import ServerConfig

README = Path(__file__).parents[1] / "README.md"


def marked(name: str) -> re.Pattern:
    """A generated part of the README: its first line, what it holds, its last line."""
    return re.compile(rf"(<!-- {name}: .*? -->\n)(.*?)(<!-- end of {name} -->)", re.DOTALL)


def settings_table() -> str:
    """A row for each field of the configuration, grouped as in --help."""
    groups: dict[str, list[str]] = {}
    for name, field in ServerConfig.model_fields.items():
        group = (field.json_schema_extra or {})["group"]
        default = "" if field.default is None or field.default == () else f"`{field.default}`"
        flag = "MODEL" if name == "model" else "--" + name.replace("_", "-")
        groups.setdefault(group, []).append(f"| `{flag}` | {default} | {field.description} |")
    rows = [row for group in groups for row in (f"| **{group}** | | |", *groups[group])]
    return "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows]) + "\n"


def models_table() -> str:
    """A row for each family of models, as `stoker models` prints it."""
    rows = [support.COLUMNS, ("---",) * len(support.COLUMNS), *support.rows()]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


TABLES = {"settings": settings_table, "models": models_table, "backends": labels.table}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_those_of_the_code(name):
    written = marked(name).search(README.read_text())
    assert written and written[2] == TABLES[name](), (
        f"the README's {name} are stale: run `python tests/test_readme.py`"
    )


def test_stoker_models_prints_the_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert not main(["models"])
    printed = capsys.readouterr().out
    for row in support.rows():
        assert all(cell in printed for cell in row)


def test_the_commands_exist():
    text = README.read_text()
    commands = set(re.findall(r"^    stoker ([\w-]+)", text, re.MULTILINE))
    parser = _parser()
    known = next(a.choices for a in parser._actions if a.choices)
    assert commands == set(known)


def test_the_make_targets_exist():
    makefile = (README.parent / "Makefile").read_text()
    for target in set(re.findall(r"\bmake (\w+)", README.read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_python_is_valid():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        ast.parse(block)


if __name__ == "__main__":
    text = README.read_text()
    for name, table in TABLES.items():
        new = table()
        text = marked(name).sub(lambda m, new=new: m[1] + new + m[3], text)
    README.write_text(text)
