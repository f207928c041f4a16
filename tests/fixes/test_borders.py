"""Casts where a value meets another dtype: FP32 and back, integers, islands of FP32, products and writes."""

import pytest
import torch
from tests.fixes.sources import HEAD, candidates

CHANGES = [
    (
        "cancellation",
        "aten.sub",
        "return (x - y) / w.sqrt()",
        {
            "float-operands": "return (x.float() - y) / w.sqrt()",
            "float-and-back": "return ((x.float() - y) / w.sqrt()).to(x.dtype)",
        },
    ),
    (
        "product-overflow",
        "aten.pow",
        "return self.lin(x * torch.rsqrt(x[0].pow(2).mean(-1) + 1e-3))",
        {
            "float-operands": "return self.lin(x * torch.rsqrt(x[0].float().pow(2).mean(-1) + 1e-3))",
            "float-and-back": "return self.lin((x * torch.rsqrt(x[0].float().pow(2).mean(-1) + 1e-3)).to(x.dtype))",
            "fp32-island": "with torch.autocast(x.device.type, enabled=False):\n"
            "return self.lin((x * torch.rsqrt(x[0].pow(2).mean(-1) + 1e-3)).float())",
        },
    ),
    ("integer-not-exact", "aten._to_copy", "p = x.to(y.dtype)", {"fp32-cast": "p = x.float()"}),
    ("integer-not-exact", "aten._to_copy", "p = x.half()[:, None] * w", {"fp32-cast": "p = x.float()[:, None] * w"}),
    (
        "integer-not-exact",
        "aten.arange",
        "p = torch.arange(9, device=x.device, dtype=x.dtype)",
        {"fp32-cast": "p = torch.arange(9, device=x.device, dtype=torch.float32)"},
    ),
    (
        "integer-not-exact",
        "aten._to_copy",
        "p = x.to(x.device, torch.bfloat16)",
        {"fp32-cast": "p = x.to(x.device, torch.float32)"},
    ),
    (
        "activation-overflow",
        "aten.mm",
        "return self.wo(x)  # kept",
        {"fp32-island": "with torch.autocast(x.device.type, enabled=False):\nreturn self.wo(x.float())  # kept"},
    ),
    (
        "activation-overflow",
        "aten.addmm",
        "y = x + self.wo(F.relu(self.wi(x)))",
        {
            "fp32-island": "with torch.autocast(x.device.type, enabled=False):\n"
            "y = x + self.wo(F.relu(self.wi(x.float())).float())"
        },
    ),
    (
        "activation-overflow",
        "aten.bmm",
        "y = self.w @ x.transpose(1, 2)",
        {
            "fp32-island": "with torch.autocast(x.device.type, enabled=False):\n"
            "y = self.w.float() @ x.transpose(1, 2).float()"
        },
    ),
    (
        "activation-overflow",
        "aten.addmm",
        "y = F.linear(x, w, None)",
        {"fp32-island": "with torch.autocast(x.device.type, enabled=False):\ny = F.linear(x.float(), w.float(), None)"},
    ),
    ("autocast-region-misuse", "aten.addmm", "y = self.head(x + 1)", {"float-input": "y = self.head((x + 1).float())"}),
    (
        "dtype-mismatch",
        "aten.addmm",
        "y = self.head(x)",
        {"input-dtype": "y = self.head(x.to(next(self.head.parameters()).dtype))"},
    ),
    (
        "dtype-mismatch",
        "aten.index_add_",
        "out[0].index_add_(0, i, x * y)",
        {"source-dtype": "out[0].index_add_(0, i, (x * y).to(out.dtype))"},
    ),
    (
        "dtype-mismatch",
        "aten.scatter_add",
        "y = torch.scatter_add(out, 0, i, x)",
        {"source-dtype": "y = torch.scatter_add(out, 0, i, x.to(out.dtype))"},
    ),
    ("dtype-mismatch", "aten.index_put_", "out[i] = x * 2", {"write-dtype": "out[i] = (x * 2).to(out.dtype)"}),
    ("dtype-mismatch", "aten.mm", "return x @ w.t(), y", {"product-dtype": "return x.to(w.dtype) @ w.t(), y"}),
    ("dtype-mismatch", "aten.mm", "y = torch.matmul(x, w)", {"product-dtype": "y = torch.matmul(x.to(w.dtype), w)"}),
]


@pytest.mark.parametrize(("cause", "op", "old", "new"), CHANGES)
def test_a_line_gets_these_changes(tmp_path, cause, op, old, new):
    assert candidates(tmp_path, cause, op, old) == new


@pytest.mark.parametrize(
    ("cause", "op", "old"),
    [
        ("integer-not-exact", "aten._to_copy", "p = x.to(x.device)"),
        ("integer-not-exact", "aten._to_copy", "p = x.to(y)"),
        ("integer-not-exact", "aten._to_copy", "p = x.to(torch.float32)"),
        ("integer-not-exact", "aten.arange", "p = torch.arange(9, dtype=torch.long)"),
        ("integer-not-exact", "aten.arange", "p = torch.arange(9)"),
        ("activation-overflow", "aten.mm", "y = self.attention(x, mask)"),  # a mask of FP32 is another mask
        ("activation-overflow", "aten.mm", "y = self.f(x)"),  # a method
        ("activation-overflow", "aten.mm", "y = net(x)"),
        ("autocast-region-misuse", "aten.addmm", "y = self.head(x.float())"),
        ("dtype-mismatch", "aten.index_put_", "out[i] = 0.0"),
        ("dtype-mismatch", "aten.mm", "out['loss'] = x"),
        ("dtype-mismatch", "aten.scatter_", "out.scatter_(0, i, 1.0)"),
        ("dtype-mismatch", "aten.add", "y = x + w"),
        ("reduction-overflow", "aten.sum", "y = x.float().sum()"),
    ],
)
def test_a_near_miss_stays(tmp_path, cause, op, old):
    assert candidates(tmp_path, cause, op, old) == {}


def test_no_island_without_torch(tmp_path):
    head = "from torch import nn\n"
    assert candidates(tmp_path, "activation-overflow", "aten.mm", "return self.wo(x)", head=head) == {}


def test_a_dtype_under_another_name_is_followed(tmp_path):
    old = "kind = w.dtype\np = x.to(kind)"
    assert candidates(tmp_path, "integer-not-exact", "aten._to_copy", old) == {"fp32-cast": "p = x.float()"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("shadow = [p.clone().half() for p in x]", "shadow = [p.clone().float() for p in x]"),
        ("shadow = torch.zeros(3, dtype=torch.float16)", "shadow = torch.zeros(3, dtype=torch.float32)"),
    ],
)
def test_an_average_is_kept_in_fp32_where_it_is_made(tmp_path, old, new):
    code = f"{old}\nfor e, p in zip(shadow, x):\n    e.add_(p.to(e.dtype) - e, alpha=0.001)"
    assert candidates(tmp_path, "accumulator-stagnation", "aten.add_", code) == {"fp32-cast": new}


def test_a_variance_is_made_in_two_passes_where_it_is_made(tmp_path):
    code = "m = x.mean(0)\nv = (x * x).mean(0) - m * m\nreturn (x - m) / v.sqrt()"
    found = candidates(tmp_path, "cancellation", "aten.sqrt", code)
    assert next(iter(found.items())) == ("two-pass-variance", "v = x.var(dim=0, unbiased=False)")


def test_fp16_weights_become_fp32_only_where_autocast_is_used(tmp_path):
    old = "model = self.net.half().cuda()"
    found = candidates(tmp_path, "fp16-params-with-scaler", "", old, head=HEAD + "region = torch.autocast('cpu')\n")
    assert found == {"fp32-weights": "model = self.net.float().cuda()"}
    assert candidates(tmp_path, "fp16-params-with-scaler", "", old) == {}


@pytest.mark.parametrize(("cause", "op", "old", "new"), CHANGES)
def test_the_change_is_the_same_function_in_fp32(tmp_path, cause, op, old, new):
    g = torch.Generator().manual_seed(0)

    class Owner:
        lin, wo, wi, head = (torch.nn.Linear(4, 4) for _ in range(4))
        w = torch.randn(2, 4, 4, generator=g)

    def compute(code):
        x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
        if cause == "integer-not-exact":
            x = torch.arange(4)
        if ("mm" in op and cause == "dtype-mismatch") or "index" in op or "scatter" in op:
            x = x[0]
        values = {"self": Owner, "x": x, "y": x.float().abs() + 1, "w": torch.rand(4, 4), "torch": torch}
        values |= {"F": torch.nn.functional, "out": torch.zeros(4, 4), "i": torch.tensor([0, 1, 2, 3])}
        if "scatter" in op:
            values["i"] = torch.zeros(4, 4, dtype=torch.long)
        if "out[0]" in code:
            values["out"] = torch.zeros(1, 4, 4)
        head, _, last = code.partition("\n")
        code = f"{head}\n    {last}" if last else head
        exec(code.replace("return ", "result = "), values)
        return [values.get(name) for name in ("result", "y", "p", "out")]

    torch.manual_seed(0)
    before = compute(old)
    for code in new.values():
        torch.manual_seed(0)
        for one, other in zip(compute(code), before, strict=True):
            torch.testing.assert_close(one, other, check_dtype=False, rtol=2e-3 if "half" in old else 1e-5, atol=1e-6)
