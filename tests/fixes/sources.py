"""Files with code to fix, findings in them, and what a fix makes of them."""

import textwrap

from floatline.causes import find_cause
from floatline.findings import Finding
from floatline.fixes import find_fixes

HEAD = "import torch\nimport torch.nn.functional as F\n"


def write(tmp_path, text, head=HEAD, name="code.py"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + textwrap.dedent(text), encoding="utf-8")
    return path


def changed(fix):
    """The new lines of a fix."""
    lines = [line[1:].strip() for line in fix.patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
    return "\n".join(lines)


def finding(path, line, cause, op=""):
    return Finding(find_cause(cause), seen="", fix="", file=str(path), line=line, op=op)


def candidates(tmp_path, cause, op, old, head=HEAD, arguments="self, x, y, w, out, i, mask, scaler, opt"):
    """What replaces a line, by the kind of each change that is known for it; each compiles.

    That the whole function is computed in FP32 is left out: it may stand behind any of them.
    """
    lines = textwrap.dedent(old).strip().splitlines()
    body = "".join(f"    {line}\n" for line in lines)
    path = write(tmp_path, f"\n\ndef f({arguments}):\n{body}", head=head)
    line = path.read_text(encoding="utf-8").count("\n")
    found = {}
    for fix in find_fixes(finding(path, line, cause, op)):
        compile(fix.after, "after", "exec")
        if fix.kind != "fp32-function":
            found.setdefault(fix.kind, changed(fix))
    return found


def spans(tmp_path, cause, text, op="", part="", head=HEAD):
    """The whole file after each change that is known for the line that ends with `# here`, by kind; each compiles."""
    path = write(tmp_path, text, head=head)
    lines = path.read_text(encoding="utf-8").splitlines()
    (line,) = [at for at, one in enumerate(lines, 1) if one.endswith("# here")]
    found = {}
    place = Finding(find_cause(cause), seen="", fix="", module=part, file=str(path), line=line, op=op)
    for fix in find_fixes(place):
        compile(fix.after, "after", "exec")
        found.setdefault(fix.kind, fix.after)
    return found
