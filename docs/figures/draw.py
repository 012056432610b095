"""Draws the figures of docs/ that show numbers or one request's life: `python docs/figures/draw.py [FOLDER]`.

request.svg: what pending, checkpoint and snapshots do while one request runs, computed by the rules of the cursors.
bytes.svg: bytes of a decode step by ring capacity, from the formulas of replayssm_kernels/traffic.py.
kernels.svg: measured time per layer and step by batch size, from sglang_replayssm/measured.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from replayssm_kernels.ring import RingShape
from replayssm_kernels.traffic import buffered_bytes, conventional_bytes
from sglang_replayssm import worth

HERE = Path(__file__).parent
BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#c05621", "#2f855a", "#718096"


def request(axes: plt.Axes, prompt: int = 50, out: int = 70, capacity: int = 16, interval: int = 64) -> None:
    """Pending records of one request over its token count, with its folds and snapshots."""
    checkpoint, counts, pending = prompt, [prompt], [0]
    for length in range(prompt + 1, prompt + out):
        if length - 1 - checkpoint == capacity:
            checkpoint = length - 1
            counts.append(length - 1)
            pending.append(0)
            axes.annotate("fold", (length - 1, 0), (length - 1, -2.6), ha="center", color=ORANGE, fontsize=9)
            axes.plot([length - 1] * 2, [0, capacity], ":", color=ORANGE, linewidth=1.2)
        counts.append(length)
        pending.append(length - checkpoint)
        if length % interval == 0:
            axes.plot([length], [length - checkpoint], "s", color=GREEN, markersize=8)
            axes.annotate(
                f"snapshot at {length}:\ncheckpoint {checkpoint} + {length - checkpoint} records",
                *((length, length - checkpoint), (length - 6, capacity + 1.2)),
                **dict(ha="right", color=GREEN, fontsize=9, arrowprops=dict(arrowstyle="->", color=GREEN)),
            )
    axes.plot(counts, pending, color=BLUE, linewidth=1.8)
    axes.axvspan(0, prompt, color=BLUE, alpha=0.10)
    axes.text(prompt / 2, capacity / 2, "prefill: SGLang's kernels,\nthe slot is exact", ha="center", color=GREY)
    axes.axvline(counts[-1], color=GREY, linewidth=1)
    axes.text(counts[-1] - 1, capacity + 1.4, "finish: the slot is folded,\nor its track slot handed over", **_right())
    axes.set(xlim=(0, counts[-1] + 2), ylim=(-4, capacity + 5.5), xlabel="tokens of the request")
    axes.set(ylabel="pending records", yticks=range(0, capacity + 1, 4))


def _right() -> dict[str, object]:
    return dict(ha="right", color=GREY, fontsize=9)


def step_bytes(axes: plt.Axes) -> None:
    """Bytes of a step over those of a conventional one."""
    capacities = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    cases = (("GDN, fp32 state", 16, 48, "gdn", 4, BLUE), ("GDN, bf16 state", 16, 48, "gdn", 2, GREEN))
    for name, k_heads, v_heads, gate, size, colour in (*cases, ("KDA, fp32 state", 32, 32, "kda", 4, ORANGE)):
        shapes = [
            RingShape(
                layers=1,
                rows=2,
                k_heads=k_heads,
                v_heads=v_heads,
                key_dim=128,
                value_dim=128,
                capacity=capacity,
                key_dtype=torch.bfloat16,
                gate=gate,
            )
            for capacity in capacities
        ]
        shares = [buffered_bytes(shape, 1, size) / conventional_bytes(shape, 1, size) for shape in shapes]
        axes.plot(capacities, shares, "o-", color=colour, label=name, markersize=4)
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set(xscale="log", xticks=capacities[::2], xticklabels=capacities[::2], ylim=(0, 1.9))
    axes.minorticks_off()
    axes.set(xlabel="L, records per fold (u in fp32)", ylabel="bytes of a step, conventional = 1")
    axes.legend(frameon=False)


def kernels(axes: plt.Axes) -> None:
    """Measured times of ours over SGLang's packed decode."""
    for gate, colour in (("gdn", BLUE), ("kda", ORANGE)):
        table = worth.measured()[gate]
        ratio = [ours / plain for ours, plain in zip(table["ours"], table["conventional"], strict=True)]
        axes.plot(table["batch"], ratio, "o-", color=colour, label=gate.upper(), markersize=5)
    batches = worth.measured()["gdn"]["batch"]
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set(xscale="log", xticks=batches, xticklabels=batches, ylim=(0, None))
    axes.minorticks_off()
    axes.set(xlabel="requests that decode together", ylabel="time, SGLang's packed decode = 1")
    axes.legend(frameon=False, title=worth.measured()["machine"].split(",")[0])


FIGURES = {"request": (request, (9.6, 3.8)), "bytes": (step_bytes, (6.4, 3.8)), "kernels": (kernels, (6.4, 3.8))}


def main(folder: Path = HERE) -> None:
    """Write every figure into `folder`."""
    plt.rcParams.update({"svg.hashsalt": "replayssm", "font.size": 10, "axes.spines.top": False})
    plt.rcParams.update({"axes.spines.right": False, "svg.fonttype": "none"})
    for name, (draw, size) in FIGURES.items():
        figure, axes = plt.subplots(figsize=size)
        draw(axes)
        figure.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
