"""Architectures by torch.compile's backend: none raises, all give what eager torch gives.

`tools/zoo` judges all of them and prints a table; what torch runs of each is in `zoo.yaml`, so that
an operator that is no longer compiled shows.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.torch.zoo import ZOO, table
from tests.support.torch.zoo.verdicts import judged

KNOWN = table.read()
#: A tenth, with something of every kind: the quick run, but for `BROTHERS`.
QUICK = (
    "BERT", "DistilBERT", "FNet", "GPT-2", "Llama", "MPT", "Mixtral", "T5", "ViT", "ResNet",
    "channels last", "LSTM", "U-Net", "bags of words", "spatial transformer", "Fourier",
)  # fmt: skip
#: Those of them that the quick suite compiles in other files as well, or whose brother stays.
BROTHERS = ("BERT", "DistilBERT", "FNet", "Llama", "MPT", "T5", "ViT", "ResNet", "U-Net")
#: These are judged in a process of their own as well. In one run of CI the first forward pass of
#: both had numbers that are not finite, on a device that hundreds of tests had used; in some thirty
#: runs it was not seen again. The campaign has them in one process with other networks.
APART = ("GPT-2", "Mixtral")
_JUDGE = """\
import sys
from tests.support.torch.zoo.verdicts import judged
verdict = judged(sys.argv[1])
print("right" if verdict.is_right else verdict)
"""
#: torch has no Fourier transform in bfloat16.
NO_BFLOAT16 = {"FNet", "Fourier"}
THIRD = tuple(name for name in list(ZOO)[::3] if name not in QUICK)


def check(name: str, kind: torch.dtype = torch.float32) -> None:
    verdict = judged(name, kind)
    assert verdict.is_right, verdict
    assert dict(verdict.by_torch) == KNOWN.get(name, {}), verdict


def test_the_zoo_is_large_and_the_file_is_about_it() -> None:
    assert len(ZOO) >= 80 and set(KNOWN) <= set(ZOO)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.campaign("zoo") if n in (*BROTHERS, *APART) else ())
        for n in QUICK
    ],
)
def test_a_network_gives_what_eager_torch_gives(name: str) -> None:
    check(name)


@pytest.mark.campaign("zoo")
@pytest.mark.parametrize("name", APART)
def test_a_transformer_gives_what_eager_torch_gives_in_a_new_process(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _JUDGE, name],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["right"], done.stderr[-2000:]


@pytest.mark.campaign("zoo")
@pytest.mark.parametrize("name", THIRD)
def test_a_third_of_the_networks_gives_what_eager_torch_gives(name: str) -> None:
    check(name)


@pytest.mark.campaign("zoo")
@pytest.mark.parametrize("name", sorted({*QUICK} - NO_BFLOAT16))
def test_a_network_is_as_right_in_bfloat16_as_eager_torch(name: str) -> None:
    assert (verdict := judged(name, torch.bfloat16)).is_right, verdict
