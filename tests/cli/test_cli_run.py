"""`stitch-run`: stitching, inputs, outputs, expectations, and how it says no."""

from __future__ import annotations

import gzip
import json
import os
import re
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import stitch
from stitch.cli import run_session
from stitch.cli.chain import Chain, RunInput
from stitch.cli.run_inputs import generate
from stitch.option_values import INITS
from stitch.program import DataType, InputKind, ValueType
from stitch.ttb import encode
from tests.support.stitched_models import one
from tests.support.trace_format import checked

Cli = Callable[..., Any]

AB = ("--module=a.ttb", "--module=b.ttb")
AB_DRAM = ("--module=a.ttb", "--module=b_dram.ttb")


def reference(x: np.ndarray) -> np.ndarray:
    """What a and then b compute."""
    with stitch.open_device("wormhole_n150") as device:
        a = device.load("a.ttb")
        return np.asarray(one(a(x)).numpy()) + np.float32(1)


# -- the line that shows it works ------------------------------------------------------------------


def test_two_modules_stitched_give_the_expected_output(cli: Cli) -> None:
    np.save("y.npy", reference(np.load("x.npy")))
    done = cli("run", *AB, "--input=x=@x.npy", "--expected_output=@y.npy")
    assert (done.code, done.err) == (0, "") and "[SUCCESS]" in done.out


def test_a_wrong_expectation_fails_with_how_many_how_much_and_where(cli: Cli) -> None:
    y = reference(np.load("x.npy"))
    y[2, 5] += 10
    y[0, 0] -= 1
    np.save("y.npy", y)
    done = cli("run", *AB, "--input=x=@x.npy", "--expected_output=@y.npy")
    assert done.code == 1
    failed = re.search(r"\[FAILED\] result\[0\]: (.*)", done.out)
    assert failed is not None
    assert "2 of 32 elements differ" in failed[1]
    assert "largest difference 10 at [2, 5]" in failed[1]


def test_with_both_in_l1_no_copy_lies_between_them(cli: Cli) -> None:
    done = cli("run", *AB, "--input=@x.npy", "--explain", "--max_copies=0")
    assert done.code == 0 and "input 'x' of 'b'" not in done.out


def test_where_b_wants_dram_there_is_exactly_one_copy(cli: Cli) -> None:
    refused = cli("run", *AB_DRAM, "--input=@x.npy", "--explain", "--max_copies=0")
    assert refused.code == 7
    assert "1 copy in one pass, at most 0 allowed" in refused.err
    assert refused.err.count("input 'x' of 'b'") == 1
    assert refused.out.count("input 'x' of 'b'") == 1
    assert cli("run", *AB_DRAM, "--input=@x.npy", "--max-copies=1").code == 0


def test_a_dry_run_plans_without_data_and_counts_planned_copies(cli: Cli) -> None:
    done = cli("run", *AB_DRAM, "--dry-run", "--max_copies=1")
    assert done.code == 0 and "nothing was executed" in done.out
    assert "input 'x' of 'b'" in done.out
    assert "the spaces saw 0 writes" in done.out
    assert cli("run", *AB_DRAM, "--dry_run", "--max_copies=0").code == 7


# -- wiring ----------------------------------------------------------------------------------------


def test_wires_by_name_connect_as_they_say(cli: Cli) -> None:
    words = ("--module=a.ttb", "--module=b.ttb", "--module=cell.ttb")
    wires = ("--wire", "a.y=b.x", "--wire", "a.y=cell.x", "--wire", "b.y=2.h")
    done = cli("run", *words, *wires, "--input=@x.npy", "--output=@z.npy")
    assert done.code == 0, done.err
    b = reference(np.load("x.npy"))
    np.testing.assert_array_equal(np.load("z.npy"), (b - np.float32(1)) + b)


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ("a.y", "not a wire"),
        ("a.y=c.x", "no module is called 'c'"),
        ("a.yy=b.x", "did you mean 'y'?"),
        ("b.y=a.x", "backwards"),
    ],
)
def test_a_wire_that_names_nothing_is_wrong_usage(cli: Cli, wire: str, said: str) -> None:
    done = cli("run", *AB, "--wire", wire, "--input=@x.npy")
    assert done.code == 2 and said in done.err


def test_an_input_cannot_be_fed_twice(cli: Cli) -> None:
    done = cli("run", *AB, "--wire=a.y=b.x", "--wire=0.0=1.0", "--input=@x.npy")
    assert done.code == 2 and "fed twice" in done.err


# -- inputs ----------------------------------------------------------------------------------------


def test_inputs_come_as_words_files_archives_and_raw_bytes(cli: Cli, here: Path) -> None:
    x = np.load("x.npy")
    (here / "x.bin").write_bytes(x.tobytes())
    np.savez("x.npz", x=x)
    np.savez("many.npz", x=x, other=x)
    spelt = "4x8xf32=" + " ".join(map(repr, x.reshape(-1).tolist()))
    outputs = []
    for word in (
        "@x.npy", "x=@x.npy", "0=@x.npy", "@x.npz", "x=@many.npz", "4x8xf32=@x.bin", spelt,
        f"x={spelt}",
    ):  # fmt: skip
        done = cli("run", "--module=a.ttb", f"--input={word}", "--output=@o.npy")
        assert done.code == 0, (word, done.err)
        outputs.append(np.load("o.npy").tobytes())
    assert len(set(outputs)) == 1


def test_arrays_of_other_floating_types_convert(cli: Cli) -> None:
    np.save("x64.npy", np.load("x.npy").astype(np.float64))
    done = cli("run", "--module=a.ttb", "--input=@x64.npy", "--output=@1.npy", "-q")
    assert done.code == 0
    assert done.err == "stitch-run: note: input 'x' is converted from float64 to float32\n"
    assert cli("run", "--module=a.ttb", "--input=@x.npy", "--output=@2.npy").code == 0
    np.testing.assert_array_equal(np.load("1.npy"), np.load("2.npy"))


@pytest.mark.parametrize("word", ["@x64.npy", "@x64.npz", "x=4x8xf16=1"])
def test_strict_types_refuse_arrays_of_other_floating_types(cli: Cli, word: str) -> None:
    x64 = np.load("x.npy").astype(np.float64)
    np.save("x64.npy", x64)
    np.savez("x64.npz", x=x64)
    done = cli("run", "--module=a.ttb", f"--input={word}", "--strict_types", "--output=@1.npy")
    assert done.code == 2 and "--strict_types converts none" in done.err, done.err
    assert not Path("1.npy").exists()
    assert cli("run", "--module=a.ttb", "--input=@x.npy", "--strict_types").err == ""


def test_a_value_too_large_for_the_slots_type_is_refused_in_our_words(cli: Cli) -> None:
    np.save("x64.npy", np.full((4, 8), 1e300))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = cli("run", "--module=a.ttb", "--input=@x64.npy")
    assert done.code == 2 and "too large" in done.err and "internal" not in done.err


def test_nameless_bytes_are_bfloat16_where_the_slot_is(cli: Cli) -> None:
    np.save("f.npy", np.array([1.5, -2, 3], ml_dtypes.bfloat16))
    assert np.load("f.npy").dtype == np.dtype("V2")
    done = cli("run", "--module=types.ttb", "--input=f=@f.npy", "--init=ones", "--output=g=@g.npy")
    assert done.code == 0
    assert "input 'f': two-byte elements without a type (|V2) are read as" in done.err
    assert "output 'g' is bfloat16, and is written as float32" in done.err
    assert np.load("g.npy").tolist() == [3, -4, 6] and np.load("g.npy").dtype == np.float32
    np.save("v.npy", np.zeros((4, 8), ml_dtypes.bfloat16))
    refused = cli("run", "--module=a.ttb", "--input=@v.npy")
    assert refused.code == 2 and "as NumPy writes bfloat16" in refused.err
    unlike = cli("run", "--module=a.ttb", "--init=ones", "--expected_output=@v.npy")
    assert unlike.code == 2 and "expected_output 'y'" in unlike.err


def test_integers_bits_and_bfloat16_go_in_and_out(cli: Cli) -> None:
    np.save("f.npy", np.array([1.5, -2, 3], ml_dtypes.bfloat16))
    done = cli(
        "run", "--module=types.ttb", "--input=i=3xi32=1 -2 0x10", "--input=p=3xi1=true 0 1",
        "--input=f=@f.npy", "--output=-", "--output=-", "--output=g=-",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "3xi32=2 -4 32" in done.out
    assert "3xi1=False True False" in done.out.replace("  ", " ")
    assert re.search(r"3xbf16=3\.? -4\.? 6\.?", done.out.replace("  ", " "))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "inputs are missing: x"),
        (("--input=@x.npy", "--input=@x.npy"), 2, "surplus"),
        (("--input=x=@x.npy", "--input=x=@x.npy"), 2, "twice"),
        (("--input=z=@x.npy",), 2, "no input 'z'"),
        (("--input=@gone.npy",), 3, "gone.npy"),
        (("--input=@x.txt",), 2, ".npy"),
        (("--input=@text.npy",), 3, "no sound .npy"),
        (("--input=@objects.npy",), 3, "no sound .npy"),
        (("--input=@words.npy",), 3, "type"),
        (("--input=@wide.npy",), 2, "another shape"),
        (("--input=@whole.npy",), 2, "another type"),
        (("--input=@named.npz",), 2, "there is no input"),
        (("--input=@broken.npz",), 3, "no sound .npz"),
        (("--input=4x8xf32=1 2 3",), 2, "4x8xf32 has 32 elements"),
        (("--input=4x8xf32=one",), 2, "no value of float32"),
        (("--input=4x8xbfp8=1",), 2, "block format of devices"),
        (("--input=4x8xf32=@short.bin",), 3, "exactly the bytes"),
        (("--input=nonsense",), 2, "no input"),
        (("--input=999999x999999x999999xf32=1",), 2, "too large"),
    ],
)
def test_a_bad_input_is_said_before_anything_runs(
    cli: Cli, here: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    (here / "text.npy").write_text("this is no array")
    (here / "broken.npz").write_bytes(b"PK\x03\x04 and then nothing")
    (here / "short.bin").write_bytes(b"123")
    np.save("objects.npy", np.array([{}, 3], object), allow_pickle=True)
    np.save("words.npy", np.array(["a"] * 32).reshape(4, 8))
    np.save("wide.npy", np.zeros((8, 4), np.float32))
    np.save("whole.npy", np.zeros((4, 8), np.int32))
    np.savez("named.npz", y=np.zeros((4, 8), np.float32))
    done = cli("run", "--module=a.ttb", *words, "--output=@o.npy")
    assert done.code == code and said in done.err, done.err
    assert "Traceback" not in done.err and not (here / "o.npy").exists()


@pytest.mark.parametrize("init", ["randn", "arange", "zeros", "ones"])
def test_inputs_that_are_made_up_are_the_same_each_time(cli: Cli, init: str) -> None:
    words = ("--module=a.ttb", f"--init={init}", "--seed=7")
    assert cli("run", *words, "--output=@1.npy").code == 0
    assert cli("run", *words, "--expected_output=@1.npy", "--atol=0", "--rtol=0").code == 0


@pytest.mark.parametrize("name", ["int8", "int32", "uint64", "bool", "float16", "bfloat16"])
@pytest.mark.parametrize("init", INITS)
def test_long_inputs_are_made_up_in_parts_as_if_at_once(name: str, init: str) -> None:
    data_type = DataType.parse(name)
    for kind in (InputKind.ACTIVATION, InputKind.KEY):
        long = generate(RunInput("x", ValueType((3, 70_001), data_type), kind), init, (3, 0))
        short = generate(RunInput("x", ValueType((5,), data_type), kind), init, (3, 0))
        assert long.dtype == data_type.dtype and long.shape == (3, 70_001)
        assert long.reshape(-1)[:5].tobytes() == short.tobytes()
        assert data_type is not DataType.FLOAT16 or np.isinf(long).any() == (init == "arange")
    if init == "randn" and data_type.is_floating:
        values = long.reshape(-1).astype(np.float64)
        assert abs(values.mean()) < 0.02 and abs(values.std() - 1) < 0.02
        whole = values[: 3 << 16].reshape(3, -1)
        assert not (whole[0] == whole[1]).all() and not (whole[1] == whole[2]).all()
    if init == "arange" and data_type.dtype.kind in "iu":
        counted = np.arange(long.size).astype(data_type.dtype)
        np.testing.assert_array_equal(long.reshape(-1), counted)


# -- outputs and expectations ----------------------------------------------------------------------


def test_outputs_go_to_files_archives_and_nowhere(cli: Cli, here: Path) -> None:
    words = ("--module=types.ttb", "--init=arange")
    done = cli("run", *words, "--output=", "--output=@q.npy", "--output=@all.npz",
               "--output=g=@some.npz", "--output=@all.npz")  # fmt: skip
    assert (done.code, done.out) == (0, ""), done.err
    with np.load("all.npz") as everything, np.load("some.npz") as some:
        assert sorted(everything.files) == ["g", "j", "q"] and some.files == ["g"]
        np.testing.assert_array_equal(np.load("q.npy"), everything["q"])
        assert everything["g"].dtype == np.float32


def test_without_an_output_option_results_are_shown_cut_short(cli: Cli) -> None:
    done = cli("run", "--module=b.ttb", "--init=ones")
    assert done.code == 0 and done.out.startswith("result[0] y: 4x8xf32=[2. 2.")
    assert "..." in done.out
    whole = cli("run", "--module=b.ttb", "--init=ones", "--output=-")
    assert "..." not in whole.out and whole.out.count("2.") == 32


@pytest.mark.parametrize(
    ("expected", "code"),
    [
        ("(ignored)", 0),
        ("4x8xf32=2", 0),
        ("4x8xf32=2.00005", 0),
        ("4x8xf32=2.001", 1),
        ("8x4xf32=2", 1),
        ("4x8xi32=2", 1),
        ("y=4x8xf64=2", 0),
        ("4x8xf32=nan", 1),
        ("4x8xf32=inf", 1),
    ],
)
def test_expectations_follow_the_tolerance_rule(cli: Cli, expected: str, code: int) -> None:
    done = cli("run", "--module=b.ttb", "--init=ones", f"--expected_output={expected}")
    assert done.code == code, done.out + done.err
    if code:
        assert "[FAILED] result[0]: y: " in done.out


def test_nan_equals_nan_and_infinity_itself(cli: Cli) -> None:
    values = " ".join(["nan", "inf", "-inf", *["1"] * 29])
    expected = " ".join(["nan", "inf", "-inf", *["2"] * 29])
    words = ("--module=b.ttb", f"--input=4x8xf32={values}")
    assert cli("run", *words, f"--expected_output=4x8xf32={expected}").code == 0


def test_tolerances_and_correlation_can_be_chosen(cli: Cli) -> None:
    np.save("y.npy", reference(np.load("x.npy")) * np.float32(1.5))
    words = (*AB, "--input=@x.npy", "--expected_output=@y.npy")
    assert cli("run", *words).code == 1
    assert cli("run", *words, "--rtol=0.5").code == 0
    assert cli("run", *words, "--pcc=0.99").code == 0
    assert cli("run", *words, "--pcc=0.99", "--atol=1e-6").code == 1
    np.save("y.npy", -np.load("y.npy"))
    refused = cli("run", *words, "--pcc=0.99")
    assert refused.code == 1 and "PCC is -" in refused.out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--output=@y.bin",), 2, ".npy"),
        (("--output=where",), 2, "no output"),
        (("--output=-", "--output=-"), 2, "surplus"),
        (("--output=z=-",), 2, "no output 'z'"),
        (("--expected_output=@gone.npy",), 3, "gone.npy"),
        (("--expected_output=what",), 2, "no expected output"),
        (("--expected_output=(ignored)", "--expected_output=(ignored)"), 2, "surplus"),
        (("--num_runs=0",), 2, "at least 1, not '0'"),
        (("--window=x",), 2, "at least 1, not 'x'"),
        (("--max_copies=-1",), 2, "at least 0"),
        (("--executor=gpu",), 2, "numpy"),
        (("--dry_run", "--executor=numpy"), 2, "executes nothing"),
        (("--dry_run", "--expected_output=64x64xf32=1"), 2, "needs a result"),
        (("--executor=null", "--expected_output=(ignored)"), 2, "--executor=null"),
        (("--dry_run", "--output=y=@y.npy"), 2, "--output=y=@y.npy needs a result"),
        (("--executor=null", "--output=@y.npz"), 2, "needs a result"),
    ],
)
def test_bad_words_are_wrong_usage(cli: Cli, words: tuple[str, ...], code: int, said: str) -> None:
    done = cli("run", "--module=b.ttb", "--init=ones", *words)
    assert done.code == code and said in done.err, done.err


def test_a_program_without_inputs_takes_none(cli: Cli, here: Path) -> None:
    (here / "none.yaml").write_text(
        "parameters:\n  w: {values: [1.0, 2.0]}\noperations:\n  - y = Add(w, 1.0)\noutputs: [y]\n"
    )
    assert cli("compile", "none.yaml", "-o", "none.ttb").code == 0
    done = cli("run", "--module=none.ttb", "--input=4xf32=1")
    assert done.code == 2 and "expected: no --input" in done.err


def test_outputs_appear_all_together_or_not_at_all(cli: Cli, here: Path) -> None:
    (here / "file").write_text("not a folder")
    before = sorted(here.iterdir())
    done = cli("run", "--module=types.ttb", "--init=ones", "--output=@j.npy", "--output=@q.npy",
               "--output=@file/g.npy", "--result_file", "--trace=t.json")  # fmt: skip
    assert done.code == 6 and "cannot write the file" in done.err
    # Only the account of the failure is there.
    assert sorted(set(here.iterdir()) - set(before)) == [here / "run_results.json"]


def test_a_full_disk_is_said_and_leaves_no_part_of_a_file(cli: Cli, here: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.fail("this test needs a system with /dev/full")
    before = {*here.iterdir()}
    done = cli("run", "--module=b.ttb", "--init=ones", "--output=@first.npy", "--trace=/dev/full")
    assert done.code == 6 and "No space left" in done.err
    assert {*here.iterdir()} == before | {here / "first.npy"}
    assert not Path("/dev/full").is_file()


# -- modules and machines --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "nothing to run"),
        (("x.npy",), 2, "--module=x.npy"),
        (("a.ttb", "--module=b.ttb"), 2, "write all of them with --module="),
        (("p.yaml", "--module=a.ttb"), 2, "runs alone"),
        (("p.yaml", "a.ttb"), 2, "runs alone"),
        (("a.yaml",), 2, "stitch-compile a.yaml -o a.ttb && stitch-run a.ttb"),
        (("--module=gone.ttb",), 3, "gone.ttb"),
        (("--module=a.yaml",), 3, "stitch-compile"),
        (("--module=cut.ttb",), 3, "cut.ttb"),
        (("--module=a.ttb", "--function=z"), 2, "no program 'z'"),
        (("--module=a.ttb", "--function=a", "--function=a"), 2, "2 functions for 1"),
        (("--module=a.ttb", "--device=nowhere"), 2, "no machine 'nowhere'"),
        (("--module=a.ttb", "--device=host"), 4, "wormhole_n150"),
        (("--module=a.ttb", "--device=tiny"), 4, "banks"),
    ],
)
def test_what_cannot_be_run_is_said_with_its_exit_code(
    cli: Cli, here: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    (here / "cut.ttb").write_bytes((here / "a.ttb").read_bytes()[:300])
    done = cli("run", *words, "--init=ones")
    assert done.code == code and said in done.err, done.err
    assert "Traceback" not in done.err


def test_a_file_of_a_newer_version_is_incompatible(cli: Cli, here: Path) -> None:
    newer = stitch.load("a.ttb")
    object.__setattr__(newer, "requires", ("time_travel",))
    (here / "new.ttb").write_bytes(encode(newer))
    done = cli("run", "--module=new.ttb", "--init=ones")
    assert done.code == 4 and "time_travel" in done.err


def test_a_binary_for_a_machine_of_ones_own_asks_for_its_description(cli: Cli, here: Path) -> None:
    text = resources.files("stitch.machine").joinpath("tiny.yaml").read_text()
    (here / "mine.yaml").write_text(text.replace("name: tiny", "name: mine"))
    assert cli("compile", "b.yaml", "-o", "m.ttb", "--target=mine.yaml").code == 0
    refused = cli("run", "--module=m.ttb", "--init=ones")
    assert refused.code == 2 and "--device" in refused.err
    assert cli("run", "--module=m.ttb", "--init=ones", "--device=mine.yaml").code == 0
    assert cli("run", "--module=m.ttb", "--init=ones", "--target=tiny").code == 0


@pytest.mark.parametrize(
    "words", [*((f"--init={init}",) for init in INITS), ("--dry_run",), ("--executor=null",)]
)
def test_a_program_larger_than_the_machine_is_out_of_memory_before_inputs_are_made(
    cli: Cli, here: Path, words: tuple[str, ...]
) -> None:
    binary = stitch.load("b.ttb")
    (program,) = binary.programs
    huge = ValueType((32, 1 << 33), DataType.FLOAT32)
    values = tuple(replace(v, type=huge) if v.type.shape else v for v in program.values)
    grown = replace(binary, programs=(replace(program, values=values),))
    (here / "huge.ttb").write_bytes(encode(grown))
    done = cli("run", "--module=huge.ttb", *words)
    assert done.code == 5 and "does not fit l1" in done.err, done.err
    assert cli("inspect", "huge.ttb", "--check_plan").code == 5


def test_an_input_larger_than_the_host_is_out_of_memory(cli: Cli, here: Path) -> None:
    (here / "p.yaml").write_text(
        "modules: {b: b.ttb}\ninputs:\n  xs: {shape: [999999999999, 4, 8], type: float32}\n"
        "steps:\n  - {run: b, inputs: {x: 'xs[0]'}, outputs: {y: y}}\noutputs: [y]\n"
    )
    for word in ("--init=randn", "--dry_run"):
        done = cli("run", "p.yaml", word)
        assert done.code == 5 and "input 'xs' exceeds the host memory" in done.err, done.err


def test_list_devices_lists_the_machines(cli: Cli) -> None:
    done = cli("run", "--list-devices")
    assert done.code == 0
    assert [line.split(":")[0] for line in done.out.splitlines()] == [
        "blackhole_p150", "cuda", "host", "tiny", "wormhole_n150",
    ]  # fmt: skip


# -- reports ---------------------------------------------------------------------------------------


def test_statistics_memory_and_results_are_reported(cli: Cli) -> None:
    done = cli("run", *AB_DRAM, "--input=@x.npy", "--num_runs=5", "--warmup_runs=1", "--loops=2",
               "--print_statistics", "--memory", "--result_file", "--output=@o.npy",
               "--expected_output=(ignored)")  # fmt: skip
    assert done.code == 0, done.err
    assert re.search(r"10 timed passes: p50 \S+ us  p90 \S+ us  p99 \S+ us", done.out)
    assert "l1: peak" in done.out and "dram: 12 banks" in done.out
    results = json.loads(Path("run_results.json").read_text())
    assert results["result"] == "pass" and results["exit_code"] == 0
    assert results["passes"] == 12 and results["copies_per_pass"] == 1
    assert results["memory_writes"]["writes"] == 24
    assert {"p50", "p90", "p99"} <= results["seconds"].keys()
    assert results["machine"] == "wormhole_n150"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(MemoryError(), 5, "out of host memory"), (KeyboardInterrupt(), 130, "interrupted"),
     (RuntimeError("odd"), 6, "internal error: RuntimeError: odd"),
     (OSError(24, "full"), 6, "full")],
)  # fmt: skip
def test_whatever_ends_a_run_replaces_the_result_of_an_earlier_one(
    error: BaseException, code: int, said: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--module=b.ttb", "--init=ones", "--result_file=r.json")
    assert cli("run", *words).code == 0

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(run_session, "_run", fail)
    done = cli("run", *words)
    assert done.code == code and said in done.err
    results = json.loads(Path("r.json").read_text())
    assert (results["result"], results["exit_code"]) == ("error", code)
    assert said in results["error"]


def test_the_results_survive_a_mismatch(cli: Cli) -> None:
    words = ("--init=ones", "--expected_output=4x8xf32=5", "--output=@o.npy", "--result_file")
    assert cli("run", "--module=b.ttb", *words).code == 1
    np.testing.assert_array_equal(np.load("o.npy"), np.full((4, 8), 2, np.float32))
    results = json.loads(Path("run_results.json").read_text())
    assert results["result"] == "mismatch"
    assert results["comparisons"][0]["max_abs_difference"] == 3


def test_a_tensor_that_somebody_keeps_is_a_leak(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    run = Chain.run

    def keep(self: Chain, arrays: Any) -> tuple[Any, ...]:
        made = run(self, arrays)
        kept.extend(made)
        return made

    monkeypatch.setattr(Chain, "run", keep)
    done = cli("run", *AB, "--input=@x.npy", "--check_memory_leak")
    assert done.code == 6 and "still allocated" in done.err and "output 'y' of 'b'" in done.err


def test_artifacts_hold_inputs_outputs_programs_and_plans(cli: Cli, here: Path) -> None:
    done = cli("run", *AB, "--input=@x.npy", "--save_artifacts", "--artifact_dir=deep/art")
    assert done.code == 0, done.err
    root = here / "deep" / "art"
    np.testing.assert_array_equal(np.load(root / "inputs" / "0-x.npy"), np.load("x.npy"))
    np.testing.assert_allclose(
        np.load(root / "outputs" / "0-y.npy"), reference(np.load("x.npy")), atol=1e-6
    )
    assert (root / "programs" / "1-b.txt").read_text().startswith("program @b")
    assert json.loads((root / "plans.json").read_text())[0]["tasks"] == ["a", "b"]
    assert "program runs" in (root / "explain.txt").read_text()


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_trace_is_chrome_trace_json(cli: Cli, name: str) -> None:
    words = ("run", *AB_DRAM, "--input=@x.npy", "--loops=2", f"--trace={name}")
    assert cli(*words).code == 0
    data = Path(name).read_bytes()
    found = checked(json.loads(gzip.decompress(data) if name.endswith(".gz") else data))
    copies = [each for each in found.of("copy") if "input 'x' of 'b'" in each.args["reason"]]
    assert len(copies) == 2
    assert all(each.args["nbytes"] == 128 for each in copies)
    assert len(found.of("run")) == 2
    assert cli(*words).code == 0, "it is written over"


# -- the process -----------------------------------------------------------------------------------


def script(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def test_a_reader_that_goes_away_is_no_error_message(here: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [script("stitch-run"), "--module=b.ttb", "--init=ones", "--output=-"],
        stdout=writing, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == 141 and done.stderr == b""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_said(here: Path, unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [script("stitch-run"), "--module=b.ttb", "--init=ones", "--output=-"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 6 and "No space left" in done.stderr


def test_threads_are_for_executors_that_take_them(cli: Cli) -> None:
    words = ["--module=a.ttb", "--input=x=@x.npy", "--threads=2"]
    assert cli("run", *words, "--executor=onnxruntime").code == 0
    refused = cli("run", *words)
    assert refused.code == 2
    assert "'numpy' takes no number of threads" in refused.err
    assert "OMP_NUM_THREADS" in refused.err


def test_prices_are_for_executors_that_choose_and_named_in_what_explain_says(cli: Cli) -> None:
    words = ["--module=a.ttb", "--input=x=@x.npy", "--prices=x86_avx512_intel"]
    done = cli("run", *words, "--executor=auto", "--explain")
    assert done.code == 0 and "by the prices 'x86_avx512_intel'" in done.out
    refused = cli("run", *words)
    assert refused.code == 2 and "'numpy' takes no prices" in refused.err


# -- the visualizer's folder -----------------------------------------------------------------------


def test_a_folder_for_the_visualizer_counts_the_copies_of_the_run(cli: Cli) -> None:
    done = cli("run", *AB_DRAM, "--input=x=@x.npy", "--visualizer=v", "--result_file=r.json")
    assert done.code == 0
    database = sqlite3.connect("v/db.sqlite")
    query = "SELECT COUNT(*), SUM(value) FROM operation_arguments WHERE name = 'nbytes'"
    (counted,) = database.execute(query).fetchall()
    database.close()
    totals = json.loads(Path("r.json").read_text())["totals"]
    assert counted == (totals["copies"], totals["nbytes"])
    assert json.loads(Path("v/config.json").read_text())["report_name"] == "v"


def test_a_folder_for_the_visualizer_is_written_again_but_nothing_else_in_its_place(
    cli: Cli,
) -> None:
    words = ("run", "a.ttb", "--dry_run", "--visualizer=v")
    assert (cli(*words).code, cli(*words).code) == (0, 0)
    Path("v/db.sqlite").write_text("notes")
    done = cli(*words)
    assert done.code == 2
    assert "expected: an SQLite database" in done.err
    assert Path("v/db.sqlite").read_text() == "notes"


STATEFUL = """
import torch

class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("sums", torch.full((2,), 3.0))
        self.register_buffer("count", torch.tensor(4))

    def forward(self, x):
        self.sums += x
        y = torch.exp(-self.sums)
        self.count += 1
        return torch.tanh(y) * self.count

def make():
    return Counts(), (torch.zeros(2),)
"""


def test_states_begin_with_what_their_file_holds_and_are_outputs(cli: Cli, here: Path) -> None:
    Path("counts.py").write_text(STATEFUL)
    assert cli("compile", "--entry=counts.py:make", "--target=tiny", "-o", "m.ttb").code == 0
    done = cli("compile", "--entry=counts.py:make", "--target=tiny", "--split=2", "-o", "m.ttb")
    assert done.code == 0, done.err
    sums = np.array([4, 5], np.float32)
    more = [
        word.replace(".npy", "2.npy") for word in ("--output=sums=@s.npy", "--output=count=@c.npy")
    ]
    for modules in (["m.ttb"], ["m.0.ttb", "m.1.ttb"]):
        chain = [f"--module={name}" for name in modules]
        kept = ["--output=output=@y.npy", "--output=sums=@s.npy", "--output=count=@c.npy"]
        done = cli("run", *chain, "--input=x=2xf32=1 2", *kept)
        assert done.code == 0, done.err
        np.testing.assert_allclose(np.load("y.npy"), np.tanh(np.exp(-sums)) * 5, rtol=1e-5)
        np.testing.assert_array_equal(np.load("s.npy"), sums)
        assert np.load("c.npy") == 5
        again = ["--input=sums=@s.npy", "--input=count=@c.npy"]
        assert cli("run", *chain, "--input=x=2xf32=1 2", *again, *more).code == 0
        np.testing.assert_array_equal(np.load("s2.npy"), sums + np.array([1, 2], np.float32))
        assert np.load("c2.npy") == 6


def test_modules_run_on_a_device_of_pytorch(cli: Cli) -> None:
    """Those for `cuda` on the device, those for any machine with their spaces in its memory."""
    for name in ("a", "b"):
        assert cli("compile", f"{name}.yaml", "-o", f"{name}_c.ttb", "--target=cuda").code == 0
    wanted = cli("run", "a.ttb", "b.ttb", "--input=@x.npy", "--output=@wanted.npy")
    assert wanted.code == 0
    for words in (
        ("a_c.ttb", "b_c.ttb", "--device=torch:cpu"), ("a.ttb", "b.ttb", "--executor=torch:cpu"),
    ):  # fmt: skip
        done = cli("run", *words, "--input=@x.npy", "--output=@found.npy")
        assert done.code == 0, done.err
        np.testing.assert_allclose(np.load("found.npy"), np.load("wanted.npy"), rtol=1e-6)
        Path("found.npy").unlink()
    done = cli("run", "a_c.ttb", "--device=torch:cpu", "--executor=auto", "--input=@x.npy")
    assert done.code == 2
    assert "--device=torch:cpu computes by PyTorch's kernels" in done.err
