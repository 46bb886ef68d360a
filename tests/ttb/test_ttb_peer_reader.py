"""flatbuffers' own library, by flatc's schema, reads what we write: an ordinary flatbuffer."""

from __future__ import annotations

import numpy as np

from stitch.ttb import encode
from tests.support.flatc import peer
from tests.ttb.test_ttb_round_trip import binary_of


def test_the_peer_finds_every_part_of_a_written_file() -> None:
    written = encode(binary_of(np.arange(3, dtype=np.int16), attributes={"axis": -7}))
    root = peer.read_file(written)
    (program,) = root["programs"]
    (operation,) = program["operations"]
    assert root["version"] == {"major": 1, "minor": 1}
    assert root["machine"]["name"] == "box"
    assert root["machine"]["l1"]["banks"] == 6
    assert [value["name"] for value in program["values"]] == ["x", "c0", "y"]
    assert operation["inputs"] == [0, 1]
    assert operation["attributes"] == [{"name": "axis", "value_type": 1, "value": {"value": -7}}]
    assert program["values"][1]["type"]["shape"] == [3]
    assert program["values"][1]["layout"]["data_type"] == peer.ENUMS["DataType"]["INT16"]
    assert root["segments"][program["constants"][0]["segment"]]["length"] == 6
