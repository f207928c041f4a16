"""FL214: the old names of autocast and GradScaler."""

from __future__ import annotations

import ast
from typing import cast

from floatline.lint.rule import Bad, Rule


class DeprecatedAmp(Rule):
    """Flags `torch.cuda.amp.autocast(…)` and `GradScaler(…)`, and those of `torch.cpu.amp`.

    ## Why is this bad?
    They are deprecated since torch 2.4 and warn at every use. `torch.amp` has the same with the device as an argument.

    ## Fix safety
    Safe on torch 2.3 and later, which has torch.amp.GradScaler: the old names call the new ones. An import that is not
    needed any more is left for your import sorter.
    """

    code = "FL214"
    name = "deprecated-amp"
    title = "A deprecated name of torch.amp"
    message = "torch.cuda.amp and torch.cpu.amp are deprecated since torch 2.4"
    advice = 'torch.amp.autocast("cuda", …), torch.amp.GradScaler("cuda", …); the latter is there since torch 2.3'
    fix_safety = "safe"
    calls = frozenset(("autocast", "GradScaler"))
    words = ("cuda.amp", "cpu.amp", "import amp")
    good = (
        'import torch\nwith torch.amp.autocast("cuda"):\n    y = model(x)',
        'import torch\nwith torch.autocast("cuda"):\n    y = model(x)',
        'from torch.amp import GradScaler\nscaler = GradScaler("cuda")',
        "import torch\nscaler = torch.amp.GradScaler('cuda') if new else torch.cuda.amp.GradScaler()",
        "import torch\nif torch.__version__ < '2.4':\n    scaler = torch.cuda.amp.GradScaler()",
        "import torch\ndef make():\n    if hasattr(torch.amp, 'GradScaler'):\n"
        "        return torch.amp.GradScaler('cuda')\n    return torch.cuda.amp.GradScaler()",
        "from apex.cuda.amp import autocast\nimport torch\nwith autocast():\n    y = model(x)",
    )
    bad = (
        Bad(
            "import torch\nwith torch.cuda.amp.autocast():\n    y = model(x)",
            fixed='import torch\nwith torch.amp.autocast("cuda"):\n    y = model(x)',
        ),
        Bad(
            "import torch as t\nfrom torch.cuda.amp import autocast as cast, GradScaler\n"
            "scaler = GradScaler(1024.0, enabled=amp)\nwith cast(amp, dtype=t.float16):\n    y = model(x)",
            fixed="import torch as t\nfrom torch.cuda.amp import autocast as cast, GradScaler\n"
            'scaler = t.amp.GradScaler("cuda", 1024.0, enabled=amp)\n'
            'with t.amp.autocast("cuda", enabled=amp, dtype=t.float16):\n    y = model(x)',
        ),
        Bad(
            "import torch\nwith torch.cpu.amp.autocast(dtype=torch.bfloat16):\n    y = model(x)",
            fixed='import torch\nwith torch.amp.autocast("cpu", dtype=torch.bfloat16):\n    y = model(x)',
        ),
        "from torch.cuda.amp import autocast\nwith autocast():\n    y = model(x)",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A call of an old name."""
        path = self.source.path(node.func)
        if not path.startswith(("torch.cuda.amp.", "torch.cpu.amp.")) or path.count(".") != 3:
            return
        device, name = path.split(".")[1], path.rpartition(".")[2]
        if not self._is_fallback(node, name):
            self.report(
                node,
                seen=f"{path} is deprecated since torch 2.4",
                advice=f'torch.amp.{name}("{device}", …){", which is there since torch 2.3" * (name == "GradScaler")}',
                fix="amp-by-device",
            )

    def _is_fallback(self, node: ast.Call, name: str) -> bool:
        """Whether the new name stands beside it, for torch before 2.4; or a test of the version above it."""
        tests = [above.test for above in self.source.ancestors(node) if isinstance(above, (ast.If, ast.IfExp))]
        if any("version" in ast.unparse(test).lower() for test in tests):
            return True
        if "torch.amp" not in self.source.text:
            return False
        new = (f"torch.amp.{name}", f"torch.{name}")
        return any(
            isinstance(above, (ast.If, ast.IfExp, ast.Try))
            and any(
                isinstance(one, (ast.Attribute, ast.Name)) and self.source.path(one) in new for one in ast.walk(above)
            )
            for above in (*self.source.ancestors(node), *self._left_before(node))
        )

    def _left_before(self, node: ast.AST) -> list[ast.If]:
        """What returns before a node is reached: `if …: return …`, in the blocks around it."""
        found = list[ast.If]()
        below = node
        for above in self.source.ancestors(node):
            for block in (getattr(above, "body", None), getattr(above, "orelse", None)):
                statements = cast("list[ast.AST]", block) if isinstance(block, list) else []
                if below in statements:
                    earlier = [one for one in statements[: statements.index(below)] if isinstance(one, ast.If)]
                    found += [one for one in earlier if isinstance(one.body[-1], ast.Return)]
            below = above
        return found
