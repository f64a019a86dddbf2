"""`--profile`: which operations the steps of a run spent their time in, beside the machine's rate of reading memory."""

from __future__ import annotations

import json
from typing import Any

from kvern.config import InvalidConfig
from kvern.engine.client import InprocClient

Row = dict[str, Any]


class StepProfile:
    """Time all steps from now on. Raises InvalidConfig where the kernels cannot be timed one by one."""

    def __init__(self, client: InprocClient) -> None:
        start = getattr(client.core.executor, "start_profile", None)
        profile = start() if start is not None else None
        if profile is None:
            raise InvalidConfig("profile: only recorded native kernels are timed; graph none and the others are not")
        self._profile = profile

    def report(self, as_json: bool) -> None:
        profile, rate = self._profile, self._profile.read_rate()
        rows: list[Row] = [
            {
                "op": row.name,
                "ms_per_step": row.seconds / profile.replays * 1e3,
                "share": row.share,
                "calls": row.calls // profile.replays,
                "GB_per_s": row.bytes / row.seconds / 1e9,
                "share_of_read_rate": row.bytes / row.seconds / rate,
                "GFLOP_per_s": row.flops / row.seconds / 1e9,
            }
            for row in profile.rows()
            if row.seconds
        ]
        if as_json:
            print(json.dumps({"profile": rows, "read_GB_per_s": round(rate / 1e9, 1)}), flush=True)
        else:
            _print_table(rows, rate)


def _print_table(rows: list[Row], rate: float) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"a step by operation; memory is read at {rate / 1e9:.1f} GB/s, of which products reach the share 'of rate'"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("operation", "ms/step", "share", "calls", "GB/s", "of rate", "GFLOP/s"):
        table.add_column(column, justify="left" if column == "operation" else "right", no_wrap=True)
    for row in rows:
        weights = (f"{row['GB_per_s']:.1f}", f"{row['share_of_read_rate']:.0%}", f"{row['GFLOP_per_s']:.0f}")
        table.add_row(
            row["op"], f"{row['ms_per_step']:.3f}", f"{row['share']:.1%}", str(row["calls"]),
            *(weights if row["GB_per_s"] else ("", "", "")),
        )  # fmt: skip
    Console().print(table)
