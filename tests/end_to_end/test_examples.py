"""Every example runs as a user would run it, and says what its docstring promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.grids import every

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def output_of(example: str) -> str:
    """What an example prints; fails with its errors if it does."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [re.match(r"stitch-\w+: (note:|wrote) ", line) for line in done.stderr.splitlines()]
    assert all(told), done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def digits() -> str:
    return output_of("digits/demo.py")


def test_the_demo_recognises_held_out_digits(digits: str) -> None:
    found = re.search(r"^accuracy +([0-9.]+): (\d+) of 360 ", digits, re.MULTILINE)
    assert found is not None
    assert float(found[1]) >= 0.95
    assert int(found[2]) == round(float(found[1]) * 360)


def test_the_demo_copies_the_images_in_and_nothing_else(digits: str) -> None:
    assert "2 program runs, 1 copy, 92160 B" in digits
    assert "input 'image' of 'features' wants" in digits
    assert "input 'features' of 'classifier' wants" not in digits


def test_programs_that_agree_on_l1_need_no_copy_and_dram_needs_one() -> None:
    agreeing, differing = output_of("chain_in_l1.py").split("A fourth")
    assert "3 program runs, 1 copy" in agreeing
    assert "4 program runs, 2 copies" in differing
    assert "input 'x' of 'layer3' wants f32:dram:tile:interleaved" in differing


def test_a_traced_function_gives_what_the_function_gives() -> None:
    printed = output_of("traced_function.py")
    assert "program @attention" in printed
    assert "2 program runs, 1 copy" in printed


def test_a_full_l1_moves_evicts_and_bounces_with_reasons() -> None:
    _, move, evict, bounce = re.split(r"^== ", output_of("full_l1.py"), flags=re.MULTILINE)
    assert re.search(r"^  move   x1 .*\n +room for 'half'", move, re.MULTILINE)
    assert "evict " not in move and "bounce " not in move
    assert re.search(r"^  evict  x1 .*\[capacity: 18432 B per bank", evict, re.MULTILINE)
    assert re.search(r"^  bounce x2 .*\[cycle: ", bounce, re.MULTILINE)
    assert "before: 0x400 and 0x2200\nafter:  0x2200 and 0x400\n" in bounce


def test_a_pipeline_file_carries_its_state_in_l1() -> None:
    printed = output_of("recurrent/run.py")
    # Twelve elements and the first state come in; the other states stay where they are made, and
    # the program that collects them takes them there.
    assert "14 program runs, 13 copies" in printed
    assert "input 'state' of 'readout' wants" not in printed


def test_a_model_as_tasks_gives_times_of_every_operator_and_learns() -> None:
    tasks, forward, backward, update = re.split(
        r"^== ", output_of("local_backend.py"), flags=re.MULTILINE
    )
    assert tasks.splitlines()[0].startswith("Gemm.forward     input0=x, input1=fc1.weight")
    timed = re.compile(r"^(\w+) +(\w+) +[0-9.]+ us$", re.MULTILINE)
    assert timed.findall(forward) == [("gemm", "Gemm"), ("relu", "Relu"), ("y", "Gemm")]
    assert [op for _, op in timed.findall(backward)] == ["mse", "Gemm", "Relu", "Gemm"]
    assert timed.findall(update) == [("update", "adam")]
    assert re.search(r"^largest of relu.grad: [0-9.]+$", update, re.MULTILINE)


#: What each of the examples over nests prints: lengths that follow from its sizes.
OVER_NESTS = {
    "attention": r"sequence to sequence with attention: \[3, 5\] words written",
    "bidirectional": r"bidirectional RNN: words \[4, 1, 6\], 16 features",
    "bigbird": r"BigBird: 6 blocks look at 6 of 7 blocks",
    "convolution": r"convolution: images \[2, 4, 5, 4\], variance [0-9.]+",
    "dilated_rnn": r"dilated RNN: dilations \(1, 2, 4\), words \[9, 6, 2\]",
    "flash_attention": r"flash attention: 2 heads of 3 blocks, differs by \d\.\de-0[6-9] from .*",
    "grid_rnn": r"grid RNN: 2 layers over grids of 2x3, 4x2",
    "multi_head_attention": r"multi-head attention: 2 sentences of \[5, 12\], 3 heads",
    "selective_state_space": r"selective state space: 6 words of 4, 8x3 states",
    "shrinking_batch": r"shrinking batch: 12 words of 4 sentences, \[4, 3, 3, 1, 1\] at each place",
    "sparse_attention": r"sparse attention: words \[7, 8\] see 3 each, 1 and 3 apart",
    "stacked_lstm": r"stacked LSTM: 3 layers of 5 words, mean of the last [+-]0\.0\d+",
    "stacked_rnn": r"stacked RNN: 3 sentences of 3 layers each, words \[4, 2, 5\]",
    "transformer": r"transformer layer: words \[4, 2\], 2 heads",
    "two_products": r"two products: 3 blocks of rows, differ by \d\.\de-0[6-9] from whole matrices",
}


@pytest.mark.parametrize("name", every(12, OVER_NESTS))
def test_a_network_over_nests_says_what_came_out(name: str) -> None:
    assert re.fullmatch(OVER_NESTS[name] + "\n", output_of(f"fractal/{name}.py"))


def test_every_example_is_run_here() -> None:
    scripts = {p.relative_to(EXAMPLES).as_posix() for p in EXAMPLES.rglob("*.py")}
    tested = set(re.findall(r'output_of\("([^"]+)"\)', Path(__file__).read_text(encoding="utf-8")))
    # Of the digits, what makes data and weights is tested in test_digits_data.py, the training in
    # test_digits_training.py, and what reads sheets in test_sheets_of_digits.py.
    elsewhere = {"prepare", "train_weights", "read_sheets", "sheets", "sheet_networks",
                 "train", "train_sheets"}  # fmt: skip
    tested |= {f"fractal/{name}.py" for name in OVER_NESTS}
    # test_extensions_from_outside.py installs and tests the plugins, tests/c_interface the scripts
    # beside the C programs.
    scripts = {name for name in scripts if not name.startswith(("plugins/", "c/"))}
    assert scripts - {f"digits/{name}.py" for name in elsewhere} == tested
