"""Calls in Python that configure a run, as a document: what `TrainingArguments(fp16=True)` says, YAML says too."""

from __future__ import annotations

import ast

from floatline.lint.configs.kinds import OPTIMIZERS, recognise
from floatline.lint.configs.loads import LOADED_ELSEWHERE, find_half_load, find_load, read_torch_name
from floatline.lint.configs.view import NESTED, UNKNOWN, Key, Kind, Path, RunConfig, Setting, SettingsDocument
from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import keyword, read_once

# A file without any of these configures nothing that is known here.
_SIGNS = (
    "TrainingArguments",
    "lightning",
    "Accelerator",
    "GradScaler",
    "autocast",
    "zero_optimization",
    "apex",
    "trl",
)
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_TRAINERS = ("transformers", "trl", "sentence_transformers")
_NOT_ARGUMENTS = frozenset(("ModelConfig", "DatasetMixtureConfig", "ScriptArguments", "LoraConfig", "PeftConfig"))
_POSITIONS: dict[str, tuple[str, ...]] = {
    "torch.amp.GradScaler": ("device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
    "torch.cuda.amp.GradScaler": ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
    "torch.autocast": ("device_type", "dtype", "enabled"),
    "torch.amp.autocast": ("device_type", "dtype", "enabled"),
    "torch.cuda.amp.autocast": ("enabled", "dtype"),
    "transformers.TrainingArguments": ("output_dir",),
}
_MOST = 5_000  # settings of a file
_DEEPEST = 8  # of dictionaries in each other


@read_once
def read_calls(source: Source) -> SettingsDocument:
    """The document of a Python file."""
    document = SettingsDocument(source.file, source.text, is_python=True)
    if not any(sign in source.text for sign in _SIGNS):
        return document
    reader = _Reader(source, document)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            reader.read_call(node)
        elif isinstance(node, ast.Dict):
            reader.read_dict(node)
        if len(reader.settings) > _MOST:
            break
    document.settings, document.configs = reader.settings, tuple(reader.configs)
    return document


class _Reader:
    """Collects the settings and the known calls of one file."""

    def __init__(self, source: Source, document: SettingsDocument) -> None:
        self.source, self.document = source, document
        self.settings: dict[Path, Setting] = {}
        self.configs: list[RunConfig] = []

    def read_call(self, node: ast.Call) -> None:
        """A call, where it configures something, or trains a model that another call loads."""
        path = self.source.path(node.func)
        if not path:
            if isinstance(node.func, ast.Attribute) and node.func.attr == "prepare":
                owner = self.source.value(node.func.value)
                if self.source.is_call_to(owner, "accelerate.Accelerator", "accelerate.accelerator.Accelerator"):
                    for arg in node.args:
                        self._read_checkpoint(arg)
            return
        home, last = path.partition(".")[0], path.rpartition(".")[2]
        if home in _TRAINERS and last.endswith("Trainer"):
            if (model := _model_in(node)) is not None:
                self._read_checkpoint(model)
        elif home == "transformers" and last == "from_pretrained":
            if self._is_part_of_lightning_module(node):
                self._read_checkpoint(node)
        elif (kind := _kind_of(path, home, last)) is not None:
            self._add(kind, node, path)

    def read_dict(self, node: ast.Dict) -> None:
        """A dictionary that is a DeepSpeed configuration."""
        keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if "zero_optimization" not in keys and "fp16" not in keys:
            return
        root: Path = (f"dict:{node.lineno}:{node.col_offset}",)
        settings: dict[Path, Setting] = {}
        self._read_items(node, root, settings)
        below: dict[Key, Setting] = {path[-1]: one for path, one in settings.items() if len(path) == len(root) + 1}
        if recognise(root, below)[0] != "deepspeed":
            return
        self.settings.update(settings)
        place = self._setting(root, node, NESTED)
        is_open = any(key is None for key in node.keys)
        self.configs.append(RunConfig("deepspeed", root, self.document, place, is_open=is_open))

    def _read_items(self, node: ast.Dict, root: Path, settings: dict[Path, Setting]) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str) or len(root) > _DEEPEST:
                continue
            path = (*root, key.value)
            made = self.source.value(value)
            is_dict = isinstance(made, ast.Dict)
            settings[path] = self._setting(path, key, NESTED if is_dict else self._value(value), end=value)
            if isinstance(made, ast.Dict):
                self._read_items(made, path, settings)

    def _add(self, kind: Kind, node: ast.Call, path: str) -> None:
        root: Path = (f"{path}:{node.lineno}:{node.col_offset}",)
        names = _POSITIONS.get(path, ())
        for name, arg in zip(names, node.args, strict=False):
            self.settings[(*root, name)] = self._setting((*root, name), arg, self._value(arg))
        is_open = any(isinstance(arg, ast.Starred) for arg in node.args)
        for word in node.keywords:
            if word.arg is not None:
                self.settings[(*root, word.arg)] = self._setting((*root, word.arg), word, self._value(word.value))
            elif (given := self._find_dict(word.value)) is not None:
                self._read_items(given, root, self.settings)
            else:
                is_open = True
        if kind == "adapter":
            self._read_base(root, node)
        place = self._setting(root, node, NESTED)
        self.configs.append(RunConfig(kind, root, self.document, place, path, is_open=is_open))

    def _read_checkpoint(self, node: ast.expr) -> None:
        """A model that is trained, where this file loads it, or calls a function of another one that does."""
        if (loaded := find_load(self.source, node)) is not None:
            self._add("checkpoint", loaded, self.source.path(loaded.func))
        elif (elsewhere := find_half_load(self.source, node)) is not None:
            call, text = elsewhere
            root: Path = (f"{call.lineno}:{call.col_offset}",)
            path = (*root, LOADED_ELSEWHERE)
            self.settings[path] = self._setting(path, call, "float16")
            place = self._setting(root, call, NESTED)
            self.configs.append(RunConfig("checkpoint", root, self.document, place, self.source.code(call.func)))
            self.document.beside += text  # what it says of adapters and formats counts as if it stood here

    def _read_base(self, root: Path, node: ast.Call) -> None:
        """What the base of an adapter is loaded in, as a setting of the adapter."""
        model = _model_in(node)
        made = None if model is None else self.source.value(model)
        if isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr == "half":
            path = (*root, "base_dtype")
            self.settings[path] = self._setting(path, made, "float16")
            return
        loaded = None if model is None else find_load(self.source, model)
        for word in loaded.keywords if loaded is not None else ():
            if word.arg in ("dtype", "torch_dtype"):
                path = (*root, "base_dtype")
                self.settings[path] = self._setting(path, word, self._value(word.value))

    def _is_part_of_lightning_module(self, node: ast.Call) -> bool:
        """`self.model = AutoModel.from_pretrained(...)` in a LightningModule."""
        statement = self.source.parents.get(node)
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Attribute):
            return False
        owner = self.source.class_of(node)
        return owner is not None and any(self.source.path(base).endswith(".LightningModule") for base in owner.bases)

    def _find_dict(self, node: ast.expr) -> ast.Dict | None:
        """The dictionary behind `**settings`, where the file writes it down and changes nothing in it."""
        made = self.source.value(node)
        if isinstance(node, ast.Name):
            named = [one for one in ast.walk(self.source.tree) if isinstance(one, ast.Name) and one.id == node.id]
            if any(isinstance(self.source.parents.get(one), (ast.Attribute, ast.Subscript)) for one in named):
                return None
        if not isinstance(made, ast.Dict) or not all(isinstance(key, ast.Constant) for key in made.keys):
            return None
        return made

    def _value(self, node: ast.expr) -> object:
        node = self.source.value(node)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Dict):
            return NESTED
        if dtype := read_torch_name(self.source, node):
            return dtype
        number = self.source.number(node)
        return UNKNOWN if number is None else number

    def _setting(self, path: Path, node: ast.expr | ast.keyword, value: object, end: ast.expr | None = None) -> Setting:
        last = end or node
        line, end_line = node.lineno, last.end_lineno or node.lineno
        return Setting(
            path,
            value,
            line,
            self.source.column(line, node.col_offset),
            end_line,
            self.source.column(end_line, last.end_col_offset or 0),
        )


def _model_in(call: ast.Call) -> ast.expr | None:
    """The model that a call is given, by its name or first."""
    return keyword(call, "model") or (call.args[0] if call.args else None)


def _kind_of(path: str, home: str, last: str) -> Kind | None:
    """Whose call it is, by the path that the imports give it."""
    if home in _LIGHTNING and last in ("Trainer", "Fabric"):
        return "fabric" if last == "Fabric" else "lightning"
    if home in _TRAINERS and last.endswith("TrainingArguments"):
        return "transformers"
    if home == "trl" and last.endswith("Config") and last not in _NOT_ARGUMENTS:
        return "transformers"
    if home == "accelerate" and last in ("Accelerator", "GradScalerKwargs"):
        return "scaler" if last == "GradScalerKwargs" else "accelerate"
    if home == "torch":
        return _torch_kind(path, last)
    if path == "apex.amp.initialize":
        return "apex"
    return "adapter" if home == "peft" and last in ("get_peft_model", "from_pretrained") else None


def _torch_kind(path: str, last: str) -> Kind | None:
    if last == "GradScaler":
        return "scaler"
    if last == "autocast":
        return "autocast"
    return "optimizer" if path.startswith("torch.optim.") and last in OPTIMIZERS else None
