"""The page is whole in itself: well-formed, escaped, nothing to fetch, and a browser opens it without a word."""

import base64
import json
import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest

from lightning_taskinfo.transfer.report import TransferReport
from tests.transfer.results import METHODS, minimal, report

CHROMIUM = shutil.which("chromium")
EVIL = "<script>alert(1)</script>\"'&<img src=http://x.invalid/y>]]>"


def parsed(text):
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def words(element):
    return " ".join("".join(element.itertext()).split())


@pytest.fixture(scope="module")
def page():
    return report(METHODS[:3], labels=(50, 100), seeds=3).to_html()


def test_nothing_is_fetched(page):
    """Neither by the page nor by the figures in it; the policy forbids it besides."""
    root = parsed(page)
    for element in root.iter():
        assert element.tag not in {"script", "iframe", "object", "embed", "base", "form"}
        for name, value in element.attrib.items():
            if name in {"src", "href", "srcset", "action", "data", "poster"}:
                assert value.startswith("data:"), (element.tag, name, value[:50])
            assert not name.startswith("on")
    (style,) = root.iter("style")
    assert "@import" not in style.text
    assert "url(" not in style.text
    (policy,) = [m for m in root.iter("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy.get("content").startswith("default-src 'none'")
    for image in root.iter("img"):
        svg = ElementTree.fromstring(base64.b64decode(image.get("src").partition("base64,")[2]))
        links = [v for e in svg.iter() for k, v in e.attrib.items() if k.endswith("href")]
        assert all(link.startswith("#") for link in links)


def test_table_is_that_of_the_report(page):
    table = report(METHODS[:3], labels=(50, 100), seeds=3).table()
    first = next(parsed(page).iter("table"))
    head = [words(cell) for cell in first.find("thead").iter("th")]
    rows = [dict(zip(head, map(words, row), strict=True)) for row in first.find("tbody")]
    assert [(row["labels"], row["method"]) for row in rows] == [
        (str(r["labels"]), r["method"]) for r in table
    ]
    for shown, row in zip(rows, table, strict=True):
        assert shown["accuracy, %"].startswith(
            f"{100 * row['accuracy']:.1f} [{100 * row['accuracy_low']:.1f}, "
        )
        verdict = shown["gain over scratch: error, points"].split("] ")[-1]
        assert verdict == (row["over_scratch_error_verdict"] or "")


def test_is_accessible(page):
    root = parsed(page)
    assert root.get("lang") == "en"
    assert all(len(image.get("alt")) > 20 for image in root.iter("img"))
    assert len(list(root.iter("img"))) == 3
    for table in root.iter("table"):
        assert table.find("caption") is not None
        assert all(cell.get("scope") in {"col", "row"} for cell in table.iter("th"))
    assert all(
        e.get("tabindex") == "0" and e.get("aria-label")
        for e in root.iter("div")
        if e.get("class") == "scroll"
    )
    assert [e.tag for e in root.iter() if re.fullmatch(r"h\d", e.tag)] == ["h1"] + ["h2"] * 6


def test_dark_and_light_and_phones(page):
    assert "prefers-color-scheme: dark" in page
    assert 'content="width=device-width, initial-scale=1"' in page


def test_everything_is_escaped():
    rows = [minimal(f"{name}{EVIL}", 50, 0, 0.5) for name in "ab"] + [
        minimal("scratch", 50, 0, 0.5)
    ]
    text = TransferReport(rows, {EVIL: [EVIL]}, EVIL).to_html()
    root = parsed(text)
    assert words(next(root.iter("h1"))) == EVIL
    assert not list(root.iter("script"))
    assert {e.get("src")[:5] for e in root.iter("img")} == {"data:"}
    assert json.loads(next(root.iter("pre")).text) == {EVIL: [EVIL]}


def test_same_report_same_page():
    one, other = (report(METHODS[:2], seeds=1, measured=False).to_html() for _ in range(2))
    assert one == other


def test_without_matplotlib_there_are_no_figures(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_taskinfo.transfer.report.find_spec", lambda name: None)
    files = report(METHODS[:2]).save(tmp_path)
    assert list(files) == ["report.md", "report.html", "report.json"]
    assert not list(parsed(files["report.html"].read_text()).iter("img"))
    assert "png" not in files["report.md"].read_text()


def test_saved_files_are_there_and_whole(tmp_path):
    files = report(METHODS[:2], seeds=1, measured=False).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    assert all(
        path.read_bytes().startswith(b"\x89PNG")
        for name, path in files.items()
        if name.endswith(".png")
    )
    named = re.findall(r"\((\w+\.png)\)", files["report.md"].read_text())
    assert named == [name for name in files if name.endswith(".png")]
    parsed(files["report.html"].read_text(encoding="utf-8"))


def browse(page, folder):
    """Open a page without a screen; return the document, what the console said, and what the page asked for.

    The browser asks for things of its own accord too: those requests have no origin.
    """
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    options += [
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={folder / 'profile'}",
    ]
    options += ["--enable-logging=stderr", f"--log-net-log={folder / 'net.json'}", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    events = [
        event.get("params", {}) for event in json.loads((folder / "net.json").read_text())["events"]
    ]
    asked = {
        event["url"]
        for event in events
        if event.get("initiator", "not an origin") != "not an origin"
    }
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line], asked


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_opens_it_without_a_word(tmp_path, page):
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    document, console, asked = browse(tmp_path / "report.html", tmp_path)
    assert (console, asked) == ([], set())
    assert document.count("<img ") == 3
    assert document.count("<table>") == 3


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_would_have_told(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<!DOCTYPE html><img src='http://127.0.0.1:9/x.png'><script>console.error('no')</script>"
    )
    _, console, asked = browse(page, tmp_path)
    assert asked == {"http://127.0.0.1:9/x.png"}
    assert len(console) == 1
