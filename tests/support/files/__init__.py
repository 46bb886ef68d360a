"""Files: binaries drawn and damaged, ways to save, and processes killed while they do."""
