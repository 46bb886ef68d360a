"""A convolution by slides: windows of rows, and in each row windows of pixels, with their kernel.

An image is a nest of rows of pixels, a pixel a vector of its channels. What the rows of a window
give is added up pixel by pixel, by a reduction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

BATCH, HEIGHT, WIDTH, CHANNELS, OUT = 2, 4, 5, 3, 4


def pixel(window: Any, *, kernel: Any) -> Any:
    return ops.flatten(window) @ kernel


def row(pixels: Any, kernel: Any) -> Any:
    """A row beside one row of the kernel, [3 * channels, out]."""
    windows = ops.slide(pixels, 3, padding=1, padding_value=np.zeros(CHANNELS, np.float32))
    return ops.map(pixel, windows, kernel=kernel)


def added(some: Any, more: Any) -> Any:
    return ops.map(lambda a, b: a + b, ops.zip(some, more))


def window(rows: Any, *, kernels: Any) -> Any:
    return ops.reduce(added, ops.map(row, ops.zip(rows, kernels)))


def convolve(image: Any, *, kernels: Any) -> Any:
    nothing = ops.FractalTensor(np.zeros((WIDTH, CHANNELS), np.float32))
    return ops.map(window, ops.slide(image, 3, padding=1, padding_value=nothing), kernels=kernels)


def network(images: Any, *, kernels: Any) -> Any:
    """The images' pixels with other channels: [images][rows][pixels] of [out]."""
    return ops.map(convolve, images, kernels=kernels)


def inputs() -> dict[str, Any]:
    """Images, and a kernel of 3 rows."""
    random = np.random.default_rng(0)
    images = random.standard_normal((BATCH, HEIGHT, WIDTH, CHANNELS), np.float32)
    kernels = random.standard_normal((3, 3 * CHANNELS, OUT), np.float32) * np.float32(0.3)
    return {
        "images": ops.FractalTensor([[list(line) for line in image] for image in images]),
        "kernels": ops.FractalTensor(kernels),
    }


def main() -> None:
    """Run it, and say what came out."""
    found = network(**inputs()).numpy()
    print(f"convolution: images {list(found.shape)}, variance {float(found.var()):.4f}")


if __name__ == "__main__":
    main()
