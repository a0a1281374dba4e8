"""Plots the results of a benchmark of attention."""

import importlib.util
import json
from pathlib import Path


def plot(results: Path, note: str = "") -> None:
    """Writes bars of the TFLOP/s in results, NAME.json, to NAME.png beside it, if matplotlib is there."""
    if not importlib.util.find_spec("matplotlib"):
        return
    import matplotlib.pyplot as plt

    saved = json.loads(results.read_text())
    rows = [row for row in saved["rows"] if "tflops" in row]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    groups = [[row for row in rows if row["workload"] == workload] for workload in workloads]
    height = 0.85 / max(map(len, groups), default=1)
    places = {
        (row["workload"], row["implementation"]): i + (rank - (len(group) - 1) / 2) * height
        for i, group in enumerate(groups)
        for rank, row in enumerate(group)
    }
    figure, axes = plt.subplots(figsize=(9, 0.6 * len(workloads) + 1), layout="constrained")
    for implementation in implementations:
        chosen = [row for row in rows if row["implementation"] == implementation]
        at = [places[row["workload"], implementation] for row in chosen]
        axes.barh(at, [row["tflops"] for row in chosen], height, label=implementation)
    axes.set_yticks(range(len(workloads)), workloads)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    direction = rows[0]["direction"] if rows else ""
    axes.set_xlabel(f"TFLOP/s, {direction}{note}, {saved['environment']['gpu']}")
    axes.grid(axis="x", alpha=0.3)
    if rows:
        ncols = min(len(implementations), 4)
        figure.legend(loc="outside upper center", ncols=ncols, fontsize="small")
    figure.savefig(results.with_suffix(".png"), dpi=120)
