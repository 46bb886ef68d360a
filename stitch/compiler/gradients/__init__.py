"""Gradients: forward and backward graphs by the operators' rules, through scans too."""
