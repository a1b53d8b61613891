"""Which models can be run: the table of `stoker models` and of the README.

Runs on: any (pure).
"""

from .models.registry import FAMILIES

COLUMNS = ("family", "architectures", "what is special", "GGUF", "equal to transformers on")


def rows() -> list[tuple[str, str, str, str, str]]:
    """A row for each family: name, architectures, what is special, GGUF, what it was tested on."""
    return [
        (
            f.name,
            ", ".join(f.architectures),
            f.features,
            "yes" if f.gguf else "",
            "tiny random model" + (f", {f.real_model}" if f.real_model else ""),
        )
        for f in FAMILIES.values()
    ]
