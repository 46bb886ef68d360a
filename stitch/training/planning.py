"""Plans for several devices: `stitch.parallel`, a package above this one, loaded on first use."""

from stitch.parallel import ModelCompilationResult, SearchResult, optimize

__all__ = ["ModelCompilationResult", "SearchResult", "optimize"]
