"""Modules and architectures of torch, and how its results are compared with ours."""
