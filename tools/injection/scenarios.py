"""The runs that are stopped: each scenario is one function, which gives a fresh `Case`.

Those of torch are in `torch_scenarios.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

import stitch
from injection.model import Array, Case, Held
from stitch.machine import Machine, load_machine
from stitch.program import Ownership

ROWS, WIDTH = 8, 16
MACHINE, ROOMY = "tiny", "wormhole_n150"


@functools.cache
def _weights() -> tuple[Array, Array]:
    random = np.random.default_rng(1)
    return (
        random.integers(-2, 3, (WIDTH, WIDTH)).astype(np.float32),
        random.integers(-2, 3, (WIDTH,)).astype(np.float32),
    )


@functools.cache
def _cramped() -> Machine:
    """The machine with a DRAM that takes the constants of one layer."""
    machine = load_machine(MACHINE)
    dram = machine.shape.dram
    assert dram is not None
    small = replace(dram, limit=dram.base + 1024)
    return replace(machine, shape=replace(machine.shape, dram=small))


@functools.cache
def _layer(name: str, machine: str | Machine = MACHINE) -> bytes:
    """A file that holds `y = x w + b`; small whole numbers, so that every order gives one sum."""
    matrix, bias = _weights()
    builder = stitch.ComputationGraphBuilder(name)
    x = builder.input("x", (ROWS, WIDTH), stitch.DataType.FLOAT32)
    w, b = builder.parameter("w", matrix), builder.parameter("b", bias)
    builder.output("y", builder.op("Gemm", x, w, b))
    # The host has its own memory only.
    placement = () if machine == "host" else ("input.x.space=l1", "output.y.space=l1")
    return stitch.compile(builder.build(), target=machine, placement=placement).encode()


@functools.cache
def _x(seed: int) -> Array:
    return np.random.default_rng(seed).integers(-2, 3, (ROWS, WIDTH)).astype(np.float32)


def _after(layers: int, x: Array) -> Array:
    matrix, bias = _weights()
    for _ in range(layers):
        x = x @ matrix + bias
    return x


def _same(found: Array, expected: Array) -> None:
    if found.tobytes() != expected.tobytes():
        raise AssertionError("other bytes than expected")


def _ready(
    device: stitch.Device, program: stitch.LoadedProgram, *, act: Callable[[], object]
) -> Case:
    """A case of a device with a program, on which a tensor, a result and a view are held."""
    given = device.tensor(_x(11))
    result = program(_x(12))
    assert isinstance(result, stitch.Tensor)
    device.wait()
    half = given[ROWS // 2 :]
    held: Held = {
        "a tensor": (given.numpy, _x(11)),
        "a result": (result.numpy, _after(1, _x(12))),
        "a view": (half.numpy, _x(11)[ROWS // 2 :]),
    }

    def probe() -> None:
        fresh = program(_x(13))
        assert isinstance(fresh, stitch.Tensor)
        _same(fresh.numpy(), _after(1, _x(13)))

    def visits() -> tuple[Callable[[], object], ...]:
        return (*_visits(device, program, given, _x(11)), act)

    return Case((act,), probe, device.close, held, views=device.memory_views, visits=visits)


def _visits(
    device: stitch.Device, program: stitch.LoadedProgram, given: stitch.Tensor, elements: Array
) -> tuple[Callable[[], object], ...]:
    """What a signal handler might try on a device: with a program, and a tensor that is held."""
    pipeline = stitch.Pipeline([program])
    has_l1 = device.machine.name != "host"
    space = stitch.Space.L1 if has_l1 else stitch.Space.HOST
    layout = stitch.Layout(stitch.DataType.FLOAT32, space)

    def call() -> None:
        _same(_numpy(program(_x(14))), _after(1, _x(14)))

    def write() -> None:
        own = device.tensor(elements)
        device.write(own, elements + 1)
        _same(own.numpy(), elements + 1)
        own.deallocate()

    visits: tuple[Callable[[], object], ...] = (
        lambda: _same(_numpy(pipeline(_x(15))), _after(1, _x(15))), call, write,
        lambda: _same(_numpy(pipeline(given)), _after(1, elements)),
        lambda: _same(given.numpy(), elements), lambda: _same(np.from_dlpack(given), elements),
        lambda: _same(given[1:].numpy(), elements[1:]), device.memory_use,
        lambda: _same(stitch.to_layout(given, layout).numpy(), elements), device.wait,
        lambda: device.load(_layer("visitor", device.machine.name)), device.explain,
        device.memory_report,
    )  # fmt: skip
    for visit in visits * 3:
        visit()
    return visits


def first_call() -> Case:
    """The first call of a program: planned, bound, written out and run."""
    device = stitch.open_device(MACHINE)
    program, other = device.load(_layer("first")), device.load(_layer("other"))

    def act() -> None:
        _same(_numpy(program(_x(1))), _after(1, _x(1)))

    return _ready(device, other, act=act)


def steady_call() -> Case:
    """A call that has been made several times."""
    device = stitch.open_device(MACHINE)
    program = device.load(_layer("steady"))

    def act() -> None:
        _same(_numpy(program(_x(1))), _after(1, _x(1)))

    case = _ready(device, program, act=act)
    for _ in range(4):
        act()
    return case


def queued_calls() -> Case:
    """Calls that feed each other, queued, and run where the last is looked at."""
    device = stitch.open_device(MACHINE)
    first, second = device.load(_layer("one")), device.load(_layer("two"))

    def act() -> None:
        _same(_numpy(second(first(second(_x(1))))), _after(3, _x(1)))

    case = _ready(device, first, act=act)
    for _ in range(3):
        act()
    return case


@functools.cache
def _products() -> tuple[bytes, Array]:
    """A file that holds `y = x w` on a machine with room, and an operand: whole numbers, so many
    that each is worth a lane."""
    builder = stitch.ComputationGraphBuilder("product")
    x, w = (builder.input(name, (224, 224), stitch.DataType.FLOAT32) for name in "xw")
    builder.output("y", builder.op("MatMul", x, w))
    random = np.random.default_rng(5)
    compiled = stitch.compile(builder.build(), target=ROOMY)
    return compiled.encode(), random.integers(-2, 3, (224, 224)).astype(np.float32)


def forked_calls() -> Case:
    """Calls that run beside each other on two lanes, and one that waits for both."""
    device = stitch.open_device(ROOMY, inter_op_threads=2)
    other, product = device.load(_layer("one", ROOMY)), device.load(_products()[0])
    x = _products()[1]
    right = (x @ x) @ (x @ (x + 1))

    def act() -> None:
        _same(_numpy(product(product(x, x), product(x, x + 1))), right)

    case = _ready(device, other, act=act)
    for _ in range(3):
        act()
    if "sections ran concurrently" not in device.explain():
        raise AssertionError("nothing ran on lanes")
    return case


def pipeline_call() -> Case:
    """A call of a settled pipeline of two programs."""
    device = stitch.open_device(MACHINE)
    first, second = device.load(_layer("one")), device.load(_layer("two"))
    pipeline = stitch.Pipeline([first, second])

    def act() -> None:
        _same(_numpy(pipeline(_x(1))), _after(2, _x(1)))

    case = _ready(device, first, act=act)
    for _ in range(4):
        act()
    return case


@functools.cache
def _taking() -> bytes:
    """A file that holds `y = 2 x` over the bytes of x, which is donated."""
    builder = stitch.ComputationGraphBuilder("taking")
    x = builder.input("x", (ROWS, WIDTH), stitch.DataType.FLOAT32, ownership=Ownership.DONATE)
    builder.output("y", x * 2)
    placement = ("input.x.space=l1", "output.y.space=l1")
    return stitch.compile(builder.build(), target=MACHINE, placement=placement).encode()


def donating_call() -> Case:
    """Calls of a settled pipeline that takes over what it is given, and gives it back."""
    device = stitch.open_device(MACHINE)
    program = device.load(_layer("one"))
    pipeline = stitch.Pipeline([device.load(_taking())])

    def act() -> None:
        state = pipeline(pipeline(_x(1)))
        _same(_numpy(pipeline(state)), 8 * _x(1))

    case = _ready(device, program, act=act)
    for _ in range(4):
        act()
    return case


def observed_call() -> Case:
    """A settled pipeline while a listener, and hooks that come and go, look on."""
    device = stitch.open_device(MACHINE)
    first, second = device.load(_layer("one")), device.load(_layer("two"))
    pipeline = stitch.Pipeline([first, second])
    seen: list[object] = []
    device.events.subscribe(seen.append)

    def act() -> None:
        undo = device.hooks.register(before_program=seen.append, after_operation=seen.append)
        try:
            _same(_numpy(pipeline(_x(1))), _after(2, _x(1)))
        finally:
            undo()

    case = _ready(device, first, act=act)
    for _ in range(4):
        act()
    seen.clear()
    return case


@functools.cache
def _large() -> bytes:
    """A file that holds `y = 2 x`, too large for the holes that `moving_call` leaves."""
    builder = stitch.ComputationGraphBuilder("large")
    builder.output("y", builder.input("x", (192, WIDTH), stitch.DataType.FLOAT32) * 2)
    placement = ("input.x.space=l1", "output.y.space=l1")
    return stitch.compile(builder.build(), target=MACHINE, placement=placement).encode()


def moving_call() -> Case:
    """A call whose plan moves what lies between holes, each time that there are some."""
    device = stitch.open_device(MACHINE)
    small, large = device.load(_layer("small")), device.load(_large())
    layout = stitch.Layout(stitch.DataType.FLOAT32, stitch.Space.L1)
    given = np.arange(192 * WIDTH, dtype=np.float32).reshape(192, WIDTH)
    kept: list[tuple[stitch.Tensor, Array]] = []
    for number in range(6):
        tensor = device.empty(stitch.TensorDesc((160, WIDTH), layout))
        kept.append((tensor, given[:160] + number))
        device.write(*kept[-1])
    del tensor, kept[::2]

    def act() -> None:
        _same(_numpy(large(given)), given * 2)

    case = _ready(device, small, act=act)
    held = {f"a tensor that moves, {n}": (t.numpy, a) for n, (t, a) in enumerate(kept)}
    # There is no room for what visitors make.
    return replace(case, held={**case.held, **held}, visits=tuple)


def fetching_call() -> Case:
    """A call whose constants come from the file, where those of another program give way."""
    device = stitch.open_device(_cramped())
    there, more = [device.load(_layer(name, _cramped())) for name in ("there", "more")]

    def act() -> None:
        _same(_numpy(more(_x(1))), _after(1, _x(1)))

    # What visitors load is for a machine of that name.
    return replace(_ready(device, there, act=act), visits=tuple)


def load() -> Case:
    """Loading a program, whose constants have places from then on."""
    device = stitch.open_device(MACHINE)
    there = device.load(_layer("there"))
    return _ready(device, there, act=lambda: device.load(_layer("more")))


@functools.cache
def _trainable(target: str) -> stitch.CompiledModel:
    random = np.random.default_rng(7)
    builder = stitch.ComputationGraphBuilder("net")
    x = builder.input("x", (ROWS, WIDTH), stitch.DataType.FLOAT32)
    for layer, (rows, columns) in enumerate(((WIDTH, 12), (12, 1))):
        weight = (random.standard_normal((rows, columns)) * 0.3).astype(np.float32)
        w = builder.parameter(f"w{layer}", weight)
        b = builder.parameter(f"b{layer}", np.zeros(columns, np.float32))
        x = builder.op("Gemm", x, w, b)
        x = builder.op("Relu", x) if layer == 0 else x
    builder.output("y", x)
    return stitch.compile(
        builder.build(), target=target, optimizer=stitch.Adam(lr=0.01), loss="mse"
    )


def training_step(target: str = ROOMY, steps_before: int = 6) -> Case:
    """One step of a settled training: forward, loss, backward, update."""
    model = _trainable(target)
    training = model.start()
    device = training.device
    assert isinstance(device, stitch.Device) and model.training is not None
    loss_of, optimizer = model.training.loss, model.training.optimizer
    x, y = _x(1), _x(2)[:, :1].copy()
    losses: list[stitch.LossTensor] = []

    def forward() -> None:
        losses[:] = [loss_of(model(x), y)]

    def backward() -> None:
        losses[0].backward()

    calls = (forward, backward, optimizer.step, optimizer.zero_grad, lambda: losses[0].item())

    def probe() -> None:
        _same(device.tensor(_x(13)).numpy(), _x(13))

    def state() -> tuple[Array, ...]:
        return tuple(training.state_dict().values())

    given = device.tensor(_x(11))
    held: Held = {"a tensor": (given.numpy, _x(11))}

    def visits() -> tuple[Callable[[], object], ...]:
        program = device.load(_layer("other", device.machine.name))
        return _visits(device, program, given, _x(11))

    case = Case(calls, probe, training.close, held, state, device.memory_views, visits=visits)
    for _ in range(steps_before):
        case.act()
    return case


def training_step_on_host() -> Case:
    """The same in the host's own memory."""
    return training_step("host")


def second_training_step() -> Case:
    """A step before its programs run past the queue."""
    return training_step(steps_before=1)


def _numpy(result: object) -> Array:
    assert isinstance(result, stitch.Tensor)
    return result.numpy()


#: Every scenario that does without extras.
SCENARIOS: dict[str, Callable[[], Case]] = {
    scenario.__name__: scenario
    for scenario in (first_call, steady_call, queued_calls, forked_calls, pipeline_call,
                     donating_call, observed_call, moving_call, fetching_call, load, training_step,
                     training_step_on_host, second_training_step)
}  # fmt: skip
