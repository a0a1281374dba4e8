"""Prints the report of a plan as a table."""

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ..planning import ContextPlan, CostModel, LinkTraffic, PlanReport

_MOST_ROWS = 16
_EXTREMES = 4
_WIDTH_OF_FILES = 120


def print_report(plan: ContextPlan, cost: CostModel) -> None:
    """Prints a table of ranks (the extremes if there are many), and a table of totals."""
    report = plan.report(cost)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_FILES)
    console.print(_ranks_table(report, cost))
    console.print(_totals(plan, report, cost))


def format_bytes(count: float) -> str:
    """Formats bytes in powers of 1000, with three decimals: ``1.500 kB``."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3f} {name}"
    return f"{count:.0f} B"


def _ranks_table(report: PlanReport, cost: CostModel) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("rank", "area", "/ mean", "rows sent", "rows received", "bytes sent", "bytes received"):
        table.add_column(name, justify="right", overflow="fold")
    shown = _shown_ranks(report)
    cp_size = len(report.area)
    if len(shown) < cp_size:
        table.title = (
            f"{len(shown)} of {cp_size} ranks: the {_EXTREMES} with the largest and the smallest areas, "
            "and with the most and the fewest rows to receive"
        )
    numbers = np.stack([report.area, report.rows_sent, report.rows_received])
    mean_area = max(float(report.area.mean()), 1.0)
    for rank in shown:
        table.add_row(*_cells(str(rank), numbers[:, rank], mean_area, cost))
    table.add_section()
    for name in ("smallest", "mean", "largest"):
        summary = {"smallest": numbers.min, "mean": numbers.mean, "largest": numbers.max}[name](axis=1)
        table.add_row(*_cells(name, summary, mean_area, cost))
    return table


def _shown_ranks(report: PlanReport) -> list[int]:
    """Returns all ranks, or if there are many those with the most and the least work."""
    if len(report.area) <= _MOST_ROWS:
        return list(range(len(report.area)))
    orders = [np.argsort(values, kind="stable") for values in (report.area, report.rows_received)]
    return np.unique([np.r_[order[:_EXTREMES], order[-_EXTREMES:]] for order in orders]).tolist()


def _cells(name: str, numbers: np.ndarray, mean_area: float, cost: CostModel) -> list[str]:
    area, *rows = numbers.tolist()
    return [
        name,
        f"{area:,.0f}",
        f"{area / mean_area:.3f}",
        *(f"{count:,.0f}" for count in rows),
        *(format_bytes(count * cost.row_bytes) for count in rows),
    ]


def _totals(plan: ContextPlan, report: PlanReport, cost: CostModel) -> Table:
    shard, padding = plan.shard_length, plan.shard_length * plan.cp_size - plan.length
    received, network = (rows.mean() / shard for rows in (report.rows_received, report.network_rows_received))
    imbalances = f"{report.work_imbalance:.4f}, backward {report.backward_work_imbalance:.4f}"
    forward, backward = 1e3 * report.predicted_seconds, 1e3 * report.predicted_backward_seconds
    links = f"{cost.link_gb_per_second:g} GB/s, between hosts {cost.network_gb_per_second:g} GB/s"
    sizes = f"{cost.num_heads} heads, {cost.num_kv_heads} of keys, of dimension {cost.head_dim}"
    levels = f"two, hosts of {plan.ranks_per_host}" if plan.two_levels else "one"
    totals = {
        "tokens": f"{plan.length:,} on {plan.cp_size:,} ranks, {shard:,} each ({padding:,} padding)",
        "imbalance": f"{report.imbalance:.4f} (largest / mean area), of predicted attention {imbalances}",
        "received rows": f"{received:.4f} of a rank's own rows (mean), {network:.4f} from other hosts",
        "within hosts": _link(report.within_hosts, plan),
        "between hosts": _link(report.between_hosts, plan),
        "levels": levels,
        "forward pass": f"{forward:.3f} ms predicted ({cost.tflops:g} TFLOP/s, {links}; {sizes})",
        "backward pass": f"{backward:.3f} ms predicted ({cost.backward_tflops:g} TFLOP/s)",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in totals.items():
        table.add_row(name, value)
    return table


def _link(link: LinkTraffic, plan: ContextPlan) -> str:
    """Formats what crosses links of one kind."""
    mean, most = format_bytes(link.bytes_moved / plan.cp_size), format_bytes(link.busiest_bytes)
    return f"{link.rows:,} rows; {mean} a rank (mean) in both passes, {most} sent or received by the busiest"
