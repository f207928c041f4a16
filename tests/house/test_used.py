"""Nothing in src is there for its tests alone: what is defined is used by src, or named where users and tools look."""

import re
from collections import Counter
from pathlib import Path

import floatline

ROOT = Path(__file__).parents[2]
SOURCE = Path(floatline.__file__).parent
# Where a name is offered to people, or used by what makes pages and figures.
ELSEWHERE = (
    "README.md", "docs/**/*.md", "examples/*.py", "tools/*.py", "benchmarks/*.py", "src/floatline/report/templates/*",
)  # fmt: skip
_PROSE = re.compile(r'""".*?"""|#[^\n"]*$', re.DOTALL | re.MULTILINE)
_DEFINED = re.compile(
    r"(?:^ *@([\w.]+)[^\n]*\n)?^ *(?:async )?(?:def|class) (\w+)|^([A-Z_]\w*)(?:: [^=\n]+)? = ", re.MULTILINE
)
# A decorator that is none of these registers what it stands at.
_PLAIN = {"", "dataclass", "property", "staticmethod", "classmethod", "contextmanager", "cache", "no_grad"}
# Called by others by these names: visitors of trees, hooks of frameworks, protocols of Python and torch.
_ASKED_FOR = re.compile(r"__\w+__|(visit|leave|on)_\w+|convert_\w+|\w+_context")
_PROTOCOLS = {
    "_unscale_grads_": "torch's GradScaler",
    "clip_gradients": "lightning's plugins",
    "create_module": "importlib's loaders",
    "answer_job": "the process of a target whose code is changed",
    "format_help": "click's commands",
    "record_event": "torch.cuda.Stream",
    "redirect_request": "urllib's handlers",
    "step_was_skipped": "accelerate's optimizers",
    "validation_step": "lightning's modules",
    "wait_event": "torch.cuda.Stream",
    "wait_stream": "torch.cuda.Stream",
}
# Only tests use them, each for a reason.
_KEPT = {
    "copy_to": "how a user takes the averages of `Guard.averaged`",
    "num_overflows": "a count of the accounts that a ledger gives",
    "per_parameter": "a column of the footprint that `optimizer.memory()` gives",
}


def unused(sources: dict[str, str], elsewhere: str) -> list[str]:
    """What nothing but its own definitions names, as `file: name`; docstrings and comments do not count."""
    code = {file: _PROSE.sub("", text) for file, text in sources.items()}
    defined = {file: list(_DEFINED.findall(text)) for file, text in code.items()}
    counts = Counter(word for text in code.values() for word in re.findall(r"\w+", text))
    counts.subtract(name or constant for found in defined.values() for _, name, constant in found)
    known = {*re.findall(r"\w+", elsewhere), *_PROTOCOLS, *_KEPT}
    return [
        f"{file}: {name or constant}"
        for file, found in defined.items()
        for decorator, name, constant in found
        if not counts[name or constant]
        and (name or constant) not in known
        and decorator.rpartition(".")[2] in _PLAIN
        and not _ASKED_FOR.fullmatch(name or constant)
        and not ("rules" in Path(file).parts and name[:1].isupper())  # a rule is found by its code
    ]


def test_nothing_in_src_is_used_by_tests_alone():
    sources = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    pages = [path.read_text(encoding="utf-8") for pattern in ELSEWHERE for path in ROOT.glob(pattern)]
    assert unused(sources, "\n".join(pages)) == []


def test_what_only_its_definition_names_is_found():
    source = "LEFT = 1  # lost\nclass Kept:\n    def lost(self): ...\n    @property\n    def read(self): ..."
    assert unused({"a.py": source}, "`Kept` is documented") == ["a.py: LEFT", "a.py: lost", "a.py: read"]
    assert unused({"a.py": source, "b.py": "Kept().lost(LEFT, getattr(x, 'read'))"}, "") == []
