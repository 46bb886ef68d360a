"""A wrong word on a command line: one line that says what is taken, and the nearest name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NEAR = [
    ("run", ("--exeutor=numpy",), "there is no option --exeutor: did you mean '--executor'?"),
    ("run", ("--artifact-dri", "x"), "--artifact_dri: did you mean '--artifact_dir'?"),
    ("run", ("--executor=nump",), "or null, not 'nump': did you mean 'numpy'?"),
    ("run", ("--init", "foo"), "--init takes randn, arange, zeros or ones, not 'foo'"),
    ("run", ("--loops=x",), "--loops takes an integer of at least 1, not 'x'"),
    ("run", ("--warmup_runs=-1",), "--warmup_runs takes an integer of at least 0, not '-1'"),
    ("run", ("--atol=-1",), "--atol takes a number of at least 0, not '-1'"),
    ("run", ("--pcc=high",), "--pcc takes a number, not 'high'"),
    ("run", ("--pcc=2",), "--pcc takes a number from -1 to 1, not '2'"),
    ("run", ("a.ttb", "--pcc=1"), "--pcc has no effect without --expected_output"),
    ("run", ("a.ttb", "--atol=0"), "--atol has no effect without --expected_output"),
    ("run", ("a.ttb", "--artifact_dir=x"), "--artifact_dir has no effect without --save_artifacts"),
    ("run", ("--module",), "--module needs a value"),
    ("run", ("a.ttb", "--visualizer="), "--visualizer needs a value"),
    ("run", ("a.ttb", "--save_artifacts", "--artifact_dir="), "--artifact_dir needs a value"),
    ("compile", ("a.yaml", "-o", "a.ttb", "--cache="), "--cache needs a value"),
    ("run", ("--ouput=x",), "there is no option --ouput: did you mean '--output'?"),
    ("compile", ("a.yaml", "--tarrget=x"), "did you mean '--target'?"),
    ("compile", ("--ouput=x",), "there is no option --ouput: did you mean '--output'?"),
    ("compile", ("a.yaml", "b.yaml", "--ouput"), "there is no option --ouput"),
    ("compile", ("a.yaml", "--split=0"), "--split takes an integer of at least 1, not '0'"),
    ("inspect", ("a.ttb", "--sectoin=all"), "did you mean '--section'?"),
    ("inspect", ("--devise", "x"), "there is no option --devise: did you mean '--device'?"),
    ("inspect", ("a.ttb", "--section=memry"), "did you mean 'memory'?"),
    ("link", ("a.ttb", "b.ttb", "-o", "c.ttb", "--wiring=x"), "there is no option --wiring"),
    ("link", ("a.ttb", "--ouput=x"), "there is no option --ouput: did you mean '--output'?"),
    ("link", ("--wier", "x", "-o", "c"), "there is no option --wier: did you mean '--wire'?"),
]


@pytest.mark.parametrize(("command", "words", "said"), NEAR)
def test_a_wrong_word_is_answered_in_one_line_and_a_command(
    cli: Callable[..., Any], command: str, words: tuple[str, ...], said: str
) -> None:
    done = cli(command, *words)
    assert done.code == 2
    assert done.out == ""
    line, remedy = done.err.splitlines()
    assert line.startswith(f"stitch-{command}: error: ")
    assert said in line
    assert remedy.startswith(f"  command: stitch-{command} ")


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (("a.ttb", "--input=x=4x8xf32=a"), 2, ("no value of float32", "--input=x=4x8xf32=a")),
        (("a.ttb", "--input=4x8xf32=1,2,3"), 2, ("got: 3 values", "--input=x=4x8xf32=1,2,3")),
        (("a.ttb", "--init=ones", "--max_memory=2GiBB"), 2, ("--max_memory takes", "'2GiBB'")),
        (("--example=digitz",), 2, ("did you mean 'digits'",)),
        (("--replay=a.ttb",), 3, ("where: a.ttb", "stitch-run --record=FILE writes")),
        (("a.tbt",), 2, ("there is no file 'a.tbt'", "did you mean 'a.ttb'?")),
        ((".",), 2, ("'.' is a folder",)),
        (("gone.yaml",), 3, ("where: gone.yaml", "try: ")),
        (("aa.ttb", "--init=ones"), 3, ("where: aa.ttb", "did you mean 'a.ttb'?")),
        (("a.ttb", "--input=@xx.npy"), 3, ("where: xx.npy", "did you mean 'x.npy'?")),
        (("own.yaml",), 2, ("describes a machine", "stitch-run a.ttb --device=own.yaml")),
        (
            ("a.ttb", "--init=ones", "--device=own"),
            2,
            ("for the file 'own.yaml' give its name with the extension",),
        ),
        (("steps.yaml",), 3, ("steps[0]: must be a mapping such as {run: encoder", "'y = a(x)'")),
        (("--replay=r.json", "a.ttb"), 2, ("a replay runs alone", "got: a.ttb")),
        (("--replay=r.json", "--init=ones"), 2, ("a replay runs alone", "got: --init")),
    ],
)
def test_a_mistake_is_said_with_its_word_and_what_is_wanted(
    cli: Callable[..., Any], here: Path, words: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    grid = "core_grid: [1, 1]\nhost: {banks: 1, bank_nbytes: 4096, alignment: 64}\n"
    (here / "own.yaml").write_text("name: own\n" + grid + "paths: []\n")
    (here / "steps.yaml").write_text("modules: {a: a.ttb}\nsteps: [y = a(x)]\noutputs: [y]\n")
    done = cli("run", *words)
    assert done.code == code and all(part in done.err for part in parts), done.err
