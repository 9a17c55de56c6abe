"""One page that draws a report, be it of a replay or of a live gateway.

The page is one file: it asks no network, and works from a disk, in an e-mail, on paper. Its parts
(page.html, page.css, chart.js, page.js) are written by hand and put together here, unbuilt.
"""

import base64
import hashlib
from importlib.resources import files


def page(report_json: bytes) -> bytes:
    """The report (`preheat.report/1`, UTF-8) as one HTML file.

    Names in a report come from traces and may hold markup. The document stands in a block that
    browsers don't run, its angle brackets written as JSON's own escapes, so nothing in it can end
    the block; the script makes text of it only. Should both fail, the policy in the head still
    lets no script and no style run but these two, by their digests, and nothing be fetched.
    """
    style = _part("page.css")
    script = _part("chart.js") + _part("page.js")
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head, tail = _part("page.html").split(b"{{report}}")
    head = head.replace(b"{{policy}}", policy.encode()).replace(b"{{style}}", style)
    return head + report_json.replace(b"<", b"\\u003c") + tail.replace(b"{{script}}", script)


def _part(name: str) -> bytes:
    return files(__name__).joinpath(name).read_bytes()


def _digest(text: bytes) -> str:
    """As Content-Security-Policy names an inline block (CSP Level 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
