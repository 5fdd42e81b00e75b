"""The package's page on an index; everything else stands in setup.cfg.

The README's links lead to files beside it, which an index page does not have. SMCKPT_HOME_URL, the
address of the repository, makes them absolute when a release is built, and adds the project's URLs.
Without it they become plain text: a page without a link is better than one with a broken link.
"""

import os
import re
from pathlib import Path

from setuptools import setup

HOME = os.environ.get("SMCKPT_HOME_URL", "").rstrip("/")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def absolute(match):
    image, text, path = match.groups()
    if HOME:
        return f"{image}[{text}]({HOME}/{'raw' if image else 'blob'}/HEAD/{path})"
    return "" if image else text


setup(
    long_description=LINK.sub(absolute, Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls={
        "Source": HOME,
        "Documentation": f"{HOME}/blob/HEAD/docs/guide.md",
        "Changelog": f"{HOME}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{HOME}/issues",
    }
    if HOME
    else {},
)
