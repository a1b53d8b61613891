"""The README tells the truth: its table of settings, its commands, its Python.

`python tests/test_readme.py` writes the table anew.
"""

import ast
import re
from pathlib import Path

from stoker.http.cli import _parser
from stoker.http.settings import ServerConfig

README = Path(__file__).parents[1] / "README.md"
TABLE = re.compile(r"(<!-- settings: .*? -->\n).*?(<!-- end of settings -->)", re.DOTALL)


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


def test_the_settings_are_those_of_the_code():
    written = TABLE.search(README.read_text())
    assert written and written[0] == written[1] + settings_table() + written[2], (
        "the README's settings are stale: run `python tests/test_readme.py`"
    )


def test_the_commands_exist():
    text = README.read_text()
    commands = set(re.findall(r"^    stoker (\w+)", text, re.MULTILINE))
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
    README.write_text(TABLE.sub(lambda m: m[1] + settings_table() + m[2], README.read_text()))
