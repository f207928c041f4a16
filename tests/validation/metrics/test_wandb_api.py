"""Runs on a server that answers W&B's GraphQL: what is asked, what is read, and one line where it does not work."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from floatline.errors import ComparisonError
from floatline.validation.finished import compare
from floatline.validation.metrics.wandb_api import fetch_runs

KEY = "k" * 40


def run_of(seed, offset):
    """A run as W&B's server tells it: JSON in strings, settings with a description, NaN as a word."""
    rows = [{"_step": step, "val/hmean": 0.5 + 0.1 * step + 0.01 * seed + offset, "loss": "NaN"} for step in range(4)]
    return {
        "name": f"run{seed}",
        "state": "finished",
        "config": json.dumps({"seed": {"value": seed, "desc": None}, "_wandb": {"value": {"t": {}}}}),
        "summaryMetrics": json.dumps({"val/hmean": 0.99, "best": 0.9, "_runtime": 3, "worst": "NaN"}),
        "historyLineCount": len(rows),
        "history": [json.dumps(row) for row in rows],
    }


RUNS = {f"{arm}{seed}": run_of(seed, off) for arm, off in (("a", 0.0), ("b", 0.0004), ("c", -0.2)) for seed in range(4)}


class Server(BaseHTTPRequestHandler):
    """Answers what W&B's own client asks about a run: the fields that the query names, and no other."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        user = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
        if self.path != "/graphql" or user != f"api:{KEY}":
            self.send_response(302 if self.server.sends_away else 401)
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            return
        names = asked["variables"]
        found = RUNS.get(names["name"]) if names["project"] == "ocr" else None
        run = None if found is None else {key: value for key, value in found.items() if key in asked["query"]}
        if run is not None and "history" in run and "samples" in names:
            run["history"] = run["history"][: names["samples"]]
        answer = {"data": {"project": {"run": run}}}
        if names["name"] == "broken":
            answer = {"errors": [{"message": "internal\nerror"}], "data": None}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    made = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    made.sends_away = False
    threading.Thread(target=made.serve_forever, daemon=True).start()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{made.server_port}/")
    yield made
    made.shutdown()
    made.server_close()


def test_runs_are_brought_here_with_their_history_seed_and_summary(server):
    folder = fetch_runs("wandb:team/ocr/a0,a1")
    rows = [json.loads(line) for line in (folder / "a1" / "history.jsonl").read_text().splitlines()]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3] and rows[3]["val/hmean"] == pytest.approx(0.81)
    assert json.loads((folder / "a1" / "config.json").read_text())["seed"] == 1
    # The summary may hold a best value under the same name: the history is what counts.
    assert json.loads((folder / "a1" / "summary.json").read_text()) == {"best": 0.9, "_runtime": 3, "worst": "NaN"}


@pytest.mark.parametrize(("arm", "verdict"), [("b", "PASS"), ("c", "FAIL")])
def test_two_arms_on_the_server_are_compared_by_seed(server, arm, verdict):
    sides = [f"wandb:team/ocr/{','.join(f'{name}{seed}' for seed in range(4))}" for name in ("a", arm)]
    result = compare(*sides, metric="val/hmean", higher_is_better=True)
    assert (result.verdict, result.reference, len(result.seeds)) == (verdict, sides[0], 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("wandb:team/ocr", "does not name runs of W&B"),
        ("wandb:team/ocr/a0,", "does not name runs of W&B"),
        ("wandb:team/../a0", "does not name runs of W&B"),
        ("wandb:team/ocr/gone", "has no run 'team/ocr/gone'"),
        ("wandb:team/other/a0", "has no run 'team/other/a0'"),
        ("wandb:team/ocr/broken", "says of run 'team/ocr/broken': internal"),
    ],
)
def test_a_wrong_name_is_one_line(server, text, says):
    with pytest.raises(ComparisonError, match="^[^\n]*$") as error:
        fetch_runs(text)
    assert says in str(error.value)


def test_a_key_is_needed_and_goes_nowhere_unencrypted_or_elsewhere(server, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "wrong" * 8)
    with pytest.raises(ComparisonError, match="refuses WANDB_API_KEY"):
        fetch_runs("wandb:team/ocr/a0")
    server.sends_away = True
    with pytest.raises(ComparisonError, match="answers with HTTP 302"):
        fetch_runs("wandb:team/ocr/a0")
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.example.org")
    with pytest.raises(ComparisonError, match="would go unencrypted. Give an https address"):
        fetch_runs("wandb:team/ocr/a0")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    with pytest.raises(ComparisonError, match="cannot be reached"):
        fetch_runs("wandb:team/ocr/a0")
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(ComparisonError, match="WANDB_API_KEY is not set"):
        fetch_runs("wandb:team/ocr/a0")
