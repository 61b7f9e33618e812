"""The report as one page that needs nothing else."""

import html
import json
from collections.abc import Mapping
from typing import Any

from ldjax.profile import _chart, _tables

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2127;
  --soft: #59636e; --line: #d5dae0; --box: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --paper: #15191e;
  --ink: #e4e8ec; --soft: #9aa4af; --line: #39424c; --box: #1f252c; } }
body { background: var(--paper); color: var(--ink); margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p { color: var(--soft); margin: .3rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .7rem;
  text-align: left; vertical-align: top; }
th { font-weight: 600; }
td:first-child { white-space: nowrap; }
svg { max-width: 40rem; width: 100%; display: block; margin: .5rem 0; }
svg .t { fill: var(--ink); font: 13px system-ui, sans-serif; }
svg .g { stroke: var(--line); }
pre { background: var(--box); padding: 1rem; overflow-x: auto;
  font-size: 12px; }
"""


def _table(table: _tables.Table) -> str:
  def row(cells: Any, tag: str) -> str:
    shown = "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in cells)
    return f"<tr>{shown}</tr>"

  body = "".join(row(cells, "td") for cells in table.rows)
  note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
  grid = (
    f'<div class="wide"><table><thead>{row(table.columns, "th")}</thead>'
    f"<tbody>{body}</tbody></table></div>"
    if table.rows
    else ""
  )
  return grid + note


def _charts(report: Mapping[str, Any]) -> dict[str, str]:
  """A plot by the name of the table that it stands above."""
  parts = report["round"]
  found = {
    "round": _chart.bars(
      "Milliseconds of each part of a round",
      [
        (name, 1e3 * parts[name], f"{1e3 * parts[name]:.2f} ms")
        for name in _tables.PARTS
      ],
    ),
    "acceptance": _chart.bars(
      "Acceptance by depth",
      [
        (f"depth {x['depth']}", x["rate"], f"{x['rate']:.3f}")
        for x in report["acceptance"]
      ],
    ),
    "step": _chart.lines(
      "Share of the machine's ceilings by size of tree, in percent",
      "nodes; percent of what this machine reached",
      [
        _chart.Line(name, [(x["size"], 100 * x[key]) for x in report["step"]])
        for name, key in (
          ("of reading", "share_of_read"),
          ("of products", "share_of_flops"),
        )
      ],
    ),
    "costs": _chart.lines(
      "Milliseconds of a step by size of tree",
      "nodes; ms",
      [
        _chart.Line(
          name,
          [
            (size, 1e3 * value)
            for size, value in zip(
              report["costs"]["sizes"], report["costs"][key], strict=True
            )
          ],
        )
        for name, key in (("step", "seconds"), ("draft", "draft_seconds"))
      ],
    ),
    "sizes": _chart.lines(
      "Tokens a second by size of tree",
      "nodes; tokens/s",
      [
        _chart.Line(
          "tokens/s",
          [(x["size"], x["tokens_per_second"]) for x in report["sizes"]],
        )
      ],
    ),
  }
  if "projection" in report:
    found["projection"] = _chart.lines(
      "Projection of tokens a second by size of tree",
      "nodes; tokens/s (projection)",
      [
        _chart.Line(
          x["name"],
          [(s["size"], s["tokens_per_second"]) for s in x["sizes"]],
        )
        for x in report["projection"]["accelerators"]
      ],
    )
  return found


def to_html(report: Mapping[str, Any]) -> str:
  """One page with tables, plots and the report as JSON; no scripts.

  It asks for nothing from the network, so it opens from disk.

  Args:
    report: from `profile`.

  Returns:
    HTML.

  Example:
    pathlib.Path("profile.html").write_text(ldjax.profile.to_html(report))
  """
  charts = _charts(report)
  sections = []
  for table in _tables.tables(report):
    # The first table of a name has the plot.
    chart = charts.pop(table.name, "")
    sections.append(
      f"<section><h2>{html.escape(table.title)}</h2>{chart}"
      f"{_table(table)}</section>"
    )
  title = f"Profile of {report['model']}"
  about = (
    f"{report['model']} ({report['dtype']}), draft {report['draft']}, on"
    f" {report['device']}, jax {report['jax']}: {report['prompts']} prompts, up"
    f" to {report['max_new_tokens']} tokens, batch {report['batch_size']}"
  )
  data = html.escape(json.dumps(report, indent=2), quote=False)
  return (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
    '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
    f"<h1>{html.escape(title)}</h1><p>{html.escape(about)}</p>"
    f"{''.join(sections)}"
    f"<details><summary>The report as JSON</summary><pre>{data}</pre></details>"
    "</body></html>\n"
  )
