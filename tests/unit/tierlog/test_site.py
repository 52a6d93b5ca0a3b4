"""The site has every page once, and refuses what its generator does not look at."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SITE = runpy.run_path(str(ROOT / "docs" / "site.py"))


def test_each_page_is_in_one_section():
    placed = [page for _, pages in SITE["sections_with_pages"]() for page in pages]
    assert sorted(placed) == sorted(str(path) for path in SITE["sources"]() if path.suffix == ".md")


def test_links_of_each_page_are_in_the_site():
    for path in SITE["sources"]():
        if path.suffix == ".md":
            SITE["as_page"]((ROOT / path).read_text(), path)


def test_a_link_to_what_the_site_does_not_have_is_refused():
    with pytest.raises(SystemExit, match=r"security\.md: the site has no \.\./Makefile"):
        SITE["as_page"]("[all commands](../Makefile)", Path("docs/security.md"))


def test_a_link_to_a_folder_goes_to_its_page():
    page = SITE["as_page"]("[formats](formats), [home](../README.md#status)", Path("docs/spark.md"))
    assert page == "[formats](formats/README.md), [home](../index.md#status)"


def test_the_drawings_are_up_to_date():
    assert runpy.run_path(str(ROOT / "docs" / "pictures.py"))["main"](["--check"]) == 0


def test_no_picture_fetches_anything():
    for picture in (ROOT / "docs" / "pictures").glob("*.svg"):
        assert set(re.findall(r"https?://[^\"' )]+", picture.read_text())) == {
            "http://www.w3.org/2000/svg"
        }
