"""Makes docs/img/report.png, README's picture: the head of the report of a kept run of the exam, in headless Chromium.

``python tools/picture.py``; the browser is chromium, chromium-browser or google-chrome, or what ``CHROMIUM`` names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from whywait import app

ROOT = Path(__file__).parents[1]
RUN = ROOT / "exam" / "llama-slots-2-of-8"
PICTURE = ROOT / "docs" / "img" / "report.png"
WIDTH, HEIGHT = 1200, 960  # CSS pixels: the verdict, both accounts, throughput and cost against the load
LIMIT = 300_000  # bytes, so that a clone stays small
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    browser = os.environ.get("CHROMIUM") or next((b for b in BROWSERS if shutil.which(b)), None)
    if browser is None:
        sys.exit("no Chromium found; name it by CHROMIUM=/path")
    PICTURE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "report.html", Path(folder) / "report.png"
        app.write_report(app.show(RUN), page)
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}",
                   page.as_uri()]  # fmt: skip
        subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if shot.stat().st_size > LIMIT:
            sys.exit(f"the picture has {shot.stat().st_size:,} bytes, more than {LIMIT:,}")
        shutil.copy(shot, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
