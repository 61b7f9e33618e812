"""The report as tables of text, for the terminal and for the page alike."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Report = Mapping[str, Any]

PARTS = ("draft", "verify", "accept", "commit", "step", "round", "host", "idle")
"""Of a round, in the order in which they are shown."""

_MEANINGS = {
  "draft": "proposing the tree",
  "verify": "the target's pass over it",
  "accept": "the walk down the tree",
  "commit": "keys and values, and what the draft makes of them",
  "step": "all four as one program",
  "round": "between two rounds of the generation",
  "host": "enqueueing, reading, text; beside the step",
  "idle": "the device waiting for the host",
}


class Table(NamedTuple):
  """Rows of text under a title."""

  name: str
  """A key of the report."""
  title: str
  """What is shown above it."""
  columns: Sequence[str]
  """Their heads."""
  rows: Sequence[Sequence[str]]
  """A cell a column."""
  note: str = ""
  """What is shown below it."""


def _ms(seconds: float) -> str:
  return f"{1e3 * seconds:.2f}"


def _mb(size: float) -> str:
  return f"{size / 1e6:.1f}"


def _share(value: float) -> str:
  return f"{100 * value:.1f}%"


def advice(report: Report) -> Table:
  """The ranked list."""
  return Table(
    "advice",
    "What would help most",
    ("gain", "by", "why", "arithmetic"),
    [
      (
        f"{'at most ' if each['at_most'] else ''}{each['gain']:.2f}",
        each["do"],
        each["what"],
        each["arithmetic"],
      )
      for each in report["advice"]
    ],
    "Tokens/s over those measured. Each stands alone: gains do not multiply."
    if report["advice"]
    else "Nothing that was measured promises 3% or more.",
  )


def _rounds(report: Report) -> Iterator[Table]:
  parts = report["round"]
  yield Table(
    "round",
    f"A round of {parts['size']} nodes",
    ("part", "ms", "what it is"),
    [(name, _ms(parts[name]), _MEANINGS[name]) for name in PARTS],
    "Each of the four parts is a program of its own, which pays for being"
    " started and for what the compiler fuses across them.",
  )
  yield Table(
    "sizes",
    "Each size of tree alone",
    ("nodes", "depth", "rounds", "tokens a round", "ms a round", "tokens/s"),
    [
      (
        str(x["size"]),
        str(x["depth"]),
        str(x["rounds"]),
        f"{x['tokens_a_round']:.2f}",
        _ms(x["seconds_a_round"]),
        f"{x['tokens_per_second']:.2f}",
      )
      for x in report["sizes"]
    ],
  )
  yield Table(
    "acceptance",
    "Acceptance by depth",
    ("depth", "tried", "accepted", "rate"),
    [
      (
        str(x["depth"]),
        str(x["tried"]),
        str(x["accepted"]),
        f"{x['rate']:.3f}",
      )
      for x in report["acceptance"]
    ],
    "Of walks that came to the depth before, those that went on.",
  )


def _machine(report: Report) -> Iterator[Table]:
  machine, costs = report["machine"], report["costs"]
  yield Table(
    "step",
    "The target's pass against this machine",
    ("nodes", "ms", "MB", "GFLOP", "GB/s", "of read", "GFLOP/s", "of products"),
    [
      (
        str(x["size"]),
        _ms(x["seconds"]),
        _mb(x["bytes"]),
        f"{x['flops'] / 1e9:.3f}",
        f"{x['bytes_per_second'] / 1e9:.2f}",
        _share(x["share_of_read"]),
        f"{x['flops_per_second'] / 1e9:.2f}",
        _share(x["share_of_flops"]),
      )
      for x in report["step"]
    ],
    f"Ceilings measured here: reading {machine['read_bytes'] / 1e6:.1f} MB at"
    f" {machine['bytes_per_second'] / 1e9:.2f} GB/s, a product of"
    f" {machine['matmul_size']} x {machine['matmul_size']} {machine['dtype']}"
    f" at {machine['flops_per_second'] / 1e9:.2f} GFLOP/s. Bytes, operations by"
    f" formula, {report['context']} tokens of context.",
  )
  yield Table(
    "costs",
    f"The cost curve ({costs['source']})",
    ("nodes", "step ms", "of it draft ms", "over one node"),
    [
      (
        str(size),
        _ms(seconds),
        _ms(draft),
        f"{seconds / costs['seconds'][0]:.2f}",
      )
      for size, seconds, draft in zip(
        costs["sizes"], costs["seconds"], costs["draft_seconds"], strict=True
      )
    ],
  )
  yield Table(
    "ceiling",
    "The best chain by this curve, by how often a drafted token is right",
    ("right", "nodes", "speed-up", "nodes", "speed-up if drafting were free"),
    [
      (
        f"{x['acceptance']:.2f}",
        str(x["size"]),
        f"{x['speedup']:.2f}",
        str(x["free_size"]),
        f"{x['free_speedup']:.2f}",
      )
      for x in report["ceiling"]
    ],
  )


def _rest(report: Report) -> Iterator[Table]:
  speed, cache = report["speed"], report["cache"]
  compiled = report["compilations"]
  if report["ngram"]:
    yield Table(
      "ngram",
      "The n-gram draft, replayed on these texts",
      ("nodes", "rounds", "tokens a round", "proposing, ms"),
      [
        (
          str(x["size"]),
          str(x["rounds"]),
          f"{x['tokens_a_round']:.2f}",
          _ms(x["propose_seconds"]),
        )
        for x in report["ngram"]
      ],
    )
  sizes = ", ".join(f"{n} of {s}" for s, n in speed["rounds_by_size"].items())
  yield Table(
    "speed",
    "All of it",
    ("what", "value"),
    [
      ("tokens", str(speed["tokens"])),
      ("tokens/s in rounds", f"{speed['tokens_per_second']:.2f}"),
      ("mean accepted", f"{speed['mean_accepted']:.2f}"),
      ("rounds measured", str(speed["rounds"])),
      ("rounds by nodes", sizes),
      ("tokens a round", f"{speed['tokens_a_round']:.2f}"),
      ("ms a round", _ms(speed["seconds_a_round"])),
      ("seconds in rounds", f"{speed['decode_seconds']:.2f}"),
      ("seconds in prefills and ends", f"{speed['prefill_seconds']:.2f}"),
      ("programs compiled", str(compiled["programs"])),
      ("seconds of compiling", f"{compiled['seconds']:.1f}"),
      ("programs from JAX's cache", str(compiled["from_cache"])),
      ("programs compiled later", str(compiled["while_measuring"])),
      ("cache dtype", cache["dtype"]),
      ("int8 cache over this one", f"{cache['int8_ratio']:.3f}"),
      ("page, positions", str(cache["page_size"])),
      ("page, MB", _mb(cache["page_bytes"])),
      ("pool, MB", _mb(cache["total_bytes"])),
      ("pages in use at most, MB", _mb(cache["peak_used_bytes"])),
      ("waste at that time", _share(cache["waste_at_peak"])),
      ("mean waste", _share(cache["mean_waste"])),
      ("fragmentation", _share(cache["fragmentation"])),
    ],
  )


def _projection(report: Report) -> Iterator[Table]:
  if "projection" not in report:
    return
  found = report["projection"]
  yield Table(
    "projection",
    f"Projection: {found['dtype']}, batch {found['batch']}, {found['context']}"
    " tokens of context",
    (
      "device",
      "plain tokens/s (projection)",
      "best nodes (projection)",
      "tokens/s (projection)",
      "speed-up (projection)",
      "limit (projection)",
    ),
    [
      (
        x["name"] + ("" if x["fits"] else " (does not fit)"),
        f"{x['plain_tokens_per_second']:.1f}",
        str(x["best_size"]),
        f"{x['best_tokens_per_second']:.1f}",
        f"{x['speedup']:.2f}",
        next(s["limit"] for s in x["sizes"] if s["size"] == x["best_size"]),
      )
      for x in found["accelerators"]
    ],
    found["note"],
  )
  yield Table(
    "projection",
    "Projection: a step by nodes, ms, and tokens/s",
    ("device", *_projected_columns(found)),
    [
      (
        x["name"],
        *(
          f"{1e3 * s['step_seconds']:.3f} / {s['tokens_per_second']:.1f}"
          for s in x["sizes"]
        ),
      )
      for x in found["accelerators"]
    ],
  )
  yield Table(
    "projection",
    "Projection: the published figures under it",
    (
      "device",
      "bf16 TFLOP/s (projection)",
      "GB/s (projection)",
      "source (projection)",
    ),
    [
      (
        x["name"],
        f"{x['flops_per_second'] / 1e12:g}",
        f"{x['bytes_per_second'] / 1e9:g}",
        x["source"],
      )
      for x in found["accelerators"]
    ],
  )


def _projected_columns(found: Mapping[str, Any]) -> list[str]:
  sizes = found["accelerators"][0]["sizes"] if found["accelerators"] else []
  return [f"{each['size']} (projection)" for each in sizes]


def tables(report: Report) -> list[Table]:
  """All tables of a report, what would help first.

  Args:
    report: from `profile`.
  """
  return [
    advice(report),
    *_rounds(report),
    *_machine(report),
    *_rest(report),
    *_projection(report),
  ]
