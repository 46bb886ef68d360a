"""Gradients: tables of cases, and how a case is run on our kernels."""
