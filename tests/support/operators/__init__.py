"""Operators: operands from texts, tables of cases, programs of one operation, peers."""
