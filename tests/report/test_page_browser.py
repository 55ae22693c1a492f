"""The report in a real browser: no error, charts are drawn, tables filter, a phone and the dark can read it."""

import pytest

from rlhf_jax import report
from rlhf_jax.config import PPOConfig
from tests.helpers import report_runs
from tests.helpers.browser import WebDriverWait, chromium

DRAWN = """
const style = getComputedStyle(document.documentElement);
const shades = [0, 1, 2, 3, 4, 5, 6, 7].map(
  i => style.getPropertyValue(`--c${i}`).match(/[0-9a-f]{2}/g).map(x => parseInt(x, 16)));
return [...document.querySelectorAll('.tab.open canvas')].filter(c => c.offsetParent).map(c => {
  const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  let painted = 0, curve = 0;
  for (let i = 0; i < pixels.length; i += 4) {
    if (pixels[i + 3] < 30) continue;
    painted++;
    if (shades.some(shade => shade.every((x, k) => Math.abs(x - pixels[i + k]) < 8))) curve++;
  }
  return [c.closest('.card').querySelector('figcaption').textContent, painted, curve];
})"""
CONTRAST = """
const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(x => x / 255).map(
  x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (!/, 0\\)|transparent/.test(c)) return c; } };
const speaks = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
return [...document.querySelectorAll('body *')].filter(e => e.offsetParent && !e.closest('.text') && speaks(e)).map(
  e => { const a = light(getComputedStyle(e).color), b = light(behind(e));
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.className + ': ' + e.textContent.slice(0, 40)]; })"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A page of two seeds, a run that goes on, RLOO, a reward model and SFT, with hostile text in samples."""
    top = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        report_runs.make(top / f"seed{seed}" / "ppo", PPOConfig(), seed=seed, sample_rows=30, recipe="tldr_ppo.py")
    run = report_runs.make(top / "<b>more & kl" / "ppo", PPOConfig(kl_coef=0.2), updates=25, total=40, finished=False)
    bad = report_runs.HOSTILE
    tokens = [{"tokens": [bad, " plain"], "kl": [0.5, -0.5], "advantages": [1.0, -2.0]}]
    run.write_completions(25, [{"query": bad, "model response": bad, "score": 1.0, bad: bad}], "samples", tokens)
    report_runs.make_rloo(top / "rloo")
    report_runs.make_reward(top / "reward")
    report_runs.make_sft(top / "sft")
    path = top / "report.html"
    report.write([str(top)], str(path), png=False)
    return f"file://{path}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One headless Chromium for all of these tests."""
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def page(browser, address):
    """Opens the page: (width, theme, tab) -> a function that runs JavaScript there."""

    def opened(width=1280, theme="light", tab="policy"):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get("about:blank")
        browser.get(f"{address}#{tab}")
        # On a busy machine the driver comes back before the page's script has run.
        ready = "return location.protocol === 'file:' && document.body?.dataset.ready === '1'"
        WebDriverWait(browser, 30, 0.02).until(lambda _: browser.execute_script(ready))
        return browser.execute_script

    yield opened
    assert browser.get_log("browser") == []  # no error, no warning, nothing that the policy of contents refused
    assert browser.execute_script("return [window.hacked, performance.getEntriesByType('resource').length]") == [
        None,
        0,
    ]


def change(run, selector, value, event="input"):
    """What a user's choice does; gives how many samples are shown."""
    script = "const e = document.querySelector('.tab.open ' + arguments[0]); e.value = arguments[1];"
    script += "e.dispatchEvent(new Event(arguments[2]));"
    run(script, selector, value, event)
    return run("return document.querySelectorAll('.tab.open .sample').length")


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_every_chart_is_drawn_in_every_tab(page, width, theme):
    for tab, least in (("policy", 25), ("reward", 7), ("sft", 3)):
        run = page(width, theme, tab)
        run("document.querySelectorAll('.tab.open details.more').forEach(d => d.open = true)")
        run("return new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
        charts = run(DRAWN)
        assert len(charts) >= least, (tab, len(charts))
        boxes = run("return document.querySelectorAll('.tab.open .plot').length")
        assert len(charts) == boxes
        for title, painted, curve in charts:  # axes and a grid, and what they are for
            assert painted > 1500 and curve > 30, (tab, title, painted, curve)


@pytest.mark.parametrize("tab", ["policy", "reward", "sft"])
def test_a_phone_needs_no_scrolling_sideways(page, tab):
    run = page(390, "light", tab)
    assert run("return document.documentElement.scrollWidth") <= 390
    wide = (
        "return [...document.querySelectorAll('.tab.open *')].filter(e => e.offsetParent && !e.closest('.scroll, nav') "
    )
    wide += "&& e.getBoundingClientRect().right > 391).map(e => e.tagName + '.' + e.className)"
    assert run(wide) == []
    small = "return [...document.querySelectorAll('.tab.open *')].filter(e => e.offsetParent && e.childNodes.length && "
    small += "parseFloat(getComputedStyle(e).fontSize) < 11).length"
    assert run(small) == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(page, theme):
    run = page(1280, theme)
    background = run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(background) < 60) if theme == "dark" else (min(background) > 200)
    found = run(CONTRAST)
    assert len(found) > 100 and not [(ratio, what) for ratio, what in found if ratio < 4.5]
    run("document.getElementById('theme').click()")
    other = run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(other) < 60) == (theme == "light")


def test_samples_are_searched_filtered_sorted_and_coloured(page):
    run = page()
    name = run("return [...document.querySelector('.of-run').options].findIndex(o => o.text === 'seed1/ppo')")
    value = run("return document.querySelector('.of-run').options[arguments[0]].value", name)
    assert change(run, ".of-run", value, "change") == 20  # of 30: a page
    where = "return document.querySelector('.tab.open .where').textContent"
    assert run(where) == "1 to 20 of 30"
    run("document.querySelector('.tab.open .after').click()")
    assert run(where) == "21 to 30 of 30"

    rows, tokens = report_runs.samples(40, 30, seed=1)
    assert change(run, ".of-text", "QUESTION 17") == 1
    spans = "return [...document.querySelectorAll('.sample > .text span')].map("
    spans += "s => [s.textContent, s.title, s.style.background])"
    found = run(spans)
    assert [text for text, _, _ in found] == tokens[17]["tokens"]
    assert all("KL" in title and "advantage" in title and "rgba" in colour for _, title, colour in found)
    highest = max(range(len(found)), key=lambda i: tokens[17]["kl"][i])
    assert found[highest][2].startswith("rgba(214, 69, 40")
    change(run, ".of-colour", "advantages")
    assert run(spans) != found and "advantage" in run("return document.querySelector('.legend').textContent")
    change(run, ".of-colour", "")
    assert [s[0] for s in run(spans)] == [rows[17]["model response"]]

    change(run, ".of-text", "")
    change(run, ".of-end", "no")
    assert run(where).endswith(f" of {sum(not row['ended'] for row in rows)}")
    change(run, ".of-end", "")
    change(run, ".of-least", "0.5")
    assert run(where).endswith(f" of {sum(row['score'] >= 0.5 for row in rows)}")
    change(run, ".of-order", "-score")
    best = max(row["score"] for row in rows)
    shown = run("return document.querySelector('.sample .facts b').textContent")
    assert float(shown) == pytest.approx(best, rel=1e-3)
    assert change(run, ".of-text", "no such words") == 0 and run(where) == "no matching rows"


def test_a_row_opens_to_its_prompt_and_what_other_updates_answered(page):
    run = page()
    change(run, ".of-run", "4", "change")
    run("document.querySelector('.sample details').open = true")
    run("return new Promise(done => setTimeout(done, 20))")
    text = run("return document.querySelector('.sample details').textContent")
    assert "TITLE: question 0" in text
    assert [step for step in (8, 16, 24, 32) if f"update {step}" in text] == [8, 16, 24, 32]


def test_hostile_text_is_shown_as_text(page):
    run = page()
    name = run("return [...document.querySelector('.of-run').options].find(o => o.text.includes('more & kl')).value")
    change(run, ".of-run", name, "change")
    assert "<img src=x onerror=" in run("return document.querySelector('.sample .text').textContent")
    assert run("return document.querySelectorAll('main img, main b > *, main script').length") == 0
    assert "<b>more & kl/ppo" in run("return document.querySelector('.runs').textContent")


def test_runs_are_hidden_curves_smoothed_and_the_axis_changed(page):
    run = page()
    first = "const c = document.querySelector('.tab.open canvas'); return c.toDataURL()"
    looks = [run(first)]
    for script in (
        "document.querySelector('button.run').click()",
        "const e = document.getElementById('smooth'); e.value = 0.8; e.dispatchEvent(new Event('input'))",
        "const e = document.getElementById('across'); e.value = 'hours'; e.dispatchEvent(new Event('change'))",
    ):
        run(script)
        run("return new Promise(done => setTimeout(done, 20))")
        looks.append(run(first))
    assert len(set(looks)) == 4
    assert run("return document.querySelector('button.run').getAttribute('aria-pressed')") == "false"
    assert "hours" in run("return document.querySelector('.tab.open .plot').plot.axes[0].label")
    run("document.querySelector('.what').click()")
    about = run("return document.querySelector('.about').textContent")
    assert "objective/scores" in about and "Healthy: Rises" in about and "Otherwise: Flat" in about


def test_options_are_filtered(page):
    run = page()
    count = "return [...document.querySelectorAll('.tab.open .config tbody tr')].filter(r => r.offsetParent).length"
    unusual = run(count)
    change(run, ".of-options", "all", "change")
    every = run(count)
    assert every > 60 > unusual > 0
    assert change(run, ".of-option", "discount") is not None and run(count) == 1  # by its meaning: gamma
    change(run, ".of-option", "")
    change(run, ".of-options", "differs", "change")
    shown = "return [...document.querySelectorAll('.config tbody tr')].filter(r => r.offsetParent)"
    names = run(shown + ".map(r => r.cells[0].textContent)")
    assert "kl_coef" in names and "gamma" not in names


def test_points_of_the_frontier_and_of_the_calibration_answer_to_the_pointer(page):
    run = page()
    script = """
      const box = document.querySelector('.tab.open ' + arguments[0]), plot = box.plot, [x, y] = arguments[1];
      plot.setCursor({left: plot.valToPos(x, 'x'), top: plot.valToPos(y, 'y')});
      return box.previousElementSibling.textContent"""
    points = run("return JSON.parse(document.getElementById('data').textContent).tabs[0].frontier.train[0]")
    told = run(script, "[data-scatter=frontier]", [points["x"][3], points["y"][3]])
    assert ": √KL, nats " in told and "update 4:" in told
    run = page(tab="reward")
    (last,) = run("return JSON.parse(document.getElementById('data').textContent).tabs[1].calibration.slice(-1)")
    told = run(script, "[data-calibration]", last["bins"][0][:2])
    assert told.startswith(f"{last['bins'][0][2]} pairs: confidence 0.5")
