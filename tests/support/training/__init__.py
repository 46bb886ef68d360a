"""Trainings: small models, and small trainings from the shell."""
