"""The compile cache: what was compiled once is read from a folder where it would come out the
same.
"""

from stitch.compile_cache.cache import DEFAULT_MAX_NBYTES, CompileCache, FromCache
from stitch.compile_cache.entries import KeptCompilation
from stitch.compile_cache.keys import EntryKey, digest_of, entry_key

__all__ = [
    "DEFAULT_MAX_NBYTES",
    "CompileCache",
    "EntryKey",
    "FromCache",
    "KeptCompilation",
    "digest_of",
    "entry_key",
]
