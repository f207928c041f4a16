"""The picture in the docs is what its script draws from the library's own numbers."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]


def draw():
    spec = importlib.util.spec_from_file_location("split_picture", ROOT / "tools" / "split_picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.draw()


def test_the_picture_is_up_to_date():
    assert (ROOT / "docs" / "pictures" / "split.svg").read_text(encoding="utf-8") == draw()


def test_the_picture_is_well_formed_and_shows_the_split():
    texts = [element.text for element in ElementTree.fromstring(draw()).iter() if element.tag.endswith("text")]
    assert "remainder, int16: -13107" in texts
    assert any("26216/65536" in text for text in texts)
