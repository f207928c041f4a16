"""Runs of Weights & Biases' server, brought here as files by its GraphQL API, without W&B's package."""

from __future__ import annotations

import base64
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, cast

from floatline.base.files import write_whole
from floatline.errors import ComparisonError
from floatline.validation.metrics.recorded import as_number, parse_json

PREFIX = "wandb:"
KEPT = Path("floatline-runs/wandb")
_FORM = f"{PREFIX}ENTITY/PROJECT/RUN, with more runs after commas"
_NAME = re.compile(r"(?!\.+$)[\w.-]{1,128}")
_SECONDS = 60.0
_MOST_BYTES = 256 << 20
_MOST_ROWS = 1_000_000
_ABOUT = """query Run($project: String!, $entity: String!, $name: String!) {
  project(name: $project, entityName: $entity) { run(name: $name) { config summaryMetrics historyLineCount } }
}"""
_HISTORY = """query RunFullHistory($project: String!, $entity: String!, $name: String!, $samples: Int) {
  project(name: $project, entityName: $entity) { run(name: $name) { history(samples: $samples) } }
}"""


def fetch_runs(text: str) -> Path:
    """Write history, config and summary of each run into a folder below `floatline-runs/wandb`, and say where.

    The key is WANDB_API_KEY, the server WANDB_BASE_URL or W&B's own, as for W&B's package.

    Args:
        text: 'wandb:ENTITY/PROJECT/RUN', with more runs after commas.

    Raises:
        ComparisonError: The text names no run, there is no key, or the server does not answer with one.
    """
    parts = text.removeprefix(PREFIX).split("/")
    names = parts[-1].split(",")
    if len(parts) != 3 or not all(_NAME.fullmatch(name) for name in (*parts[:2], *names)):
        raise ComparisonError(f"'{text}' does not name runs of W&B. Write {_FORM}.")
    folder = KEPT.joinpath(*parts[:2], "+".join(names))
    for name in names:
        _fetch(parts[0], parts[1], name, folder / name)
    return folder


def _fetch(entity: str, project: str, name: str, folder: Path) -> None:
    wanted = {"entity": entity, "project": project, "name": name}
    about = _ask(_ABOUT, wanted)
    rows = about.get("historyLineCount")
    samples = min(rows if isinstance(rows, int) and rows > 0 else 1, _MOST_ROWS)
    lines = [line for line in _list(_ask(_HISTORY, {**wanted, "samples": samples}).get("history")) if _object(line)]
    logged = {key for line in lines for key in _object(line)}
    finals = {key: value for key, value in _object(about.get("summaryMetrics")).items() if key not in logged}
    config = {key: value["value"] for key, value in _object(about.get("config")).items() if "value" in _dict(value)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # As the server wrote them; JSON has line breaks only between its words.
        write_whole(folder / "history.jsonl", "".join(" ".join(line.splitlines()) + "\n" for line in lines))
        write_whole(folder / "config.json", json.dumps(_plain(config), allow_nan=False) + "\n")
        write_whole(folder / "summary.json", json.dumps(_plain(finals), allow_nan=False) + "\n")
    except OSError as error:
        raise ComparisonError(f"{folder} cannot be written: {error.strerror}. Go to another folder.") from None


def _ask(query: str, variables: dict[str, Any]) -> dict[str, Any]:
    """What the server says about a run."""
    name = f"{variables['entity']}/{variables['project']}/{variables['name']}"
    server, body = _server(), json.dumps({"query": query, "variables": variables}, allow_nan=False).encode()
    user = base64.b64encode(f"api:{_key()}".encode()).decode()
    headers = {"Authorization": f"Basic {user}", "Content-Type": "application/json", "Accept": "application/json"}
    asked = urllib.request.Request(f"{server}/graphql", body, headers)  # noqa: S310 - the scheme was looked at
    try:
        with urllib.request.build_opener(_StayThere).open(asked, timeout=_SECONDS) as answer:
            text = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        why = "refuses WANDB_API_KEY" if error.code in (401, 403) else f"answers with HTTP {error.code}"
        raise ComparisonError(f"{server} {why} for run '{name}'. Check the key and the server.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ComparisonError(f"{server} cannot be reached: {reason}. Give offline runs (run-*.wandb).") from None
    if len(text) > _MOST_BYTES:
        raise ComparisonError(f"Run '{name}' is larger than {_MOST_BYTES >> 20} MiB. Give its offline file.")
    said = _object(text.decode("utf-8", errors="replace"))
    for problem in _list(said.get("errors")):
        words = " ".join(str(_dict(problem).get("message")).split())
        raise ComparisonError(f"{server} says of run '{name}': {words:.200}. Check the name.")
    found = _dict(_dict(said.get("data")).get("project")).get("run")
    if not isinstance(found, dict):
        raise ComparisonError(f"{server} has no run '{name}', or the key may not see it. Check the name.")
    return cast("dict[str, Any]", found)


def _key() -> str:
    key = os.environ.get("WANDB_API_KEY", "").strip()
    if not key:
        raise ComparisonError("WANDB_API_KEY is not set. Set it, or give offline runs (run-*.wandb).")
    return key


def _server() -> str:
    """The server's address; a key goes to no other machine without encryption."""
    address = os.environ.get("WANDB_BASE_URL", "").strip().rstrip("/") or "https://api.wandb.ai"
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")):
        return address
    raise ComparisonError(f"WANDB_BASE_URL is '{address}', to which a key would go unencrypted. Give an https address.")


class _StayThere(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which would take the key along."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _object(text: Any) -> dict[str, Any]:
    return _dict(parse_json(text)) if isinstance(text, str) else {}


def _dict(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers and words; NaN and infinity as words, and nothing that is nested."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        number = as_number(value)
        if isinstance(value, str | bool | int):
            kept[name] = value
        elif number is not None:
            kept[name] = number if number - number == 0.0 else str(number)
    return kept
