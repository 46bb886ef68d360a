"""Multi-head attention: a map over heads, whose weights are zipped; their results side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

BATCH, WORDS, HEADS, WIDTH, HIDDEN = 2, 5, 3, 4, 12


def head(w_query: Any, w_key: Any, w_value: Any, *, words: Any) -> Any:
    query, key, value = words @ w_query, words @ w_key, words @ w_value
    return ops.softmax(query @ key.T * np.float32(WIDTH**-0.5)) @ value


def attend(words: Any, *, heads: Any, w_out: Any) -> Any:
    seen = ops.map(head, heads, words=words)
    return ops.cat(*ops.unbind(seen), axis=1) @ w_out


def network(sentences: Any, *, w_queries: Any, w_keys: Any, w_values: Any, w_out: Any) -> Any:
    """What the words of each sentence see: [sentences] of [words, hidden]."""
    heads = ops.zip(w_queries, w_keys, w_values)
    return ops.map(attend, sentences, heads=heads, w_out=w_out)


def inputs() -> dict[str, Any]:
    """Sentences, and the weights of each head."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) * np.float32(0.3)

    names = ("w_queries", "w_keys", "w_values")
    return {
        "sentences": ops.FractalTensor(normal(BATCH, WORDS, HIDDEN)),
        **{name: ops.FractalTensor(normal(HEADS, HIDDEN, WIDTH)) for name in names},
        "w_out": normal(HEADS * WIDTH, HIDDEN),
    }


def main() -> None:
    """Run it, and say what came out."""
    seen = network(**inputs())
    print(f"multi-head attention: {seen.length} sentences of {list(seen.leaf_shape)}, "
          f"{HEADS} heads")  # fmt: skip


if __name__ == "__main__":
    main()
