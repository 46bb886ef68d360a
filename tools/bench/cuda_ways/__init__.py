"""The parts of `tools/bench/cuda.py`: chains, networks in parts, nests, training."""
