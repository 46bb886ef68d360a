"""A transformer's layer over sentences of different lengths, word by word: nothing is padded.

Attention is a map over heads, in it one over words; the rest is a map over words. Words are zipped
with what they saw, and that with the heads that saw it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

HEADS, WIDTH, HIDDEN = 2, 4, 8


def normed(word: Any, *, scale: Any, shift: Any) -> Any:
    deviation = word - word.mean(axis=1, keepdims=True)
    variance = (deviation * deviation).mean(axis=1, keepdims=True)
    return deviation / np.sqrt(variance + np.float32(1e-5)) * scale + shift


def attend(query: Any, *, keys: Any, values: Any) -> Any:
    return ops.softmax(query @ keys.T * np.float32(WIDTH**-0.5)) @ values


def asked(word: Any, *, w_query: Any, w_key: Any, w_value: Any) -> Any:
    return word @ w_query, word @ w_key, word @ w_value


def head(w_query: Any, w_key: Any, w_value: Any, *, words: Any) -> Any:
    queries, keys, values = ops.map(asked, words, w_query=w_query, w_key=w_key, w_value=w_value)
    return ops.map(attend, queries, keys=ops.flatten(keys), values=ops.flatten(values))


def feed(word: Any, *seen: Any, w_out: Any, scale2: Any, shift2: Any, up: Any, down: Any) -> Any:
    word = word + ops.cat(*seen, axis=1) @ w_out
    return word + ops.relu(normed(word, scale=scale2, shift=shift2) @ up) @ down


def layer(words: Any, *, heads: Any, scale1: Any, shift1: Any, **weights: Any) -> Any:
    seen = ops.map(head, heads, words=ops.map(normed, words, scale=scale1, shift=shift1))
    return ops.map(feed, ops.zip(words, *ops.unbind(seen)), **weights)


def network(sentences: Any, *, w_queries: Any, w_keys: Any, w_values: Any, **weights: Any) -> Any:
    """The words after the layer: [sentences][words] of [1, hidden]."""
    return ops.map(layer, sentences, heads=ops.zip(w_queries, w_keys, w_values), **weights)


def inputs() -> dict[str, Any]:
    """Sentences of different lengths, the weights of each head, and those of the layer."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) * np.float32(0.3)

    names = ("w_queries", "w_keys", "w_values")
    shapes = {
        "scale1": (1, HIDDEN), "shift1": (1, HIDDEN), "w_out": (HEADS * WIDTH, HIDDEN),
        "scale2": (1, HIDDEN), "shift2": (1, HIDDEN), "up": (HIDDEN, 4 * HIDDEN),
        "down": (4 * HIDDEN, HIDDEN),
    }  # fmt: skip
    return {
        "sentences": ops.FractalTensor([list(normal(length, 1, HIDDEN)) for length in (4, 2)]),
        **{name: ops.FractalTensor(normal(HEADS, HIDDEN, WIDTH)) for name in names},
        **{name: normal(*shape) for name, shape in shapes.items()},
    }


def main() -> None:
    """Run it, and say what came out."""
    words = network(**inputs())
    print(f"transformer layer: words {words.width_by_depth(1)}, {HEADS} heads")


if __name__ == "__main__":
    main()
