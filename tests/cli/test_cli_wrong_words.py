"""Wrong command lines: one message, a command that works when it is pasted, no file changed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from stitch.cli.stitch_command import NAMES, main

Captured = pytest.CaptureFixture[str]

#: The words after `stitch`, the exit code, and a part of the message.
CASES = [
    # The first word.
    ("rnu a.ttb --init=ones", 2, "there is no subcommand 'rnu'"),
    ("a.ttb --init=ones", 2, "there is no subcommand 'a.ttb'"),
    ("--explain run a.ttb --init=ones", 2, "options follow the subcommand"),
    ("xyzzy", 2, "there is no subcommand 'xyzzy'"),
    ("'in spect' a.ttb", 2, "there is no subcommand 'in spect'"),
    ("''", 2, "there is no subcommand ''"),
    ("--quick doctor", 2, "options follow the subcommand"),
    ("-o", 2, "options follow the subcommand"),
    ("machines tiny", 2, "there is no subcommand 'machines'"),
    ("example", 2, "there is no subcommand 'example'"),
    # compile
    ("compile", 2, "there is no module to compile"),
    ("compile a.yaml", 2, "there is nothing to do"),
    ("compile a.yaml -o c.ttb --tarrget=tiny", 2, "did you mean '--target'?"),
    ("compile a.yaml -o c.ttb --target=tinny", 2, "did you mean 'tiny'?"),
    ("compile a.yaml -o c.ttb --target=gone.yaml", 2, "cannot read the machine description"),
    ("compile --ouput=x a.yaml", 2, "there is no option --ouput: did you mean '--output'?"),
    ("compile a.yaml b.yaml -o c.ttb", 2, "unexpected arguments 'b.yaml'"),
    ("compile a.yaml --split=0", 2, "--split takes an integer of at least 1, not '0'"),
    ("compile a.yaml --split=two -o c.ttb", 2, "not 'two'"),
    ("compile a.yaml -o c.ttb --split=2 --split_at=h", 2, "exclude each other"),
    ("compile a.yaml -o - --split=2", 2, "a split writes several files"),
    ("compile a.yaml -o c.ttb --split_at=,", 2, "--split_at names no node"),
    ("compile a.yaml -o c.ttb --cache=", 2, "--cache needs a value"),
    ("compile a.yaml -o c.ttb --cache_size=2GiB", 2, "no effect without --cache"),
    ("compile a.yaml -o c.ttb --cache=k --cache_size=2GiBB", 2, "--cache_size takes"),
    ("compile a.yaml -o c.ttb --role=forwrad", 2, "did you mean 'forward'?"),
    ("compile a.yaml -o c.ttb --executor=trch", 2, "did you mean 'torch'?"),
    ("compile a.yaml -o c.ttb --schedule=x", 2, "--schedule takes"),
    ("compile a.yaml -o c.ttb --math_fidelity=hifi5", 2, "--math_fidelity takes"),
    ("compile a.yaml -o c.ttb --unroll=-1", 2, "--unroll takes"),
    ("compile a.yaml -o c.ttb --input=x=1xf32=1", 2, "only for ONNX models"),
    ("compile a.yaml -o c.ttb --set=input.x.spce=l1", 2, "spce"),
    ("compile a.yaml -o c.ttb --set=input.z.space=l1", 2, "'z'"),
    ("compile a.yaml -o c.ttb --set=nonsense", 2, "nonsense"),
    ("compile a.yaml -o - --text", 2, "both use standard output"),
    ("compile a.yaml -o a.yaml", 2, "does not overwrite it"),
    ("compile a.yaml -o x.npy", 2, "of another kind"),
    ("compile a.yaml -o gone/c.ttb", 6, "there is no folder"),
    ("compile a.yml -o c.ttb", 3, "a.yml"),
    ("compile a.ttb -o c.ttb", 3, "no front end reads 'a.ttb'"),
    ("compile own.yaml -o c.ttb", 2, "is a machine"),
    ("compile notes.txt -o c.ttb", 3, "no front end reads 'notes.txt'"),
    ("compile model.py -o c.ttb", 2, "needs the name of its factory"),
    ("compile --entry=make -o c.ttb", 2, "names no factory"),
    ("compile --entry=model.py:mkae -o c.ttb", 2, "did you mean 'make'?"),
    ("compile model.py --entry=model.py:make -o c.ttb", 2, "both name the module"),
    ("compile --entry=no_such_module:make -o c.ttb", 3, "no_such_module"),
    # link
    ("link", 2, "at least two modules"),
    ("link a.ttb -o c.ttb", 2, "at least two modules"),
    ("link a.ttb b.ttb", 2, "there is no file to write"),
    ("link a.ttb b.ttb -o c.ttb --wiring=a.y=b.x", 2, "there is no option --wiring"),
    ("link a.ttb b.ttb -o c.ttb --wire=a.y", 2, "a.y"),
    ("link a.ttb b.ttb -o c.ttb --wire=a.z=b.x", 2, "z"),
    ("link a.ttb b.ttb -o c.ttb --keep=a.z", 2, "z"),
    ("link a.ttb b.ttb -o a.ttb", 2, "does not overwrite it"),
    ("link a.ttb gone.ttb -o c.ttb", 3, "gone.ttb"),
    ("link a.ttb notes.txt -o c.ttb", 3, "notes.txt"),
    # inspect
    ("inspect", 2, "there is nothing to inspect"),
    ("inspect a.ttb --sectoin=all", 2, "did you mean '--section'?"),
    ("inspect a.ttb --section=memry", 2, "did you mean 'memory'?"),
    ("inspect a.ttb b.ttb --devise wormhole_n150", 2, "did you mean '--device'?"),
    ("inspect a.ttb --verify=ful", 2, "did you mean 'full'?"),
    ("inspect a.ttb --wire=a.y=b.x", 2, "are for several modules"),
    ("inspect a.ttb --max_added_bytes=0", 2, "--max_added_bytes is for --diff"),
    ("inspect --diff run.json", 2, "--diff"),
    ("inspect a.ttb --diff run.json run.json", 2, "--diff compares two files"),
    ("inspect --check_plan=a.ttb", 2, "--check_plan takes a record"),
    ("inspect a.ttb --check_plan=run.json", 2, "takes a record or modules"),
    ("inspect aa.ttb", 3, "did you mean 'a.ttb'?"),
    ("inspect a.yaml", 3, "a.yaml"),
    ("inspect a.ttb b.ttb --device=wormhole_n15", 2, "did you mean 'wormhole_n150'?"),
    ("inspect a.ttb b.ttb --function=nope", 2, "nope"),
    # schema
    ("schema", 2, "there is no schema to print"),
    ("schema modul", 2, "did you mean 'module'?"),
    ("schema module mesh", 2, "unexpected arguments 'mesh'"),
    ("schema module -o a.ttb", 2, "of another kind"),
    ("schema module --output", 2, "needs a value"),
    # export
    ("export", 2, "a file and a format are needed"),
    ("export a.ttb", 2, "a file and a format are needed"),
    ("export a.ttb --format=dto", 2, "did you mean 'dot'?"),
    ("export a.ttb --fromat=dot", 2, "did you mean '--format'?"),
    ("export a.ttb --format=dot -o a.ttb", 2, "does not overwrite it"),
    ("export gone.ttb --format=dot", 3, "gone.ttb"),
    # run
    ("run", 2, "there is nothing to run"),
    ("run a.ttb --init=ones --exeutor=numpy", 2, "did you mean '--executor'?"),
    ("run a.ttb --init=ones --save_artifacts --artifact_dri=z", 2, "did you mean '--artifact_dir'"),
    ("run a.ttb --init=ones --executor=nump", 2, "did you mean 'numpy'?"),
    ("run a.ttb --init foo", 2, "--init takes randn, arange, zeros or ones, not 'foo'"),
    ("run a.ttb --init=oens", 2, "did you mean 'ones'?"),
    ("run --loops=x", 2, "--loops takes an integer of at least 1, not 'x'"),
    ("run --warmup_runs=-1", 2, "--warmup_runs takes an integer of at least 0, not '-1'"),
    ("run --atol=-1", 2, "--atol takes a number of at least 0, not '-1'"),
    ("run --pcc=high", 2, "--pcc takes a number, not 'high'"),
    ("run --pcc=2", 2, "--pcc takes a number from -1 to 1, not '2'"),
    ("run a.ttb --pcc=1", 2, "--pcc has no effect without --expected_output"),
    ("run a.ttb --atol=0", 2, "--atol has no effect without --expected_output"),
    ("run a.ttb --artifact_dir=x", 2, "--artifact_dir has no effect without --save_artifacts"),
    ("run --module", 2, "--module needs a value"),
    ("run a.ttb --visualizer=", 2, "--visualizer needs a value"),
    ("run a.ttb --save_artifacts --artifact_dir=", 2, "--artifact_dir needs a value"),
    ("run a.ttb --init=ones --ouput=y=@y.npy", 2, "did you mean '--output'?"),
    ("run a.ttb --input=x=4x8xf32=a", 2, "no value of float32"),
    ("run a.ttb --input=4x8xf32=1,2,3", 2, "got: 3 values"),
    ("run a.ttb --init=ones --max_memory=2GiBB", 2, "--max_memory takes"),
    ("run --example=recurent", 2, "did you mean 'recurrent'"),
    ("run --replay=a.ttb", 3, "where: a.ttb"),
    ("run a.tbt --dry_run", 2, "did you mean 'a.ttb'?"),
    ("run .", 2, "'.' is a folder"),
    ("run gone.yaml", 3, "where: gone.yaml"),
    ("run aa.ttb --init=ones", 3, "did you mean 'a.ttb'?"),
    ("run a.ttb --input=@xx.npy", 3, "did you mean 'x.npy'?"),
    ("run own.yaml", 2, "describes a machine"),
    ("run a.yaml --init=ones", 2, "is a module that is not compiled"),
    ("run a.ttb --init=ones --device=own", 2, "for the file 'own.yaml'"),
    ("run steps.yaml", 3, "steps[0]: must be a mapping such as {run: encoder"),
    ("run --replay=run.json a.ttb", 2, "a replay runs alone"),
    ("run --replay=run.json --init=ones", 2, "a replay runs alone"),
    ("run 'a pipeline.yaml' a.ttb", 2, "a pipeline runs alone"),
    ("run a.ttb --module=b.ttb --init=ones", 2, "the order of modules is ambiguous"),
    ("run notes.txt", 2, "has an unknown suffix"),
    ("run a.ttb", 2, "x"),
    ("run a.ttb --input=z=@x.npy", 2, "'z'"),
    ("run a.ttb --init=ones --output=z=@z.npy", 2, "'z'"),
    ("run a.ttb --init=ones --output=y=@y.txt", 2, "unknown type of a result file"),
    ("run a.ttb --init=ones --output=y=@x.npy --input=x=@x.npy", 2, "does not overwrite it"),
    ("run a.ttb --init=ones --dry_run --executor=numpy", 2, "--dry_run executes nothing"),
    ("run a.ttb --init=ones --dry_run --output=y=@y.npy", 2, "needs a result"),
    ("run a.ttb --init=ones --in_flight=2", 2, "--in_flight has no effect without --devices"),
    ("run a.ttb --init=ones --devices=2 --record=r.json", 2, "for a run on one device"),
    ("run a.ttb --init=ones --devices=gone.yaml", 3, "gone.yaml"),
    ("run a.ttb --init=ones --trace=t.json --record=t.json", 2, "two outputs have the same file"),
    ("run a.ttb --init=ones --record=- --output=-", 2, "two outputs use standard output"),
    ("run a.ttb --init=ones --threads=2", 2, "takes no number of threads"),
    ("run a.ttb --init=ones --plugin=gone.py", 2, "gone.py"),
    ("run a.ttb --init=ones --allocator=gone", 2, "gone"),
    # report and diff
    ("report", 2, "a page is of one record, or of two"),
    ("report run.json run.json run.json -o r.html", 2, "a page is of one record, or of two"),
    ("report run.json", 2, "there is no file to write"),
    ("report run.json -o run.json", 2, "does not overwrite it"),
    ("report run.json -o gone/r.html", 6, "there is no folder"),
    ("report a.ttb -o r.html", 3, "a.ttb"),
    ("report rum.json -o r.html", 3, "rum.json"),
    ("report run.json --ouptut=r.html", 2, "did you mean '--output'?"),
    ("diff run.json", 2, "a comparison takes two files"),
    ("diff run.json run.json --fail_on=copis", 2, "did you mean 'copies'?"),
    ("diff run.json run.json --fail_on=copies:x", 2, "is malformed"),
    ("diff run.json run.json --fail_on=,", 2, "a budget has no key"),
    ("diff run.json run.json --format=markdwon", 2, "did you mean 'markdown'?"),
    ("diff run.json run.json --failon=copies", 2, "did you mean '--fail_on'?"),
    ("diff run.json a.ttb", 3, "a.ttb"),
    ("diff run.json gone.json", 3, "gone.json"),
    # simulate and pack
    ("simulate", 2, "there is nothing to simulate"),
    ("simulate a.ttb 'a pipeline.yaml'", 2, "a pipeline is simulated alone"),
    ("simulate a.ttb --sweep l1.bank_nbytes=x", 2, "'x' is no number"),
    ("simulate a.ttb --sweep l1.bank_nbytes", 2, "names no values"),
    ("simulate a.ttb --sweep l1.bank_nbytes=1:2", 2, "is no range"),
    ("simulate a.ttb --sweep l1.bank_nbytes=2MiB:1MiB:1KiB", 2, "has no values"),
    ("simulate a.ttb --sweep l1.bank_nbytes=1:2000:1", 2, "2,000 machines"),
    ("simulate a.ttb --sweep l1.bank_nbyts=1MiB", 2, "did you mean 'bank_nbytes'?"),
    ("simulate a.ttb --sweep l1.bank_nbytes=nan", 2, "'nan' is no number"),
    ("simulate a.ttb --sweep name=1", 2, "must be a name"),
    ("simulate a.ttb --device=wormhole", 2, "did you mean 'wormhole_n150'?"),
    ("simulate a.ttb --swep l1.bank_nbytes=1MiB", 2, "did you mean '--sweep'?"),
    ("simulate a.ttb -o x.npy", 2, "of another kind"),
    ("pack", 2, "there is no file of buffers"),
    ("pack gone.csv", 3, "gone.csv"),
    ("pack notes.txt", 3, "the header does not name these columns"),
    ("pack buffers.csv --capacity=1x", 2, "--capacity takes"),
    ("pack buffers.csv --capacity=1", 5, "the buffers do not fit"),
    ("pack buffers.csv --placements=-1", 2, "--placements takes"),
    ("pack buffers.csv -o buffers.csv", 2, "does not overwrite it"),
    ("pack buffers.csv --capcity=1MiB", 2, "did you mean '--capacity'?"),
    # machine, examples, doctor, completion
    ("machine tinny", 2, "did you mean 'tiny'?"),
    ("machine tiny host", 2, "unexpected arguments 'host'"),
    ("machine tiny --source", 2, "did you mean '--sources'?"),
    ("machine notes.txt", 2, "notes.txt"),
    ("examples digitz", 2, "did you mean 'digits'?"),
    ("examples digits --into=gone", 2, "there is no folder 'gone'"),
    ("examples full_l1 --inot=into", 2, "did you mean '--into'?"),
    ("doctor --quik", 2, "did you mean '--quick'?"),
    ("doctor now --quick", 2, "unexpected arguments 'now'"),
    ("completion", 2, "the script of which shell?"),
    ("completion fish", 2, "there is no script for the shell 'fish'"),
    ("completion bsh", 2, "there is no script for the shell 'bsh'"),
    ("completion bash zsh", 2, "unexpected arguments 'zsh'"),
]
FILES = {
    "notes.txt": "some notes\n",
    "buffers.csv": "id,lower,upper,size\na,0,2,8\nb,1,3,8\n",
    "own.yaml": "base: wormhole_n150\nname: own\n",
    "module.yaml": "name: m\ninputs: {x: {shape: [2], type: float32}}\n"
    "operations: [y = Relu(x)]\noutputs: [y]\n",
    "a pipeline.yaml": "modules: {a: a.ttb}\ninputs: {x: {shape: [4, 8], type: float32}}\n"
    "steps: [{run: a, inputs: {x: x}, outputs: {y: y}}]\n"
    "outputs: [y]\n",
    "steps.yaml": "modules: {a: a.ttb}\nsteps: [y = a(x)]\noutputs: [y]\n",
    "model.py": "import numpy as np\ndef make():\n    return (lambda x: x + 1), np.ones((2, 2))\n",
}
#: What a message about a file says of what is wanted.
WANTED = re.compile(r"  try: |  expected: |which stitch run --record=FILE writes|must be a mapping")
#: What pasted commands receive instead of `stitch`.
PROGRAMS = ("stitch", "stitch-run", "stitch-compile", "stitch-link", "stitch-inspect")


class Answer(NamedTuple):
    """What one case did."""

    code: int
    out: str
    err: str
    is_unchanged: bool


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*") if "__pycache__" not in path.parts
    }  # fmt: skip


def remedy(message: str) -> str | None:
    """The command that a message says to type, or None."""
    for label in ("command", "try"):
        for line in message.splitlines():
            if line.startswith(f"  {label}: stitch"):
                return line.removeprefix(f"  {label}: ")
    return None


def test_there_are_150_cases_and_each_subcommand_has_some() -> None:
    assert len(CASES) >= 150
    assert {line.split()[0] for line, _, _ in CASES} >= set(NAMES)


@pytest.fixture(scope="module")
def answers(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Answer]]:
    """What each case prints, in a folder with modules and one file of each kind."""
    folder = tmp_path_factory.mktemp("wrong")
    for file in built.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "into").mkdir()
    with contextlib.chdir(folder):
        np.save("x.npy", np.ones((4, 8), np.float32))
        assert main(["run", "a.ttb", "b.ttb", "--init=ones", "--record=run.json"]) == 0
        before = files(folder)
        answers = []
        for line, _, _ in CASES:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(shlex.split(line))
            after = files(folder)
            answers.append(Answer(code, out.getvalue(), err.getvalue(), after == before))
            before = after
        yield answers


def test_a_wrong_command_line_is_one_message_and_changes_no_file(answers: list[Answer]) -> None:
    wrong = []
    for (line, code, said), done in zip(CASES, answers, strict=True):
        first, *others = done.err.splitlines() or [""]
        sound = (
            done.code == code and done.out == "" and said in done.err and done.is_unchanged
            and first.startswith("stitch") and ": error: " in first
            and all(other.startswith("  ") for other in others)
            and (remedy(done.err) is not None or (code != 2 and WANTED.search(done.err)))
        )  # fmt: skip
        if not sound:
            wrong.append(f"stitch {line}: {done}\n{done.err}")
    assert not wrong, "\n".join(wrong)


def test_every_remedy_is_a_command_that_both_shells_read_and_that_works(
    answers: list[Answer], capsys: Captured
) -> None:
    pasted = sorted(filter(None, {remedy(answer.err) for answer in answers}))
    assert len(pasted) > 60
    expected = [shlex.split(part) for command in pasted for part in command.split(" && ")]
    for shell in ("bash", "zsh"):
        assert words_read_by(shell, pasted) == expected, shell
    wrong = []
    for name, *words in expected:
        if name != "stitch":
            words.insert(0, name.removeprefix("stitch-"))
        capsys.readouterr()
        if (code := main(words)) != 0:
            wrong.append(f"{shlex.join(words)}: exit code {code}\n{capsys.readouterr().err}")
    assert not wrong, "\n".join(wrong)


def words_read_by(shell: str, commands: list[str]) -> list[list[str]]:
    """The words of these commands, when they are pasted into a shell."""
    assert shutil.which(shell), f"install {shell}: apt-get install {shell}"
    functions = "".join(
        f"{name}() {{ printf '%s\\0' {name} \"$@\"; printf '\\1'; }}\n" for name in PROGRAMS
    )
    done = subprocess.run(
        [shell], input="\n".join([functions, *commands, ""]).encode(), capture_output=True,
        check=True,
    )  # fmt: skip
    return [part.decode().split("\0")[:-1] for part in done.stdout.split(b"\1")[:-1]]


def pasted_into(shell: str, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell that finds the programs of this installation."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [shell, "-c", command], capture_output=True, text=True, check=False,
        env=os.environ | {"PATH": path},
    )  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_printed_command_runs_in_a_real_shell(here: Path, shell: str) -> None:
    (here / "a folder").mkdir()
    wrong = pasted_into(shell, "stitch exampels full_l1 --into='a folder'")
    command = remedy(wrong.stderr)
    assert wrong.returncode == 2 and command == "stitch examples full_l1 '--into=a folder'"
    assert pasted_into(shell, command).returncode == 0
    assert (here / "a folder/full_l1.py").exists()


@pytest.mark.campaign("pasted_commands")
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_all_printed_commands_run_in_a_real_shell(answers: list[Answer], shell: str) -> None:
    for name in ("into/full_l1.py", "digits", "recurrent"):  # What the other shell has written.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()
    failed = {
        command: done.stderr
        for command in filter(None, {remedy(answer.err) for answer in answers})
        if (done := pasted_into(shell, command)).returncode != 0
    }
    assert not failed, "\n".join(f"{command}: {said}" for command, said in failed.items())
