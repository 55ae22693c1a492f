"""A live report in a real browser: it takes new data and stays where its reader left it."""

import threading

import pytest

from rlhf_jax.config import PPOConfig
from rlhf_jax.report import serve
from tests.helpers import report_runs
from tests.helpers.browser import WebDriverWait, chromium

STATE = """
const tab = document.querySelector('.tab.open'), plot = (i) => tab.querySelectorAll('.plot')[i].plot;
const text = (selector) => tab.querySelector(selector).selectedOptions[0].text;
return {
  tab: tab.id, zoom: [plot(1).scales.x.min, plot(1).scales.x.max].map(Math.round), last: plot(0).data[0].at(-1),
  hidden: [...tab.querySelectorAll('button.run')].map((one) => one.getAttribute('aria-pressed')),
  more: tab.querySelector('.more').open, about: !!tab.querySelector('.about'), step: text('.of-step'),
  run: text('.of-run'), colour: text('.of-colour'), search: tab.querySelector('.of-text').value,
  focus: document.activeElement.className,
  samples: [...tab.querySelectorAll('.sample > details')].map((one) => one.open),
  options: text('.of-options'), page: tab.querySelector('.where').textContent,
  smooth: document.getElementById('smooth').value,
  top: Math.round(tab.querySelector('.samples').getBoundingClientRect().top),
  live: document.querySelector('.live').textContent,
};"""
CHOICES = """
const tab = document.querySelector('.tab.open'), choose = (selector, text, event) => {
  const one = tab.querySelector(selector);
  one.value = one.options ? [...one.options].find((option) => option.text.includes(text)).value : text;
  one.dispatchEvent(new Event(event));
};
const smooth = document.getElementById('smooth');
smooth.value = 0.8;
smooth.dispatchEvent(new Event('input'));
tab.querySelectorAll('button.run')[1].click();
tab.querySelector('.more').open = true;
tab.querySelector('.what').click();
choose('.of-run', 'more', 'change');
choose('.of-colour', 'advantage', 'input');
choose('.of-text', 'question 1', 'input');
choose('.of-options', 'all', 'change');
tab.querySelectorAll('.sample > details')[1].open = arguments[0];
tab.querySelectorAll('.plot')[1].plot.setScale('x', {min: 5, max: 15});
tab.querySelector('.samples').scrollIntoView();
tab.querySelector('.of-text').focus({preventScroll: true});
return new Promise((done) => setTimeout(done, 200));"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One headless Chromium for all of these tests."""
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def opened(browser, tmp_path):
    """Serves runs in `tmp_path` and opens their page: (width) -> (run JavaScript, wait until an expression is true)."""
    server = serve.Server(serve.LivePage([str(tmp_path)]))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()

    def open_page(width=1280):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(server.address)
        return browser.execute_script, wait

    def wait(expression):
        WebDriverWait(browser, 40, 0.1).until(lambda _: browser.execute_script(f"return {expression}"))

    yield open_page
    browser.get("about:blank")
    server.shutdown()
    thread.join()
    server.server_close()


def add_updates(run, first, last, seed=0):
    rows = [report_runs.policy_metrics(step, 40, seed) for step in range(1, last + 1)]
    for step in range(first, last + 1, 5):
        run.write_completions(step, report_runs.samples(step, 12, seed)[0], "samples", [])
    report_runs.lines(run.metrics, rows)  # last, as it is what a test waits for


@pytest.mark.parametrize(("width", "reading"), [(1280, True), (390, False)])
def test_new_updates_appear_and_the_reader_stays_where_they_were(opened, browser, tmp_path, width, reading):
    report_runs.make(tmp_path / "one" / "ppo", PPOConfig(), updates=20, total=40)
    run = report_runs.make(
        tmp_path / "two_more_kl" / "ppo", PPOConfig(kl_coef=0.2), updates=20, total=40, finished=False
    )
    report_runs.make_sft(tmp_path / "one" / "sft")
    script, wait = opened(width)
    wait("document.body.dataset.ready === '1'")
    script(CHOICES, reading)
    before = script(STATE)
    assert before["zoom"] == [5, 15] and before["samples"].count(True) == reading and before["step"] == "20"
    add_updates(run, 21, 30)
    wait("document.querySelector('.tab.open .runs').textContent.includes('30 of 40')")
    script("return new Promise((done) => setTimeout(done, 200))")
    after = script(STATE)
    assert after.pop("step") == ("20" if reading else "26")  # the latest follows, unless one of its rows is read
    assert abs(after.pop("top") - before.pop("top")) <= 1
    assert after == {name: value for name, value in before.items() if name != "step"} and after["live"] == ", live"
    assert script("return document.documentElement.scrollWidth") <= width
    curves = script("return tabs[0].curves['objective/scores']")
    assert len(curves["1"]["y"]) == 30
    assert browser.get_log("browser") == []


def test_a_stage_that_begins_is_a_tab_and_a_server_that_ends_is_said(opened, browser, tmp_path):
    script, wait = opened()
    wait("document.body.textContent.includes('No run yet')")
    report_runs.make_sft(tmp_path / "sft")
    wait("document.querySelectorAll('.tab.open canvas').length > 2")
    assert script("return document.querySelector('nav').hidden")
    run = report_runs.make(tmp_path / "ppo", PPOConfig(), updates=10, total=40, finished=False)
    wait("document.querySelectorAll('nav button').length === 2")
    assert not script("return document.querySelector('nav').hidden")
    assert script("return document.querySelector('.tab.open').id") == "tab-sft"
    script("document.getElementById('button-policy').click()")
    add_updates(run, 11, 12)
    wait("document.querySelector('.tab.open .runs').textContent.includes('12 of 40')")
    assert script("return [document.querySelector('.tab.open').id, location.hash]") == ["tab-policy", "#policy"]
    script("getSelection().selectAllChildren(document.querySelector('.tab.open h2'))")
    add_updates(run, 13, 14)
    wait("document.querySelector('.live').textContent.includes('waits while text')")
    assert script("return getSelection().toString()") == "Runs"
    script("getSelection().empty()")
    wait("document.querySelector('.tab.open .runs').textContent.includes('14 of 40')")
    assert browser.get_log("browser") == []
    script("window.fetch = () => Promise.reject(new TypeError())")
    wait("document.querySelector('.live').textContent.includes('does not answer')")
