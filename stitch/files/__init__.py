"""Files: the one room that opens what is read, writes what is written, and locks folders.

Comes in: paths, bytes. Goes out: open files, files that appear whole or not at all, locks that die
with their owner. Must not know: what is in a file.
"""

from stitch.files.bounded_folder import keep_below, mark_used
from stitch.files.folder_lock import FolderLock
from stitch.files.parts import Content, Sink, naming
from stitch.files.reading import (
    Identity,
    files_read,
    head_of,
    identity,
    nearest_file,
    note_standard_input,
    noting_files,
    open_file,
    own_descriptor,
    read_bytes,
    read_text,
    special_kind,
    text_of,
    unreadable,
)
from stitch.files.source import Source, open_source
from stitch.files.spool import Spool, is_compressed
from stitch.files.sweeping import sweep_folder
from stitch.files.writing import (
    STANDARD_OUTPUT,
    FileBatch,
    LineFile,
    make_folder,
    resolved,
    write_added,
    write_file,
)

__all__ = [
    "STANDARD_OUTPUT", "Content", "FileBatch", "FolderLock", "Identity", "LineFile", "Sink",
    "Source", "Spool", "files_read", "head_of", "identity", "is_compressed", "keep_below",
    "make_folder", "mark_used", "naming", "nearest_file", "note_standard_input", "noting_files",
    "open_file", "open_source", "own_descriptor", "read_bytes", "read_text", "resolved",
    "special_kind", "sweep_folder", "text_of", "unreadable", "write_added", "write_file",
]  # fmt: skip
