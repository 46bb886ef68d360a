"""Results of the operations of a run in a file, and out of it again.

Arrays are in the types that operations are computed in, rounded to those of their values. Memory
holds one array at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from stitch.argument_kinds import PATH, takes
from stitch.errors import FormatError, UsageError
from stitch.files import OutputFiles, write_added
from stitch.forms import NpzWriter, archived_arrays
from stitch.program import Array
from stitch.report.operations.operation_watch import OperationWatch, SeenOperation
from stitch.report.reported_device import DEVICE
from stitch.report.spool import Spool
from stitch.runtime import RuntimeDevice

#: Of a program's name in the names of arrays; its number tells it apart.
_NAME_LENGTH = 60


class _Names:
    """What arrays are called: programs are numbered by their names, in the order of first runs."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, seen: SeenOperation, output: int) -> str:
        name = seen.program.name
        number = self._numbers.setdefault(name, len(self._numbers))
        program = f"{number}-{quote(name, safe='')[:_NAME_LENGTH]}"
        return f"{program}/{seen.run}/{seen.index}/{output}.{quote(seen.operation.op, safe='')}"


class OperationStore(OperationWatch):
    """Keeps what every operation makes, for the file at `path`, until `close`, which writes it.

    `next_pass` ends what is kept: a file holds one pass. Raises `UsageError` for a path that is not
    that of a `.npz` file, `StitchError` where the file cannot be begun.
    """

    @takes(device=DEVICE, path=PATH)
    def __init__(self, device: RuntimeDevice, path: str | Path) -> None:
        if Path(path).suffix.lower() != ".npz":
            raise UsageError("results of operations are written to a .npz file", got=str(path))
        self._path, self._names, self._is_over = path, _Names(), False
        #: Whether nothing has stopped it while it kept a result.
        self._is_whole = True
        super().__init__(device)
        self._unregister = self.close
        self.close = self._close
        try:
            self._spool = Spool(path)
        except BaseException:
            self._unregister()
            raise
        self._archive = NpzWriter(self._spool.write)

    def before(self, seen: SeenOperation) -> None:
        """Nothing yet."""

    def after(self, seen: SeenOperation) -> None:
        """Keep what it made."""
        if self._is_over:
            return
        self._is_whole = False
        references = self.references(seen.program)
        for output, (value, array) in enumerate(zip(seen.made, seen.outputs, strict=True)):
            self._archive.add(self._names.of(seen, output), references.kept(value, array))
        self._is_whole = True

    def next_pass(self) -> None:
        """What comes now is not kept."""
        self._is_over = True

    def add_to(self, batch: OutputFiles) -> None:
        """Watch no more, and add the file to those that a batch is going to write; `forget` it when
        that has happened. Nothing is added where an interrupt or a full disk, which was raised, has
        left half of a result."""
        self._unregister()
        if not self._is_whole:
            return
        self._archive.close()
        batch.add(self._path, self._spool.pour)

    def forget(self) -> None:
        """Watch no more, and write nothing; twice does no harm."""
        self._unregister()
        self._spool.close()

    def _close(self) -> None:
        write_added(self.add_to, self.forget)


class SavedOperations:
    """A file of `OperationStore`; raises `FormatError` for any other."""

    def __init__(self, path: str | Path) -> None:
        self.path, self._names = str(path), _Names()
        arrays = archived_arrays(Path(path))
        self._arrays: Mapping[str | None, Array] = arrays
        self._met: set[str] = set()
        self._all = tuple(map(str, arrays))
        strange = [name for name in self._all if name.count("/") != 3 or "." not in name]
        if strange or not self._all:
            raise FormatError(
                "the file holds no results of operations", where=self.path,
                expected="what --save_operations or OperationStore wrote",
                got=repr(strange[0]) if strange else "no array",
            )  # fmt: skip

    def results(self, seen: SeenOperation) -> tuple[Array, ...]:
        """What the operation made in the run that was saved; raises `UsageError` if it did not
        run there."""
        names = [self._names.of(seen, output) for output in range(len(seen.outputs))]
        for name in names:
            if name not in self._arrays:
                raise UsageError(
                    "the saved run has no result of an operation that runs now",
                    where=f"{self.path}: {name!r}", got=seen.name,
                    remedy="save a run of the same programs, called as often",
                )  # fmt: skip
        self._met.update(names)
        return tuple(self._arrays[name] for name in names)

    def check_all_met(self) -> None:
        """Raise `UsageError` for an operation of the saved run that has not run since."""
        left = [name for name in self._all if name not in self._met]
        if left:
            raise UsageError(
                "the saved run has operations that did not run now",
                where=self.path, got=f"{len(left)}, the first of them {left[0]!r}",
                remedy="save a run of the same programs, called as often",
            )  # fmt: skip
