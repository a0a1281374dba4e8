"""Draws docs/masks.png, the pictures of docs/masks.md: ``uv run docs/draw_masks.py``."""

from pathlib import Path

import matplotlib.pyplot as plt

from jaxmagi import AttnMask, MaskType, masks

SLICES = {f"MaskType.{kind.name}": kind for kind in MaskType}
WINDOW = masks.sliding_window(16, 4)
PICTURES = {
    **{name: AttnMask.from_slices([(0, 12)], [(0, 16)], [kind]) for name, kind in SLICES.items()},
    "masks.causal(16)": masks.causal(16),
    "masks.sliding_window(16, 4)": WINDOW,
    'masks.documents([7, 3, 6], "causal")': masks.documents([7, 3, 6], "causal"),
    'masks.documents([7, 3, 6], "full")': masks.documents([7, 3, 6], "full"),
    "masks.block_causal(16, 4)": masks.block_causal(16, 4),
    "masks.prefix_lm(16, 5)": masks.prefix_lm(16, 5),
    "masks.shared_prefix(6, [4, 3, 3])": masks.shared_prefix(6, [4, 3, 3]),
    "masks.chunked_causal(16, 4)": masks.chunked_causal(16, 4),
    "masks.video(4, 4, kv_range=2)": masks.video(4, 4, kv_range=2),
    "masks.from_segment_ids([1]*6 + [2]*7 + [0]*3)": masks.from_segment_ids([1] * 6 + [2] * 7 + [0] * 3),
    "prefix_tree([-1, 0, 1, 1, 0], [5, 3, 2, 2, 4])": masks.prefix_tree([-1, 0, 1, 1, 0], [5, 3, 2, 2, 4]),
    "prefix_tree([-1, 0, 0, 1, 2], [4, 3, 3, 3, 3])": masks.prefix_tree([-1, 0, 0, 1, 2], [4, 3, 3, 3, 3]),
    "sliding_window(16, 4) & block_causal(16, 4)": WINDOW & masks.block_causal(16, 4),
    "two keys | a window over the others": (
        masks.causal(16).crop(keys=(0, 2)).shift(kv_len=16) | WINDOW.crop(keys=(2, 16)).shift(keys=2)
    ),
    "documents of a batch, 4096 tokens": masks.documents([611, 1024, 37, 320, 1500, 604]),
    "the same under a window of 256": masks.documents([611, 1024, 37, 320, 1500, 604], (255, 0)),
}


def main() -> None:
    figure, axes = plt.subplots(5, 4, figsize=(16, 20), layout="constrained")
    for ax, (title, mask) in zip(axes.flat, PICTURES.items(), strict=True):
        mask.draw(ax)
        ax.set_title(title, loc="left", fontsize=10)
    figure.savefig(Path(__file__).with_name("masks.png"), dpi=70)


if __name__ == "__main__":
    main()
