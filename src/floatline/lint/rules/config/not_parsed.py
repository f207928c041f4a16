"""FL001: a file that Python cannot read."""

from __future__ import annotations

from floatline.lint.rule import Bad, Rule


class NotParsed(Rule):
    """Flags a file about training that cannot be read: a conflict never resolved, a line cut short, a broken notebook.

    ## Why is this bad?
    Nothing in it can be looked at, and nothing of it runs. Without this finding it would pass as clean.
    """

    code = "FL001"
    name = "not-parsed"
    title = "The file cannot be parsed"
    message = "Python cannot read this file, and nothing in it was looked at"
    advice = "fix the syntax or save it as UTF-8, or leave the file out: exclude in [tool.floatline.lint]"
    words = ("torch", "Trainer", "deepspeed", "lightning", "Accelerator")
    good = (
        "import torch\ny = 1",
        "def broken(:  # nothing that trains",
        Bad("torch: 1\n", file="train.yaml"),
    )
    bad = (
        "import torch\ndef broken(:\n    pass",
        "import torch\nprint 'for Python 2'",
        "import torch as t\n<<<<<<< HEAD\nx = 1\n=======\nx = 2\n>>>>>>> other\n",
    )
