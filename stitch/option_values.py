"""Names and defaults of options, shared by calls and commands.

It imports nothing, so that `--help` loads neither NumPy nor the runtime.
"""

#: The machine for which modules are compiled if no other is named.
DEFAULT_TARGET = "wormhole_n150"
#: The number of tasks that a device queues before they run.
DEFAULT_WINDOW = 64
#: Calls under way at once on several devices.
IN_FLIGHT = 4
#: Where the devices of a mesh are.
BACKENDS = ("local", "ray")
#: The names of executors that Stitch has.
EXECUTOR_NAMES = ("numpy", "onnxruntime", "auto", "torch", "null")
#: The names of PyTorch devices; `cuda:0` stands for all cards.
TORCH_DEVICES = ("torch:cpu", "cuda:0")
#: Behind the name of a PyTorch device: inductor compiles operations together.
INDUCTOR = "-inductor"


def is_torch_device(name: object) -> bool:
    """Whether a name is that of a PyTorch device, `torch:cpu` or `cuda:N`, also with `INDUCTOR`.

    >>> is_torch_device("cuda:0"), is_torch_device("cuda:0-inductor"), is_torch_device("cuda")
    (True, True, False)
    """
    return isinstance(name, str) and name.startswith(("torch:", "cuda:"))


#: What generates missing inputs.
INITS = ("randn", "arange", "zeros", "ones")
#: A connection in words.
WIRE_FORM = "MODULE.OUTPUT=MODULE.INPUT, such as a.y=b.x or 0.0=1.0"
