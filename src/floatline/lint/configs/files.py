"""YAML, JSON and TOML to documents, with the line of every setting. Hostile files are given up, never expanded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import yaml

from floatline.lint.configs.view import NESTED, UNKNOWN, Key, Path, Setting, SettingsDocument
from floatline.lint.settings import parse_toml

_LARGEST = 300_000  # characters; what is larger was not written by hand
_MOST_SETTINGS = 20_000  # aliases of aliases (the "billion laughs") end here
_DEEPEST = 30
# libyaml reads 10 times as fast; the pure reader is there where it was not built in.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_RESOLVER: Any = yaml.resolver.Resolver()
_MAKER = yaml.constructor.SafeConstructor()
_MAKERS: dict[str, Any] = {
    "tag:yaml.org,2002:bool": _MAKER.construct_yaml_bool,
    "tag:yaml.org,2002:int": _MAKER.construct_yaml_int,
    "tag:yaml.org,2002:float": _MAKER.construct_yaml_float,
}
_INTERPOLATION = re.compile(r"\$\{|\{\{|\{%|^\$\(")
# No two parts of these patterns fit the same character, so that a hostile line takes no longer than another.
_WORD_OF_TOML = r"""(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)"""
_KEY_OF_TOML = re.compile(rf"[ \t]*({_WORD_OF_TOML}(?:[ \t]*\.[ \t]*{_WORD_OF_TOML})*)[ \t]*=")
_TABLE_OF_TOML = re.compile(r"[ \t]*\[\[?([^\[\]]+)\]")


class _Unreadable(Exception):  # noqa: N818 - it never leaves this file
    """The file is broken, or larger than anything that was written by hand."""


def read_documents(text: str, file: str) -> list[SettingsDocument]:
    """The documents of a file; none where it cannot be read: others say so."""
    if len(text) > _LARGEST:
        return []
    try:
        if file.endswith(".toml"):
            return [SettingsDocument(file, text, _read_toml(text))]
        # JSON is YAML but for its tabs.
        source = text.replace("\t", " ") if file.endswith(".json") else text
        trees = [SettingsDocument(file, text, _flatten(node)) for node in _read_yaml(source)]
    except (_Unreadable, yaml.YAMLError, RecursionError, ValueError):
        return []
    for tree in trees:
        tree.is_open = "@package" in text
    return trees


@dataclass
class _Node:
    """A YAML value: a scalar, or keys and items with the nodes below them."""

    line: int
    column: int
    end_line: int
    end_column: int
    value: object = NESTED
    below: list[tuple[Key | None, _Node, _Node]] = field(
        default_factory=list[Any]
    )  # key (None merges), its place, value
    is_list: bool = False
    key: _Node | None = None  # read, and waiting for its value


def _read_yaml(text: str) -> list[_Node]:
    """The documents of a stream as trees. Aliases share a node; nothing is copied and nothing is constructed."""
    documents: list[_Node] = []
    open_nodes: list[_Node] = []
    anchors: dict[str, _Node] = {}
    events = cast("Iterator[Any]", yaml.parse(text, Loader=_LOADER))  # pyright: ignore[reportUnknownMemberType]
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            anchors = {}
        if isinstance(event, yaml.CollectionEndEvent):
            open_nodes.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        node = anchors.get(event.anchor or "") if isinstance(event, yaml.AliasEvent) else _read_event(event)
        if node is None or len(open_nodes) > _DEEPEST:
            raise _Unreadable
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.anchor:
            anchors[event.anchor] = node
        if open_nodes:
            _put(open_nodes[-1], node)
        else:
            documents.append(node)
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append(node)
    return documents


def _put(around: _Node, node: _Node) -> None:
    if around.is_list:
        around.below.append((len(around.below), node, node))
    elif around.key is None:
        around.key = node
    else:
        word = around.key.value
        merges = word == "<<"
        around.below.append((None if merges else word if isinstance(word, int) else str(word), around.key, node))
        around.key = None


def _read_event(event: Any) -> _Node:
    start, end = event.start_mark, event.end_mark
    node = _Node(start.line + 1, start.column + 1, end.line + 1, end.column + 1)
    if isinstance(event, yaml.ScalarEvent):
        node.value = _read_scalar(event)
    node.is_list = isinstance(event, yaml.SequenceStartEvent)
    return node


def _read_scalar(event: Any) -> object:
    if event.tag is not None and not event.tag.startswith("tag:yaml.org,2002:"):
        return UNKNOWN  # !include, !python/object: never followed
    return read_word(event.value, event.tag or "", event.implicit)


def read_word(text: str, tag: str = "", implicit: tuple[bool, bool] = (True, False)) -> object:
    """What a word says to YAML, which command lines are read by as well.

    Args:
        text: The word.
        tag: What it is said to be; '' is not said.
        implicit: As the reader gives it: whether a plain word, and whether a quoted one, may be without a tag.
    """
    tag = tag or str(_RESOLVER.resolve(yaml.ScalarNode, text, implicit))
    if tag == "tag:yaml.org,2002:null":
        return None
    if tag in _MAKERS:
        try:
            return _MAKERS[tag](yaml.ScalarNode(tag, text))
        except (ValueError, KeyError):
            return UNKNOWN
    return UNKNOWN if _INTERPOLATION.search(text) else text


def _flatten(top: _Node) -> dict[Path, Setting]:
    """Paths to settings. What is merged in (`<<: *base`) counts where the mapping itself does not say otherwise."""
    found: dict[Path, Setting] = {}
    waiting: list[tuple[Path, _Node]] = [((), top)]
    while waiting:
        path, node = waiting.pop()
        if len(path) > _DEEPEST:
            raise _Unreadable
        here: dict[Key, tuple[_Node, _Node]] = {}
        for key, at, value in _entries(node):
            here[key] = (at, value)
        for key, (at, value) in here.items():
            if len(found) >= _MOST_SETTINGS:
                raise _Unreadable
            below = (*path, key)
            found[below] = Setting(below, value.value, at.line, at.column, *_end(at, value))
        waiting.extend(((*path, key), value) for key, (_, value) in reversed(here.items()) if value.below)
    return found


def _end(at: _Node, value: _Node) -> tuple[int, int]:
    """Behind a value on the line of its key; behind the key where the value is elsewhere."""
    if value.value is NESTED or value.line != at.line:
        return at.end_line, at.end_column
    return value.end_line, value.end_column


def _entries(node: _Node, depth: int = 0) -> list[tuple[Key, _Node, _Node]]:
    """The entries of a mapping, those that are merged in first."""
    merged: list[tuple[Key, _Node, _Node]] = []
    own: list[tuple[Key, _Node, _Node]] = []
    for key, at, value in node.below:
        if key is not None:
            own.append((key, at, value))
            continue
        if depth > _DEEPEST:
            raise _Unreadable
        for source in [one for _, _, one in value.below] if value.is_list else [value]:
            merged += _entries(source, depth + 1)
            if len(merged) > _MOST_SETTINGS:
                raise _Unreadable
    return merged + own


def _read_toml(text: str) -> dict[Path, Setting]:
    found: dict[Path, Setting] = {}
    waiting: list[tuple[Path, Any]] = [((), parse_toml(text))]
    lines = _lines_of_toml(text)
    while waiting:
        path, value = waiting.pop()
        items: list[tuple[Key, Any]] = list(value.items() if isinstance(value, dict) else enumerate(value))  # pyright: ignore
        for key, inner in items:
            below = (*path, key)
            if len(found) >= _MOST_SETTINGS or len(below) > _DEEPEST:
                raise _Unreadable
            # Items of arrays, and tables written on one line, have no key of their own: the nearest line above is told.
            at = next((lines[below[:n]] for n in range(len(below), 0, -1) if below[:n] in lines), (1, 1, 1))
            is_nested = isinstance(inner, (dict, list))
            plain = inner if isinstance(inner, (str, int, float, bool)) else UNKNOWN
            found[below] = Setting(below, NESTED if is_nested else plain, at[0], at[1], at[0], at[2])
            if is_nested:
                waiting.append((below, cast("Any", inner)))
    return found


def _lines_of_toml(text: str) -> dict[Path, tuple[int, int, int]]:
    """Paths to line, column and end, by the keys and tables that the lines begin with."""
    found: dict[Path, tuple[int, int, int]] = {}
    table: Path = ()
    for number, line in enumerate(text.split("\n"), 1):
        end = len(line.split("#")[0].rstrip()) + 1
        column = len(line) - len(line.lstrip()) + 1
        if (header := _TABLE_OF_TOML.match(line)) is not None:
            table = _words(header[1])
            found.setdefault(table, (number, column, end))
        elif (key := _KEY_OF_TOML.match(line)) is not None:
            path = (*table, *_words(key[1]))
            for size in range(len(table) + 1, len(path) + 1):
                found.setdefault(path[:size], (number, column, end))
    return found


def _words(dotted: str) -> Path:
    return tuple(word.strip("\"'") for word in re.findall(_WORD_OF_TOML, dotted))
