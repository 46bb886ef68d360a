"""What runs inside `libstitch.so`: converts arguments of C, calls the functions of the table, and
turns exceptions into errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np

from stitch.c_interface.header import DATA_TYPES, ERROR_CODES, FUNCTIONS
from stitch.c_interface.program_functions import check_count
from stitch.c_interface.table import HANDLE_TYPES, CFunction, Parameter
from stitch.errors import StitchError, UsageError
from stitch.ops import onnx_code
from stitch.program import Array, DataType, ValueType

_SLOT_BITS = 32
_MAX_GENERATION = 2**32 - 1


class InvalidHandleError(StitchError):
    """A handle of a C program is zero, destroyed, or of another kind: code 7."""

    exit_code = 7


class HandleTable:
    """Objects by handle and kind.

    >>> table = HandleTable()
    >>> handle = table.add("device", "an object")
    >>> table.get("device", handle), table.remove("device", handle)
    ('an object', 'an object')
    >>> table.get("device", handle)
    Traceback (most recent call last):
    stitch.c_interface.embedded.InvalidHandleError: this device was destroyed before
    """

    def __init__(self) -> None:
        #: By slot: the current or the next handle, its kind (None: free), and the object.
        self._entries: list[tuple[int, str | None, Any]] = []
        self._free: list[int] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries) - len(self._free)

    def add(self, kind: str, value: Any) -> int:
        """Store an object; return its handle."""
        with self._lock:
            if self._free:
                slot = self._free.pop()
                handle = self._entries[slot][0]
                self._entries[slot] = handle, kind, value
            else:
                handle = 1 << _SLOT_BITS | len(self._entries)
                self._entries.append((handle, kind, value))
        return handle

    def get(self, kind: str, handle: int) -> Any:
        """Return the object of a handle; raise `InvalidHandleError`."""
        slot = handle & 0xFFFFFFFF
        # Reading one element is atomic: no lock.
        if slot < len(self._entries):
            entry = self._entries[slot]
            if entry[0] == handle and entry[1] == kind:
                return entry[2]
        raise self._error(kind, handle)

    def remove(self, kind: str, handle: int) -> Any:
        """Invalidate a handle and return its object; raise `InvalidHandleError`."""
        with self._lock:
            value, slot = self.get(kind, handle), handle & 0xFFFFFFFF
            generation = (handle >> _SLOT_BITS) + 1
            # A slot whose generations are used up stays empty, so that no handle comes again.
            self._entries[slot] = generation << _SLOT_BITS | slot, None, None
            if generation < _MAX_GENERATION:
                self._free.append(slot)
        return value

    def _error(self, kind: str, handle: int) -> InvalidHandleError:
        slot = handle & 0xFFFFFFFF
        if not handle:
            return InvalidHandleError(
                f"this {kind} is zero",
                remedy="check the error of the call that should have created it",
            )
        if slot < len(self._entries) and handle >> _SLOT_BITS:
            current, other, _ = self._entries[slot]
            if handle == current and other is not None:
                return InvalidHandleError("a handle of another kind", expected=kind, got=other)
            if handle < current:
                return InvalidHandleError(f"this {kind} was destroyed before")
        return InvalidHandleError(f"this is no {kind} of Stitch", got=hex(handle))


#: Arrays over the caller's memory that a program remembers, by address.
MAX_VIEWS = 64
#: The highest rank of an array, which is NumPy's.
MAX_RANK = 64
#: NumPy types of the elements that functions take without a description.
_ELEMENTS: dict[str, np.dtype[Any]] = {
    "float": np.dtype(np.float32), "double": np.dtype(np.float64),
    "int32_t": np.dtype(np.int32), "int64_t": np.dtype(np.int64),
}  # fmt: skip
_Reader = Callable[[Sequence[Any], list[Any]], Any]
#: Calls of Python in remedies, as patterns, and what C programs do instead.
_IN_C = {
    r" \(in Python: .*\)$|; in Python placement=": "",
    r"call compute_loss\(label\) first":
        "set 'label' by stitch_set_tensor_float, and call stitch_model_training_instance_forward",
    r"loss\.backward\(\)": "stitch_model_training_instance_backward",
    r"model\.instance\.close\(\)": "stitch_stop_training",
    r"leave the executor out, or take ('[^']+')": r"pass NULL, or \1, as executor",
    r"open_device\('([^']+)', executor='([^']+)'\)": r'stitch_open_device("\1", "\2", &device)',
    r"open_device\('([^']+)'\)": r'stitch_open_device("\1", NULL, &device)',
    r"compile\(\.\.\., target='([^']+)'\)": r"compile it with target '\1'",
}  # fmt: skip


class Library:
    """The handles and errors of one process, and cffi's interface to its C side."""

    def __init__(self, ffi: Any) -> None:
        self.ffi = ffi
        self.handles = HandleTable()
        #: Memory that C programs may read, by the handle that it is valid as long as.
        self._names: dict[int, dict[object, Any]] = {}

    # -- errors ------------------------------------------------------------------------------------

    def error(self, exception: BaseException) -> Any:
        """Return the error object of an exception."""
        code, remedy = ERROR_CODES["STITCH_ERROR_FAILURE"], ""
        if isinstance(exception, StitchError):
            code, remedy = exception.exit_code, exception.remedy or ""
            exception.remedy = None  # It is not repeated in the message.
            message = str(exception)
            exception.remedy = remedy or None  # A failed task raises its error again.
            for pattern, in_c in _IN_C.items():
                remedy = re.sub(pattern, in_c, remedy)
        else:
            message = f"{type(exception).__name__}: {exception}"
            if isinstance(exception, MemoryError):
                code = ERROR_CODES["STITCH_ERROR_OUT_OF_MEMORY"]
        texts = [self.ffi.new("char[]", text.encode(errors="replace").replace(b"\0", b"?"))
                 for text in (message, remedy)]  # fmt: skip
        return self.ffi.cast("stitch_error_t", self.handles.add("error", (code, *texts)))

    def error_part(self, error: Any, part: int) -> Any:
        """Return code (0), message (1) or remedy (2) of an error object."""
        try:
            return self.handles.get("error", int(self.ffi.cast("uintptr_t", error)))[part]
        except InvalidHandleError:
            return (ERROR_CODES["STITCH_ERROR_INVALID_HANDLE"], self._no_error, self._empty)[part]

    def destroy_error(self, error: Any) -> None:
        """Release an error object; one that was destroyed before stays so."""
        try:
            self.handles.remove("error", int(self.ffi.cast("uintptr_t", error)))
        except InvalidHandleError:
            return

    def define_errors(self) -> None:
        """Define the functions on errors."""
        ffi, define = self.ffi, self.ffi.def_extern
        self._empty = ffi.new("char[]", b"")
        self._no_error = ffi.new("char[]", b"this error was destroyed, or is none of Stitch")
        define(name="py_stitch_error_code")(lambda error: self.error_part(error, 0))
        define(name="py_stitch_error_message")(lambda error: self.error_part(error, 1))
        define(name="py_stitch_error_remedy")(lambda error: self.error_part(error, 2))
        define(name="py_stitch_error_destroy")(self.destroy_error)

    # -- functions ---------------------------------------------------------------------------------

    def define(self, function: CFunction) -> None:
        """Define a function of the table."""
        readers, writer, outputs = self._plan(function)
        implementation, null = function.implementation, self.ffi.NULL
        own = HANDLE_TYPES.get(function.parameters[0].type) if function.releases else None

        def call(*raw: Any) -> Any:
            try:
                for check, _ in outputs:
                    check(raw)
                values: list[Any] = []
                for read in readers:
                    values.append(read(raw, values))
                result = implementation(*values)
                if writer is not None:
                    writer(raw, result)
                if own is not None:
                    self.handles.remove(own, raw[0])
                    self._names.pop(raw[0], None)
            except BaseException as error:
                # Not before: outputs may lie where inputs do.
                for _, clear in outputs:
                    clear(raw)
                return self.error(error)
            return null

        self._define(function, call)

    def _define(self, function: CFunction, call: Callable[..., Any]) -> None:
        # The result if not even an error object could be made: an error that is none of Stitch.
        failed = self.ffi.cast("stitch_error_t", -1)
        self.ffi.def_extern(name=f"py_{function.name}", error=failed)(call)

    def _plan(self, function: CFunction) -> tuple[list[_Reader], Any, list[Any]]:
        """Return what reads arguments, what writes the result, and what clears outputs before."""
        readers: list[_Reader] = []
        writer, outputs = None, []
        parameters, at = function.parameters, 0
        while at < len(parameters):
            parameter = parameters[at]
            counted = at + 1 < len(parameters) and parameters[at + 1].type == "size_t"
            optional = parameter.name in function.nullable
            check = self._not_null(function, parameter, at, optional)
            kind = parameter.type
            if parameter.name == "text":
                writer, at = self._text_writer(at), at + 2
            elif kind == "stitch_array_t *" and parameter.name == "description":
                outputs.append((check, self._clearing(at)))
                name_at = at - 1 if parameters[at - 1].type == "const char **" else None
                writer = self._description_writer(at, name_at)
            elif kind == "const char **":
                pass  # Written with the description that follows.
            elif parameter.name == "out":
                outputs.append((check, self._clearing(at)))
                writer = self._out_writer(function, kind.removesuffix(" *"), at)
            elif kind == "stitch_tensor_t *":
                # Not set to zero on failure: their number may be what is wrong.
                outputs.append((_if_counted(check, at + 1), lambda raw: None))
                writer = self._tensors_writer(function, at)
                readers.append(_argument(at + 1))
                at += 1
            elif kind.endswith("*") and counted and kind != "const char *":
                readers.append(self._list_reader(parameter, check, at, optional))
                at += 1
            else:
                readers.append(self._value_reader(parameter, check, at, optional))
            at += 1
        return readers, writer, outputs

    def _not_null(
        self, function: CFunction, parameter: Parameter, at: int, optional: bool
    ) -> Callable[[Sequence[Any]], Any]:
        null, name = self.ffi.NULL, parameter.name

        def check(raw: Sequence[Any]) -> Any:
            if raw[at] == null and not optional:
                raise UsageError(f"{function.name}: {name} is NULL")
            return raw[at]

        return check

    # -- inputs ------------------------------------------------------------------------------------

    def _value_reader(
        self, parameter: Parameter, check: Callable[[Sequence[Any]], Any], at: int, optional: bool
    ) -> _Reader:
        ffi, get, kind = self.ffi, self.handles.get, parameter.type
        if kind in HANDLE_TYPES:
            named = HANDLE_TYPES[kind]
            return lambda raw, values: get(named, raw[at])
        if kind == "stitch_tensor_t":
            return lambda raw, values: self._tensor(raw, values, raw[at], optional)
        if kind == "const char *":

            def text(raw: Sequence[Any], values: list[Any]) -> str | None:
                pointer = check(raw)
                return None if pointer == ffi.NULL else self.text(parameter.name, pointer)

            return text
        if kind in ("const stitch_array_t *", "stitch_array_t *"):
            return lambda raw, values: self.array(parameter.name, check(raw)[0])
        if parameter.name == "type":
            return lambda raw, values: data_type(raw[at])
        if kind.endswith(("*", "callback_t")):
            return lambda raw, values: check(raw)
        return _argument(at)

    def text(self, name: str, pointer: Any) -> str:
        """Return a string of C; raise `UsageError` if it is no UTF-8."""
        try:
            return str(self.ffi.string(pointer).decode())
        except UnicodeDecodeError as error:
            raise UsageError(f"{name} is not UTF-8: {error}") from error

    def _tensor(self, raw: Sequence[Any], values: list[Any], tensor: Any, optional: bool) -> Any:
        if optional and tensor.graph == 0:
            return None
        if tensor.graph != raw[0] or tensor.index >= len(values[0].tensors):
            raise InvalidHandleError(
                "a tensor is zero, or of another graph" if tensor.graph != raw[0]
                else "this is no tensor of the graph",
                expected="a tensor that this graph returned",
            )  # fmt: skip
        return values[0].tensors[tensor.index]

    def _list_reader(
        self, parameter: Parameter, check: Callable[[Sequence[Any]], Any], at: int, optional: bool
    ) -> _Reader:
        """Return what reads a pointer and a count."""
        kind = parameter.type.removeprefix("const ").removesuffix(" *")
        name, ffi = parameter.name, self.ffi

        def checked(raw: Sequence[Any]) -> tuple[Any, int]:
            return (check(raw), raw[at + 1]) if raw[at + 1] else (raw[at], 0)

        def tensors(raw: Sequence[Any], values: list[Any]) -> list[Any]:
            first, count = checked(raw)
            return [self._tensor(raw, values, first[i], True) for i in range(count if first else 0)]

        def arrays(raw: Sequence[Any], values: list[Any]) -> list[Array]:
            first, count = checked(raw)
            return [self.array(f"{name}[{i}]", first[i]) for i in range(count)]

        def numbers(raw: Sequence[Any], values: list[Any]) -> list[int]:
            first, count = checked(raw)
            if count > MAX_RANK and name in ("shape", "axes"):
                raise UsageError(f"{name} has too many axes", expected=f"at most {MAX_RANK}",
                                 got=str(count))  # fmt: skip
            return list(ffi.unpack(first, count)) if count else []

        def elements(raw: Sequence[Any], values: list[Any]) -> Array:
            first, count = checked(raw)
            return self._over(first, count, _ELEMENTS[kind])

        if kind == "stitch_tensor_t":
            return tensors
        if kind == "stitch_array_t":
            return arrays
        return elements if name == "data" else numbers

    def _over(self, pointer: Any, count: int, kind: np.dtype[Any]) -> Array:
        """Return a vector over memory of C."""
        if not count:
            return np.empty(0, kind)
        return np.frombuffer(self.ffi.buffer(pointer, count * kind.itemsize), kind)

    def array(self, name: str, array: Any) -> Array:
        """Return an array over a `stitch_array_t`; raise `UsageError` for one that is none."""
        kind, rank = data_type(array.type).dtype, array.rank
        if not 0 <= rank <= MAX_RANK or (rank and array.shape == self.ffi.NULL):
            raise UsageError(f"{name} has no valid shape", expected=f"0 to {MAX_RANK} axes",
                             got=f"{rank} axes" if array.shape else "a NULL shape")  # fmt: skip
        shape = self.ffi.unpack(array.shape, rank) if rank else []
        if min(shape, default=0) < 0:
            raise UsageError(f"{name} has a negative length", got=str(shape))
        count = math.prod(shape)
        if count and array.data == self.ffi.NULL:
            raise UsageError(f"{name} has no data")
        return self._over(array.data, count, kind).reshape(shape)

    def define_run(self, function: CFunction) -> None:
        """Define stitch_run, whose calls take microseconds: no step of it is general."""
        ffi, get, implementation = self.ffi, self.handles.get, function.implementation
        null, buffer, width = ffi.NULL, ffi.buffer, ffi.sizeof("float *")

        def call(handle: int, inputs: Any, n_inputs: int, outputs: Any, n_outputs: int) -> Any:
            try:
                program = get("program", handle)
                views = None
                if n_inputs == program.takes and n_outputs == program.gives and inputs and outputs:
                    key = buffer(inputs, n_inputs * width)[:], buffer(outputs, n_outputs * width)[:]
                    views = program.views.get(key)
                if views is None:
                    views = self._float_views(program, inputs, n_inputs, outputs, n_outputs)
                    if inputs and outputs:
                        if len(program.views) >= MAX_VIEWS:
                            program.views.clear()
                        program.views[key] = views
                implementation(program, *views)
            except BaseException as error:
                return self.error(error)
            return null

        self._define(function, call)

    def _float_views(
        self, program: Any, inputs: Any, n_inputs: int, outputs: Any, n_outputs: int
    ) -> tuple[list[Array], list[Array]]:
        """Return float32 arrays over the memory of inputs and outputs, in the slots' shapes."""
        found: list[list[Array]] = []
        for name, slots, pointers, count in (
            ("inputs", program.inputs, inputs, n_inputs),
            ("outputs", program.outputs, outputs, n_outputs),
        ):
            check_count(name, len(slots), count)
            if count and not pointers:
                raise UsageError(f"stitch_run: {name} is NULL")
            views = []
            for i, (_, kind) in enumerate(slots):
                if kind.nbytes and not pointers[i]:
                    raise UsageError(f"stitch_run: {name}[{i}] is NULL")
                vector = self._over(pointers[i], math.prod(kind.shape), _ELEMENTS["float"])
                views.append(vector.reshape(kind.shape))
            found.append(views)
        return found[0], found[1]

    # -- outputs -----------------------------------------------------------------------------------

    def _clearing(self, at: int) -> Any:
        """Return what sets an output to zero."""
        ffi = self.ffi

        def clear(raw: Sequence[Any]) -> None:
            if raw[at] != ffi.NULL:
                size = ffi.sizeof(raw[at][0])
                ffi.memmove(raw[at], bytes(size), size)

        return clear

    def _out_writer(self, function: CFunction, kind: str, at: int) -> Any:
        if kind == "stitch_tensor_t":
            return lambda raw, result: self._put_tensor(function, raw, raw[at], result)

        def write(raw: Sequence[Any], result: Any) -> None:
            raw[at].id = self.handles.add(HANDLE_TYPES[kind], result)

        return write

    def _put_tensor(self, function: CFunction, raw: Sequence[Any], out: Any, result: Any) -> None:
        tensors = self.handles.get("computation_graph", raw[0]).tensors
        tensors.append(result)
        out.graph, out.index = raw[0], len(tensors) - 1

    def _tensors_writer(self, function: CFunction, at: int) -> Any:
        def write(raw: Sequence[Any], result: Sequence[Any]) -> None:
            if len(result) != raw[at + 1]:
                raise UsageError(f"{function.name}: another number of outputs",
                                 expected=str(len(result)), got=str(raw[at + 1]))  # fmt: skip
            for i, one in enumerate(result):
                self._put_tensor(function, raw, raw[at] + i, one)

        return write

    def _text_writer(self, at: int) -> Any:
        ffi = self.ffi

        def write(raw: Sequence[Any], result: str) -> None:
            text, capacity, needed = raw[at : at + 3]
            content = result.encode(errors="replace") + b"\0"
            if needed != ffi.NULL:
                needed[0] = len(content)
            if not capacity and needed != ffi.NULL:
                return
            if text == ffi.NULL or capacity < len(content):
                raise UsageError(
                    "the text does not fit", expected=f"a capacity of {len(content)} bytes",
                    got="NULL" if text == ffi.NULL else str(capacity),
                    remedy="call with capacity 0 to get the bytes that are needed",
                )  # fmt: skip
            ffi.memmove(text, content, len(content))

        return write

    def _description_writer(self, at: int, name_at: int | None) -> Any:
        ffi = self.ffi

        def write(raw: Sequence[Any], result: tuple[str, ValueType]) -> None:
            name, kind = result
            kept = self._names.setdefault(raw[0], {})
            shape = kept.setdefault(kind.shape, ffi.new("int64_t[]", kind.shape or [0]))
            out = raw[at]
            out.data, out.type = ffi.NULL, onnx_code(kind.data_type)
            out.rank, out.shape = len(kind.shape), shape
            if name_at is not None and raw[name_at] != ffi.NULL:
                raw[name_at][0] = kept.setdefault(name, ffi.new("char[]", name.encode()))

        return write


def _if_counted(check: Callable[[Sequence[Any]], Any], count: int) -> Any:
    return lambda raw: check(raw) if raw[count] else None


def _argument(at: int) -> _Reader:
    return lambda raw, values: raw[at]


def data_type(code: int) -> DataType:
    """Return the data type of a stitch_data_type_t; raise `UsageError` for another number."""
    if code not in DATA_TYPES:
        raise UsageError("this is no stitch_data_type_t", got=str(code),
                         expected=", ".join(map(str, DATA_TYPES)))  # fmt: skip
    return DATA_TYPES[code]


def start(ffi: Any) -> None:
    """Define all functions of `libstitch.so`."""
    library = Library(ffi)
    library.define_errors()
    for function in FUNCTIONS:
        define = library.define_run if function.name == "stitch_run" else library.define
        define(function)
