"""Damage to JSON, drawn at random: values taken away, replaced, moved, bent, and text cut."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

Place = tuple[str | int, ...]
#: What stands where something else should.
WRONG: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1 << 31, 1 << 63, 1 << 70, -1 << 70, 1e308, float("nan"),
    float("inf"), -1.5, "", "x", "0", "é", [], {}, [None], [[]], {"a": 1}, [1, 2, 3], ["a"],
    "AAAA", "float32", "nan", [1 << 40, 1 << 40], [-1], [0],
)  # fmt: skip


def places(data: Any, here: Place = ()) -> Iterator[Place]:
    """Where everything in some JSON stands, the whole first."""
    yield here
    if isinstance(data, dict | list):
        children: Any = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in children:
            yield from places(value, (*here, key))


def at(data: Any, place: Place) -> Any:
    """What stands at a place."""
    for key in place:
        data = data[key]
    return data


def damaged_json(text: str, rng: random.Random) -> str:
    """The JSON of one object after one to three damages, or its text after one."""
    if rng.random() < 0.25:
        return _damaged_text(text, rng)
    body = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        inside = list(places(body))[1:]
        if inside:
            _damage(body, rng.choice(inside), rng)
    return json.dumps(body)


def _damage(body: Any, place: Place, rng: random.Random) -> None:
    outer, key = at(body, place[:-1]), place[-1]
    kind = rng.randrange(6)
    if kind == 0:
        del outer[key]
    elif kind in (1, 2):
        outer[key] = rng.choice(WRONG)
    elif kind == 3 and isinstance(outer, dict):
        outer[rng.choice(["extra", "kind", "value", "shape", f"{key}x"])] = rng.choice(WRONG)
    elif kind == 3:
        outer.append(rng.choice([*WRONG, copy.deepcopy(outer[key])]))
    elif kind == 4:
        outer[key] = copy.deepcopy(at(body, rng.choice(list(places(body)))))
    else:
        outer[key] = _bent(outer[key], rng)


def _bent(value: Any, rng: random.Random) -> Any:
    if isinstance(value, str) and value:
        i = rng.randrange(len(value))
        return value[:i] + rng.choice(["", "A", "é", "\0", " "]) + value[i + 1 :]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice([value + 1, -value, value * 1e9, str(value), float(value), [value]])
    if isinstance(value, list):
        return value[::-1][: rng.randrange(len(value) + 1)]
    return list(value.items()) if isinstance(value, dict) else [value]


def _damaged_text(text: str, rng: random.Random) -> str:
    i = rng.randrange(len(text))
    j = min(len(text), i + rng.randrange(1, 40))
    return rng.choice([
        text[:i], text[:i] + text[j:], text[:i] + text[i:j] + text[i:],
        text[:i] + rng.choice('{}[]",:0 nt-e9\\\0é') + text[i + 1 :],
    ])  # fmt: skip
