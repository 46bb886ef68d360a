"""Files: open them for reading, write them atomically, lock folders."""

from stitch.files.folder_lock import FolderLock
from stitch.files.reading import (
    Identity,
    Source,
    files_read,
    head_of,
    identity,
    nearest_file,
    note_file,
    noting_files,
    open_file,
    open_source,
    read_bytes,
    read_text,
    special_kind,
    text_of,
    unreadable,
)
from stitch.files.writing import (
    STANDARD_OUTPUT,
    Content,
    Data,
    OutputFiles,
    Sink,
    atomic_write,
    make_folder,
    naming,
    resolved,
    write_files,
)

__all__ = [
    "STANDARD_OUTPUT", "Content", "Data", "FolderLock", "Identity", "OutputFiles", "Sink",
    "Source", "atomic_write", "files_read", "head_of", "identity", "make_folder", "naming",
    "nearest_file", "note_file", "noting_files", "open_file", "open_source",
    "read_bytes", "read_text", "resolved", "special_kind", "text_of",
    "unreadable", "write_files",
]  # fmt: skip
