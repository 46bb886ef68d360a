"""The words of every benchmark: a wrong one is one clear error, before anything is measured."""

from __future__ import annotations

import argparse

import pytest

from tests.support.benches import BENCH_NAMES, called_bench, load_bench

#: They do without whole numbers.
WITHOUT_NUMBERS = {"fragmentation", "memory_goals", "op_times"}
#: They import torch before anything else.
OF_TORCH = {"stale_weights", "torch_fallback", "train"}


class ParserMade(Exception):
    """A benchmark is about to parse its words; the argument is its parser."""


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser that a benchmark makes, which is as far as it runs."""
    bench = load_bench(name)

    def stop(parser: argparse.ArgumentParser, words: object = None) -> None:
        raise ParserMade(parser)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ParserMade) as caught:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        bench.main([])
    parser: argparse.ArgumentParser = caught.value.args[0]
    return parser


def takes_whole_numbers(action: argparse.Action) -> bool:
    """Whether an option makes a whole number, or several, of `2`."""
    if not callable(action.type):
        return False
    try:
        value = action.type("2")
    except argparse.ArgumentTypeError:
        return False
    return all(type(each) is int for each in (value if isinstance(value, tuple) else (value,)))


@pytest.mark.parametrize("name", BENCH_NAMES)
def test_every_whole_number_refuses_what_is_too_small(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in OF_TORCH:
        pytest.importorskip("torch")
    parser = parser_of(name)
    options = [each.option_strings[0] for each in filter(takes_whole_numbers, parser._actions)]
    assert bool(options) == (name not in WITHOUT_NUMBERS)
    for option in options:
        # Where 0 is a seed, or no random chain at all, it means something.
        for word in ("-1",) if option in ("--seed", "--seeds") else ("0", "-1"):
            with pytest.raises(SystemExit) as caught:
                parser.parse_args([f"{option}={word}"])
            printed = capsys.readouterr()
            assert (caught.value.code, printed.out) == (2, "")
            (said,) = [line for line in printed.err.splitlines() if "error: " in line]
            assert option in said and word in said
            assert printed.err.endswith(f"{said}\n") and "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fragmentation", "--slack=10"), "0.1 is ten per cent"),
        (("fragmentation", "--slack=nan"), "0.1 is ten per cent"),
        (("fragmentation", "--slack=-1"), "0.1 is ten per cent"),
        (("moves", "--cases=0"), "--cases"),
        (("moves", "--machines", "nosuch"), "nosuch"),
        (("layout", "0x0"), "no shape"),
        (("layout", "64"), "no shape"),
        (("layout", "--rounds=0"), "--rounds"),
        (("residency", "--seeds=-1"), "--seeds"),
        (("overhead", "--chains=2,x"), "'x'"),
        (("load", "--large-mb=nan"), "--large-mb"),
        (("load", "--small-mb=0"), "--small-mb"),
        (("load", "--runs=0"), "--runs"),
        (("overhead", "--machine=nosuch"), "nosuch"),
        (("lanes", "--target=nosuch"), "nosuch"),
        (("lanes", "--executors", "nosuch"), "nosuch"),
        (("peers", "--width=96"), "multiples of 64"),
        (("train", "--machines=host,nosuch"), "nosuch"),
        (("train", "--executors=numpy,nosuch"), "no executor nosuch"),
        (("train", "--width=126"), "multiples of 4"),
        (("train", "--image=3"), "from 4 on"),
        (("fractal", "--suite=nosuch"), "no suite nosuch"),
        (("fractal", "--executors=nosuch"), "no executor nosuch"),
        (("stale_weights", "--machine=nosuch"), "nosuch"),
        (("stale_weights", "--models=mlp,nosuch"), "no model nosuch"),
    ],
)
def test_wrong_words_of_a_benchmark_are_one_clear_error(words: tuple[str, ...], said: str) -> None:
    if words[0] in OF_TORCH:
        pytest.importorskip("torch")
    done = called_bench(*words)
    assert done.returncode in (2, 3) and done.stdout == ""
    assert said in done.stderr and "Traceback" not in done.stderr
