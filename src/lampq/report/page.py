"""report.html: one file that needs nothing else, not even a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files

from lampq.report.content import RunFiles, page_content

# in this order: a later script uses what an earlier one defines
SCRIPTS = ("charts.js", "map.js", "tradeoff.js", "sections.js", "page.js")
LIBRARY = "chart.umd.min.js"
POLICY = "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:"

# what shows the answers of a detector
SECTION = """<section id="pictures" aria-labelledby="pictures-title">
    <h2 id="pictures-title">Detections</h2>
    <p class="hint">The first evaluation pictures by the float model and by the quantized one.</p>
    <img src="data:image/jpeg;base64,{picture}"
      alt="Detections of the float and the quantized model">
  </section>"""


def asset(name: str) -> str:
    """The text of a file that belongs to the page."""
    return (files("lampq") / "report" / "assets" / name).read_text(encoding="utf-8")


def embedded(content: object) -> str:
    """JSON that is safe between script tags, whatever its strings are."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def encoded(content: bytes) -> str:
    """Bytes as text, for an address that holds its own content."""
    return base64.b64encode(content).decode()


def digest(text: str) -> str:
    """What a content security policy calls an inline script or style by."""
    return f"'sha256-{encoded(hashlib.sha256(text.encode()).digest())}'"


def render(run: RunFiles) -> str:
    """The page of one run."""
    content = page_content(run)
    style, theme = asset("page.css"), asset("theme.js")
    # its source map is not there
    library = re.sub(r"\n//# sourceMappingURL=.*", "", asset(LIBRARY))
    script = "\n".join(asset(name) for name in SCRIPTS)
    policy = POLICY.format(
        scripts=" ".join(map(digest, (theme, library, script))),
        # the library styles its canvas through the object model, which needs no permission
        styles=digest(style),
    )
    target = run.report["bits"]["target"]
    parts = {
        "title": html.escape(f"{content['model']} at {target:.3g} bits"),
        "policy": policy,
        "theme": theme,
        "style": style,
        "data": embedded(content),
        "licence": asset("LICENSE"),
        "library": library,
        "script": script,
        "pictures": "" if run.pictures is None else SECTION.format(picture=encoded(run.pictures)),
        "pictures_link": "" if run.pictures is None else '<a href="#pictures">Detections</a>',
    }
    # one pass: what is put in is not looked at again
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset("page.html"))
