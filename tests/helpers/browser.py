"""A headless Chromium; importing this skips a test file where selenium, Chromium or its driver is missing."""

import contextlib
import shutil

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="pip install '.[test]' for selenium")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("needs a Chromium and its driver: apt-get install chromium chromium-driver", allow_module_level=True)

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync --disable-dev-shm-usage --force-device-scale-factor=1"


@contextlib.contextmanager
def chromium(profile):
    """Its driver; `profile`: an empty folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # The driver is given, so that selenium looks for none and downloads none.
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()
