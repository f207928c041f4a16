"""What could run code out of a file is not in the source: no pickle, no full YAML, no eval, no shell, no network."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "floatline"
NAMES = {"eval", "exec", "compile", "__import__"}
MODULES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code", "codeop", "pty"),
    *(
        "urllib.request",
        "http.client",
        "http.server",
        "requests",
        "httpx",
        "aiohttp",
        "ftplib",
        "smtplib",
        "xml",
        "runpy",
    ),
}
CALLS = {
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.unsafe_load_all"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "socket.create_connection"),
    *("importlib.import_module", "torch.hub.load", "torch.jit.load", "torch.package.PackageImporter"),
}
IMPORTS = {"importlib.import_module"}
ALLOWED = {
    # What the user names on the command line is run: that is what they ask for.
    "probe/scripts/run.py": {"compile", "exec", "runpy"},
    "workload/target.py": IMPORTS,
    # Modules of floatline and its optional packages, by names that no file holds.
    "base/offered.py": IMPORTS,
    "integrations/loggers/logger.py": IMPORTS,
    "lint/rules/__init__.py": IMPORTS,
    "lint/settings.py": IMPORTS,
    "optim/kernels/__init__.py": IMPORTS,
    # A child process is told what to call by its parent, through a folder that only this user can read.
    "diagnosis/changed_runs.py": IMPORTS,  # as the next
    "running/quiet_runs.py": IMPORTS,  # floatline's own, by names that its parent wrote
    "validation/running/child.py": IMPORTS,
    "validation/running/jobs.py": IMPORTS,
    # Asks W&B's server for numbers, only where the user names a run of it; JSON is read, and nothing is run.
    "validation/metrics/wandb_api.py": {"urllib.request"},
}


def find_dangers(source: str) -> list[str]:
    """Imports and calls of a source that could run what a file holds."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _is_one(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if name in CALLS or _is_one(node.module) or _is_one(name)]
        elif isinstance(node, ast.Call):
            found += _judge(node)
    return found


def _is_one(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in MODULES)


def _judge(call: ast.Call) -> list[str]:
    name = ast.unparse(call.func)
    options = {option.arg: ast.unparse(option.value) for option in call.keywords}
    if name == "importlib.import_module" and isinstance(call.args[0], ast.Constant):
        return []  # a module that the source names
    if name in NAMES or name in CALLS:
        return [name]
    if name == "torch.load" and options.get("weights_only") != "True":
        return ["torch.load without weights_only=True"]
    if name in ("np.load", "numpy.load") and options.get("allow_pickle") != "False":
        return ["np.load without allow_pickle=False"]
    if options.get("shell", "False") != "False":
        return ["a shell"]
    if options.get("trust_remote_code", "False") != "False":
        return ["trust_remote_code"]
    if name.endswith(("Environment", "Template")) and "jinja" not in name and name != "Template":
        return [] if options.get("autoescape") == "True" else ["a template that does not escape"]
    return []


def dangers_of(path: Path) -> set[str]:
    return set(find_dangers(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("room", sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")}))
def test_nothing_in_the_source_runs_what_a_file_holds(room):
    files = [SOURCE / room] if room.endswith(".py") else sorted((SOURCE / room).rglob("*.py"))
    found = {}
    for path in files:
        name = path.relative_to(SOURCE).as_posix()
        if left := dangers_of(path) - ALLOWED.get(name, set()):
            found[name] = left
    assert found == {}


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_what_is_allowed_is_still_needed(name):
    assert dangers_of(SOURCE / name) == ALLOWED[name]


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import xml.etree.ElementTree", "from urllib import request"),
        *("eval(x)", "exec(x)", "compile(x, '', 'exec')", "__import__(x)", "yaml.load(x)", "yaml.unsafe_load(x)"),
        *("torch.load(x)", "torch.load(x, weights_only=False)", "np.load(x)", "np.load(x, allow_pickle=True)"),
        *("subprocess.run(x, shell=True)", "os.system(x)", "importlib.import_module(x)", "Environment()"),
        *("from importlib import import_module", "from yaml import unsafe_load", "f(x, trust_remote_code=True)"),
    ],
)
def test_a_danger_would_be_found(source):
    assert find_dangers(source)


@pytest.mark.parametrize(
    "source",
    [
        *("yaml.safe_load(x)", "torch.load(x, weights_only=True)", "re.compile(x)", "model.eval()", "json.loads(x)"),
        *(
            "np.load(x, allow_pickle=False)",
            "subprocess.run(x)",
            "Environment(autoescape=True)",
            "from urllib.parse import quote",
        ),
    ],
)
def test_what_is_no_danger_is_left_alone(source):
    assert not find_dangers(source)
