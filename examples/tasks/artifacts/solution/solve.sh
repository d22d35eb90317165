#!/bin/bash
cd /app && mkdir -p site && python3 - <<'PYTHON'
import csv
import html
from pathlib import Path

site = Path("site")
links = []
with open("pages.csv", newline="") as stream:
    for title, text in csv.reader(stream):
        name = f"{title.lower()}.html"
        (site / name).write_text(f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(text)}</p>\n")
        links.append(f'<a href="{name}">{html.escape(title)}</a>')
(site / "index.html").write_text("\n".join(links) + "\n")
(site / "draft.tmp").write_text("left out of the artifacts\n")
PYTHON
