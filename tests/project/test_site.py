"""The site that ``make docs`` builds, in a headless Chromium: navigation, search, links, pictures."""

import functools
import http.server
import re
import shutil
import threading
from urllib.parse import unquote, urlsplit

import pytest

import fp8flax
from tests import ROOT

api = pytest.importorskip("playwright.sync_api", reason="only in the environment of make docs-test")

SITE = ROOT / "build" / "site"
PICTURES = ROOT / "build" / "pictures"
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if path.name != "404.html")
CHROMIUM = shutil.which("chromium")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync")
WIDE, NARROW = {"width": 1440, "height": 960}, {"width": 390, "height": 844}
SEEN = ("index", "faq", "recipes", "what_works", "migrating", "api/recipes", "notebooks/01_fp8_basics")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian: apt-get install chromium)"),
    pytest.mark.skipif(not PAGES, reason="there is no build/site (make docs)"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=SITE)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))


@pytest.fixture
def open_page(browser, address):
    """Opens a page of the site; no page may write an error, miss a file, or ask another machine."""
    found, contexts = [], []

    def look(path, size=WIDE, scheme="light"):
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce"))
        page = contexts[-1].new_page()
        page.on(
            "console", lambda message: message.type in ("error", "warning") and found.append(message.text)
        )
        page.on("pageerror", lambda error: found.append(str(error)))
        page.on("response", lambda answer: answer.status >= 400 and found.append(answer.url))
        page.on("request", lambda request: foreign(request.url) and found.append(request.url))
        page.goto(f"{address}/{path}")
        return page

    def foreign(url):
        return not url.startswith((address, "data:", "blob:"))

    yield look
    for context in contexts:
        context.close()
    assert found == []


def heading(page):
    return page.locator("h1").inner_text().rstrip("¶")


def test_navigation(open_page):
    page = open_page("index.html")
    assert heading(page) == "fp8flax"
    tabs = page.locator(".md-tabs__link").all_inner_texts()
    assert tabs == ["Get started", "Guides", "API", "Performance", "About"]
    sidebar = page.locator(".md-nav--primary")
    for name, file in (("Quickstart", "quickstart.html"), ("FP8 basics", "01_fp8_basics.html")):
        sidebar.get_by_role("link", name=name).click()
        page.wait_for_url(f"**/{file}")
        assert heading(page) == name
    sidebar.get_by_role("link", name="简体中文").click()
    page.wait_for_url("**/README.zh-CN.html")
    assert page.locator("html").get_attribute("lang") == "zh-CN"
    page.locator(".md-tabs__link", has_text="API").click()
    page.locator(".md-nav--primary").get_by_role("link", name="Serving").click()
    assert heading(page) == "Serving"
    assert page.locator("h2").first.inner_text().startswith("freeze")
    page.locator(".md-footer__link--next").click()
    assert heading(page) == "Audit"


def test_repository_version_and_edit_link(open_page):
    page = open_page("recipes.html")
    source = page.locator(".md-header .md-source")
    assert source.get_attribute("href") == "https://github.com/fp8flax/fp8flax"
    assert source.locator(".md-source__fact--version").inner_text() == fp8flax.__version__
    edit = page.locator("a[rel=edit]").get_attribute("href")
    assert edit == "https://github.com/fp8flax/fp8flax/edit/main/docs/recipes.md"


def test_navigation_on_a_phone(open_page):
    page = open_page("index.html", NARROW)
    page.locator("label.md-header__button[for=__drawer]").click()
    drawer = page.locator(".md-nav--primary")
    # The drawer opens in the section of the page.
    drawer.locator("label.md-nav__title[for=__nav_1]").click()
    drawer.locator("label.md-nav__link", has_text="Guides").click()
    drawer.locator("label.md-nav__link", has_text="Serve").click()
    drawer.get_by_role("link", name="Serve in FP8").click()
    page.wait_for_url("**/serving.html")
    assert heading(page) == "Serve in FP8"


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_search(open_page, size):
    page = open_page("index.html", size)
    if size is NARROW:
        page.locator("label.md-header__button[for=__search]").click()
    page.locator("input[name=query]").click()
    page.keyboard.type("safetensors")
    results = page.locator(".md-search-result__item > a.md-search-result__link")
    results.first.wait_for()
    assert any("serving.html" in results.nth(i).get_attribute("href") for i in range(results.count()))
    results.first.click()
    page.wait_for_url("**/*.html?*")
    assert "safetensors" in page.locator("article").inner_text()


@pytest.mark.parametrize(
    ("query", "place"),
    [
        ("gradient accumulation", "api/training.html#fp8flax.accumulate_gradients"),
        ("accumulate_gradients", "api/training.html#fp8flax.accumulate_gradients"),
        ("H100", "supported.html#gpus"),
    ],
)
def test_search_finds(open_page, query, place):
    page = open_page("index.html")
    page.locator("input[name=query]").click()
    page.keyboard.type(query)
    pages = page.locator(".md-search-result__item")
    pages.first.wait_for()
    links = [pages.nth(i).locator("a").evaluate_all("all => all.map(a => a.href)") for i in range(3)]
    found = {re.sub(r"\?[^#]*", "", link) for page_links in links for link in page_links}
    assert any(link.endswith(f"/{place}") for link in found), found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_pictures(open_page, size, scheme):
    """Writes pictures of pages to ``build/pictures``, for people to look at."""
    colours = set()
    for name in SEEN:
        page = open_page(f"{name}.html", size, scheme)
        path = PICTURES / f"{name.replace('/', '_')}-{size['width']}-{scheme}.png"
        assert len(page.screenshot(path=path, animations="disabled")) > 10_000
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    (colour,) = colours
    assert (colour == "rgb(255, 255, 255)") == (scheme == "light")


def test_pages_on_a_phone(open_page):
    """Pictures have descriptions; nothing is wider than the screen; code that is too wide is scrolled."""
    page, wrong = open_page("index.html", NARROW), []
    for name in PAGES:
        page.goto(f"{page.url.partition('//')[0]}//{urlsplit(page.url).netloc}/{name}")
        for picture in page.locator("article img").all():
            alt = picture.get_attribute("alt") or ""
            if len(alt) <= 20 or alt[-1] not in ".。" or not picture.evaluate("x => x.naturalWidth"):
                wrong.append((name, picture.get_attribute("src")))
        if page.evaluate("document.scrollingElement.scrollWidth > innerWidth"):
            wrong.append((name, "too wide"))
        if page.locator("h1").count() != 1:
            wrong.append((name, "headings"))
        wrong += [(name, text) for text in page.locator("article pre").evaluate_all(CUT_OFF)]
    assert wrong == []


CUT_OFF = """blocks => blocks
  .map(block => block.querySelector("code") ?? block)
  .filter(code => code.scrollWidth > code.clientWidth && getComputedStyle(code).overflowX != "auto")
  .map(code => code.textContent.slice(0, 60))"""


def test_code_is_not_cut_off_on_a_wide_screen(open_page):
    page, wrong = open_page("index.html", {"width": 1400, "height": 900}), []
    for name in PAGES:
        page.goto(f"{page.url.partition('//')[0]}//{urlsplit(page.url).netloc}/{name}")
        blocks = page.locator("article .language-python:not(.output) pre > code")
        wrong += [(name, text) for text in blocks.evaluate_all(SCROLLED)]
    assert wrong == []


SCROLLED = """blocks => blocks
  .filter(code => code.scrollWidth > code.clientWidth)
  .map(code => code.textContent.slice(0, 60))"""


def test_a_wide_table_is_scrolled_in_a_frame(open_page):
    page = open_page("installation.html", NARROW)
    frame = page.locator("article .md-typeset__scrollwrap").last
    assert frame.evaluate("x => x.scrollWidth > x.clientWidth")
    style = frame.evaluate("x => [getComputedStyle(x).overflowX, getComputedStyle(x).borderRightWidth]")
    assert style == ["auto", "1px"]
    assert "gradient" in frame.evaluate("x => getComputedStyle(x).backgroundImage")


def test_links(browser):
    """Each link leads to an existing place of the site, or is marked as external."""
    page = browser.new_page(java_script_enabled=False)
    links, places = {}, {}
    for name in PAGES:
        page.set_content((SITE / name).read_text())
        links[name] = page.locator("a[href]").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        places[name] = set(page.locator("[id]").evaluate_all("all => all.map(x => x.id)"))
    page.close()
    assert len(links) > 40
    for name, targets in links.items():
        for target in targets:
            parts = urlsplit(target)
            if parts.scheme:
                assert parts.scheme in ("https", "mailto"), (name, target)
                continue
            path = (
                (SITE / name).parent / unquote(parts.path) if parts.path not in ("", ".") else SITE / name
            )
            assert path.is_file(), (name, target)
            other = str(path.resolve().relative_to(SITE))
            assert not parts.fragment or unquote(parts.fragment) in places[other], (name, target)


def test_names():
    """The API pages show no unresolved link and no private name."""
    for name in PAGES:
        text = (SITE / name).read_text()
        assert "][fp8flax" not in text, name
        if name.startswith("api/"):
            assert 'title="fp8flax._' not in text
            assert not [line for line in text.splitlines() if "<h" in line and "._" in line]
